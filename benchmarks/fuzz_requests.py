"""Send thousands of broken requests to the server: none may crash it or cause a server error (5xx).

`fuzz` sends them with any client, in the tests within one process; `fuzz_server` starts `boovae serve`, sends them over
the network and stops it.
"""

from __future__ import annotations

import base64
import json
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from boovae.errors import InputError

if TYPE_CHECKING:
    import httpx2 as httpx

#: Addresses and their methods; those with a body (`POSTED`) are requested more often.
ADDRESSES = {"/": "GET", "/app.js": "GET", "/style.css": "GET", "/api/model": "GET", "/api/components/0": "GET"}
POSTED = ("/api/sample", "/api/path", "/api/look")
METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "NONSENSE")
TYPES = (
    "image/png",
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data",
    "x",
    "application/json;;",
)
KEYS = ("n", "seed", "task", "component", "start", "end", "frames", "z", "\ud800", "__proto__", "")
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 24, 10**6, -(10**30), 10**400, 1e308, -0.5, float("nan"), float("inf")),
    *("", "0", "x" * 3000, "\x00", "\ud800", "../../etc/passwd", [], {}, [[]], [0.0] * 4, [1e39] * 4, [0.0] * 5000),
)
#: A grey picture of one pixel, to be damaged.
PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg==")


class Fuzzed(NamedTuple):
    """How many requests were sent, how often each status came back, and what failed."""

    tried: int
    statuses: Counter[int]
    failures: list[str]


def fuzz(client: httpx.Client, count: int, seed: int = 0) -> Fuzzed:
    """Send `count` random requests; each must succeed or be refused as a client error (4xx)."""
    chance, failures = random.Random(seed), []
    statuses: Counter[int] = Counter()
    latent_dim = client.get("/api/model").json()["latent_dim"]
    for number in range(count):
        request = _request(chance, latent_dim)
        words = f"{number}: {request['method']} {request['url'][:80]!r} {request['content'][:80]!r}"
        try:
            status = client.request(**request).status_code
        except Exception as error:  # the connection broke, or the response is invalid
            failures.append(f"{words}: {error!r}")
            continue
        statuses[status] += 1
        if not 200 <= status < 500:
            failures.append(f"{words}: status {status}")
    return Fuzzed(count, statuses, failures)


def _request(chance: random.Random, latent_dim: int) -> dict[str, Any]:
    path = chance.choice((*ADDRESSES, *POSTED * 4))
    method = ADDRESSES.get(path, "POST") if chance.random() < 0.9 else chance.choice(METHODS)
    kind = "image/png" if path == "/api/look" else "application/json"
    content = _body(chance, path, latent_dim)
    if chance.random() < 0.1:
        # Two slashes at the start would name another host.
        parts = ("..", "%2e%2e", "/", "%00", "%ff", "etc", "\\", "api", "é", "0")
        path = "/~" + "".join(chance.choice(parts) for _ in range(6))
    if chance.random() < 0.2:
        path += chance.choice(("?invert=1", "?invert=x", "?invert=%00", "?" + "a=1&" * 50, "/-1", "/" + "9" * 5000))
    headers = {"content-type": kind if chance.random() < 0.9 else chance.choice(TYPES)}
    if chance.random() < 0.04:
        headers["host"] = chance.choice(("evil.example", "", "127.0.0.1:99999", "[::1", "localhost."))
    if chance.random() < 0.04:
        headers["origin"] = chance.choice(("null", "http://evil.example", "http://[", "x"))
    return {"method": method, "url": path, "headers": headers, "content": content}


def _body(chance: random.Random, path: str, latent_dim: int) -> bytes:
    """Return a body for the address that is slightly or completely wrong."""
    kind = chance.random()
    if kind < 0.7 and path == "/api/look":
        return _damaged(chance, PNG)
    if kind < 0.7:
        place = {"z": [chance.gauss(0, 2) for _ in range(latent_dim)], "task": chance.choice((0, 1, None))}
        whole: dict[str, Any] = {"start": place, "end": dict(place), "frames": 3} if path == "/api/path" else {"n": 2}
        for where in (whole, place):
            if chance.random() < 0.4:
                where[chance.choice(KEYS)] = _value(chance, 2)
        return json.dumps(whole).encode()
    if kind < 0.8:
        return _damaged(chance, b'{"n": 3, "seed": 1}')
    if kind < 0.85:
        return b"[" * chance.choice((10, 20_000)) + b"]" * 10
    return chance.choice((b"", b"null", b"NaN", b"\xff\xfe", chance.randbytes(chance.randrange(2000)), b" " * 70_000))


def _value(chance: random.Random, depth: int) -> Any:
    if depth and chance.random() < 0.3:
        return {key: _value(chance, depth - 1) for key in chance.sample(KEYS, chance.randrange(4))}
    return chance.choice(ODD)


def _damaged(chance: random.Random, content: bytes) -> bytes:
    """Flip, cut, or repeat some bytes."""
    changed = bytearray(content)
    for _ in range(chance.randrange(4)):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    if chance.random() < 0.2:
        del changed[chance.randrange(len(changed)) :]
    return bytes(changed) * (2 if chance.random() < 0.1 else 1)


def fuzz_server(run: Path, count: int, seed: int = 0, device: str = "cpu") -> Fuzzed:
    """Fuzz the server of a run; afterwards it must answer as before, stop on SIGTERM, and have logged no error."""
    try:
        import fastapi  # noqa: F401 (the server needs it)
        import httpx2 as httpx
    except ImportError as error:
        raise InputError(f"{error.name} is not installed: pip install 'boovae[test]'") from error

    words = [sys.executable, "-m", "boovae", "serve", str(run), "--port", "0", "--samples", "50"]
    words += ["--device", device]
    with (  # to a file: a verbose server would fill a pipe and block
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True) as server,
    ):
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            if not address:
                server.wait(timeout=60)
                return Fuzzed(0, Counter(), [f"the server does not start: {_text(log)}"])
            with httpx.Client(base_url=address, timeout=60, trust_env=False) as client:
                before = client.post("/api/sample", json={"n": 3}).content
                tried, statuses, failures = fuzz(client, count, seed)
                if client.post("/api/sample", json={"n": 3}).content != before:
                    failures.append("the same request has another answer afterwards")
            server.send_signal(signal.SIGTERM)
            server.wait(timeout=60)
            logged = _text(log).splitlines()
        finally:
            server.kill()
    # uvicorn logs this for a request that is not HTTP; any other line is an unhandled exception.
    failures += [f"the server logged: {line}" for line in logged if not line.endswith("Invalid HTTP request received.")]
    if server.returncode:
        failures.append(f"the server ended with {server.returncode}")
    return Fuzzed(tried, statuses, failures)


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
