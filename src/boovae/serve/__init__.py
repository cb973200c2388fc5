"""`boovae serve`: a small local page to play with a trained model."""

from __future__ import annotations

import contextlib
import ipaddress
import signal
import socket
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

from boovae.errors import InputError

if TYPE_CHECKING:
    from boovae.serve.play import Player

#: Most concurrent requests; others get 503 and may be sent again.
MOST_REQUESTS = 64
#: Seconds that requests have to finish once the server is stopped.
GRACE_SECONDS = 5


def require_server() -> None:
    """Refuse to start if the web framework is not installed."""
    for package in ("fastapi", "uvicorn"):
        if find_spec(package) is None:
            raise InputError(f"{package} is not installed: pip install 'boovae[serve]'")


def serve(player: Player, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Print the page's address and answer until Ctrl-C or SIGTERM; port 0 takes a free one."""
    import uvicorn

    from boovae.serve.app import make_app

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
    from boovae.serve.app import LOOPBACK

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
