"""The server of `boovae serve`: the three files of the page, and a JSON API. Nothing on the host's disk is reachable:
the files are read once, when the server starts.
"""

import contextlib
import ipaddress
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Annotated, Any

import uvicorn
from fastapi import Body, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import Field
from pydantic_core import to_json
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from boovae.errors import InputError
from boovae.report.frame import environment
from boovae.serve.play import Exchanged, Player, Point

#: Host names that requests may use; others are refused, which stops DNS rebinding by pages of other sites.
LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
#: Files of the page and their media types, by path.
PAGE = {
    "/": ("index.html", "text/html"),
    "/app.js": ("app.js", "text/javascript"),
    "/style.css": ("style.css", "text/css"),
}
#: Most bytes of a request: of one with a picture, and of all others.
UPLOAD_BYTES, REQUEST_BYTES = 8 << 20, 1 << 16
MOST_IMAGES, MOST_FRAMES = 100, 120
#: Most concurrent requests; others get 503 and may be sent again.
MOST_REQUESTS = 64
#: Seconds that requests have to finish once the server is stopped.
GRACE_SECONDS = 5
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class SampleRequest(Exchanged):
    """What to sample; the same request gives the same images."""

    n: int = Field(24, ge=1, le=MOST_IMAGES)
    seed: int = Field(0, ge=0, lt=1 << 53)
    task: int | None = None
    component: int | None = None


class PathRequest(Exchanged):
    """Two points, and the number of images on the way between them."""

    start: Point
    end: Point
    frames: int = Field(41, ge=2, le=MOST_FRAMES)


def make_app(player: Player, hosts: Sequence[str] = LOOPBACK) -> ASGIApp:
    """Return the application; it answers only requests to these host names ("*": to any)."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)
    for kind_of_error in (InputError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind_of_error, _answered)
    for address, (name, kind) in PAGE.items():
        app.routes.append(Route(address, Response(_content(name), media_type=kind), methods=["GET"]))

    @app.get("/api/model")
    def model() -> Response:
        limits = {"images": MOST_IMAGES, "frames": MOST_FRAMES, "bytes": UPLOAD_BYTES}
        return _json(player.about() | {"limits": limits})

    @app.get("/api/components/{task}")
    def components(task: int) -> Response:
        return _json({"components": player.gallery(task)})

    @app.post("/api/sample")
    def sample(ask: SampleRequest) -> Response:
        return _json({"images": player.sample(ask.n, ask.seed, ask.task, ask.component)})

    @app.post("/api/path")
    def path(ask: PathRequest) -> Response:
        return _json({"images": player.path(ask.start, ask.end, ask.frames)})

    @app.post("/api/look")
    def look(content: Annotated[bytes, Body(media_type="image/*")], invert: bool = False) -> Response:
        return _json(player.look(content, invert=invert))

    return guarded(app)


def guarded(app: ASGIApp) -> ASGIApp:
    """Wrap the application: limit request sizes, refuse other sites, and set headers on every response."""

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        left = most = UPLOAD_BYTES if scope["path"] == "/api/look" else REQUEST_BYTES

        async def bounded() -> Message:
            """Stop reading a request that exceeds its limit, whatever its Content-Length says."""
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(413, f"a request may have {most:,} bytes")
            return message

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != headers.get("host"):
            await _error(403, "requests are accepted only from this page itself")(scope, bounded, with_headers)
        else:
            await app(scope, bounded, with_headers)

    return guard


# --- responses --------------------------------------------------------------------------------------------------------


def _answered(request: Request, error: Exception) -> JSONResponse:
    """Answer every kind of error with {"error": what is wrong}."""
    if isinstance(error, HTTPException):
        return _error(error.status_code, str(error.detail))
    if isinstance(error, RequestValidationError):
        # The input is not repeated: it may be long, or not even text.
        found = [f"{'.'.join(map(str, one['loc']))[:60]}: {one['msg'][:200]}" for one in error.errors()[:3]]
        return _error(422, "; ".join(found))
    return _error(422, str(error))


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message.encode("utf-8", "replace").decode()}, status)


def _content(name: str) -> bytes:
    if name == "index.html":
        return environment().get_template(f"serve/{name}").render().encode()
    return files("boovae.serve").joinpath(name).read_bytes()


def _json(content: Any) -> Response:
    """Return a JSON response, with null where a number is not finite."""
    return Response(to_json(content, inf_nan_mode="null"), media_type="application/json")


# --- the server -------------------------------------------------------------------------------------------------------


def serve(player: Player, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Print the page's address and answer until Ctrl-C or SIGTERM; port 0 takes a free one."""
    app = make_app(player, _names(host))
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        limit_concurrency=MOST_REQUESTS,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    with _listening(host, port) as listener, _ended_by_signals():
        shown = f"[{host}]" if ":" in host else host
        print(f"http://{shown}:{listener.getsockname()[1]}/", flush=True)
        if not _is_loopback(host):
            print(f"anyone who can reach {shown} can use this page; --host 127.0.0.1 keeps it private", file=sys.stderr)
        uvicorn.Server(config).run(sockets=[listener])


def _listening(host: str, port: int) -> socket.socket:
    if not 0 <= port < 1 << 16:
        raise InputError(f"{{port}} is {port}; it must be 0 to 65535, where 0 takes a free one")
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise InputError(
            f"cannot listen on {host}:{port} ({error.strerror}): try {{port=0}} or another {{host}}"
        ) from error
    # A response is written in two parts; with Nagle's algorithm the second would wait 40 ms for the first one's ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _names(host: str) -> tuple[str, ...]:
    """Return the host names that requests may use: those of this machine only, or any if all interfaces are bound."""
    if _is_loopback(host):
        return (*LOOPBACK, host)
    return ("*",) if host in ("0.0.0.0", "::") else (host,)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """End normally on Ctrl-C and SIGTERM: uvicorn finishes pending requests, then raises the signal again."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield
    finally:
        signal.signal(signal.SIGTERM, before)
