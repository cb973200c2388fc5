"""The server among strangers: broken, hostile and many requests, and its end."""

from __future__ import annotations

import re
import signal
import socket
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from boovae.cli.main import main
from boovae.errors import InputError
from boovae.runs.run import Run
from boovae.runs.train import load_trainer
from boovae.serve.app import HEADERS, REQUEST_BYTES, UPLOAD_BYTES, serve
from boovae.serve.play import MOST_PIXELS, Player
from fuzz_requests import fuzz
from run_folders import content
from served_run import ADDRESS, Served, picture


@pytest.fixture
def boo(served: Callable[[str], Served]) -> Served:
    return served("boo+distill")


# --- pictures -------------------------------------------------------------------------------------------------------


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def bomb(width: int, height: int) -> bytes:
    """Return a short PNG that claims to be huge."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(1 << 20))) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("sent", "status", "words"),
    [
        (b"", 422, "required"),
        (b"no picture", 422, "cannot be read as a picture"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", 422, "cannot be read as a picture"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", 422, "cannot be read as a picture"),
        (picture(np.zeros((9, 9), np.uint8))[:40], 422, "cannot be read as a picture"),
        (bomb(MOST_PIXELS // 1000 + 1, 1000), 422, "make it smaller"),
        (bomb(100_000, 100_000), 422, "too large to be unpacked"),
        (bytes(UPLOAD_BYTES + 1), 413, f"{UPLOAD_BYTES:,} bytes"),
    ],
)
def test_what_is_no_fit_picture_is_refused(boo: Served, sent: bytes, status: int, words: str) -> None:
    answer = boo.client.post("/api/look", content=sent, headers={"content-type": "image/png"})
    assert answer.status_code == status
    assert words in answer.json()["error"]


# --- requests -------------------------------------------------------------------------------------------------------

Z = {"z": [0.0] * 4}


@pytest.mark.parametrize(
    ("path", "request_content", "words"),
    [
        ("/api/sample", {"n": 0}, "n"),
        ("/api/sample", {"n": 101}, "n"),
        ("/api/sample", {"n": "5"}, "n"),
        ("/api/sample", {"n": True}, "n"),
        ("/api/sample", {"n": 2.5}, "n"),
        ("/api/sample", {"seed": -1}, "seed"),
        ("/api/sample", {"seed": 1 << 60}, "seed"),
        ("/api/sample", {"task": 2}, "there are tasks 0 to 1"),
        ("/api/sample", {"task": -1}, "there are tasks 0 to 1"),
        ("/api/sample", {"task": 0, "component": 99}, "has no component"),
        ("/api/sample", {"component": 0}, "has no component"),
        ("/api/sample", {"folder": "/etc"}, "folder"),
        ("/api/sample", [], "body"),
        ("/api/path", {"start": Z}, "end"),
        ("/api/path", {"start": Z, "end": Z, "frames": 1}, "frames"),
        ("/api/path", {"start": Z, "end": {"z": [0.0] * 3}}, "4 dimensions"),
        ("/api/path", {"start": Z, "end": {"z": [0.0, 0.0, 0.0, 1e39]}}, "less than or equal to 10000"),
        ("/api/path", {"start": Z, "end": {"z": ["0"] * 4}}, "z"),
        ("/api/path", {"start": Z | {"task": 7}, "end": Z}, "there are tasks 0 to 1"),
    ],
)
def test_malformed_requests_are_answered_with_what_is_wrong(
    boo: Served, path: str, request_content: Any, words: str
) -> None:
    answer = boo.client.post(path, json=request_content)
    assert answer.status_code == 422
    assert words in answer.json()["error"]


def test_requests_that_are_no_json_are_refused(boo: Served) -> None:
    json_type = {"content-type": "application/json"}
    for sent in (b"{", b"\xff", b'{"n": NaN}', b"[" * 30_000, b'{"seed": ' + b"9" * 5000 + b"}"):
        assert boo.client.post("/api/sample", content=sent, headers=json_type).status_code in (400, 422), sent[:20]
    too_long = b'{"n": 1}' + b" " * REQUEST_BYTES
    assert boo.client.post("/api/sample", content=too_long, headers=json_type).status_code == 413
    in_pieces = (too_long[start : start + 9999] for start in range(0, len(too_long), 9999))
    assert boo.client.post("/api/sample", content=in_pieces, headers=json_type).status_code == 413


def test_a_method_with_one_prior_offers_no_tasks(served: Callable[[str], Served]) -> None:
    client = served("standard").client
    assert client.post("/api/sample", json={"task": 0}).status_code == 422
    assert client.get("/api/components/0").status_code == 422
    assert served("multihead").client.get("/api/components/0").json() == {"components": []}
    assert served("multihead").client.post("/api/path", json={"start": Z, "end": Z}).status_code == 422


@pytest.mark.parametrize(
    "path",
    [
        *("/config.toml", "/metrics.jsonl", "/../config.toml", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/app.py"),
        *("/..%2fapp.py", "/api/../app.py", "/api/components/..%2f..%2fetc%2fpasswd", "/static/app.js", "/docs"),
        *("/openapi.json", "/app.js/../play.py", "/index.html%00.js", "/\\..\\app.py", "/file:///etc/passwd"),
    ],
)
def test_no_file_of_the_host_is_reachable(boo: Served, path: str) -> None:
    scope_paths = boo.client.get(path)
    assert scope_paths.status_code in (404, 422)
    assert set(scope_paths.json()) == {"error"}


def test_every_answer_has_the_security_headers(boo: Served) -> None:
    for path, status in (("/", 200), ("/api/model", 200), ("/nothing", 404)):
        answer = boo.client.get(path)
        assert answer.status_code == status
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    assert "default-src 'self'" in HEADERS["Content-Security-Policy"]


def test_other_sites_cannot_use_the_server(boo: Served) -> None:
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", ""):
        assert boo.client.get("/api/model", headers={"host": host}).status_code == 400, host
    for host in ("localhost", "127.0.0.1:8000", "[::1]:8000"):
        assert boo.client.get("/api/model", headers={"host": host}).status_code == 200, host
    for origin in ("http://evil.example", "null", "http://127.0.0.1:9999"):
        assert boo.client.post("/api/sample", json={}, headers={"origin": origin}).status_code == 403, origin
    assert boo.client.post("/api/sample", json={"n": 1}, headers={"origin": ADDRESS}).status_code == 200


def test_the_page_asks_nobody_else() -> None:
    for name in ("index.html", "app.js", "style.css"):
        text = files("boovae.serve").joinpath(name).read_text()
        assert not re.search(r"(https?:)?//[a-z0-9]+\.[a-z]|@import|url\(", text), name
    assert not re.search(r"<script>|style=|\son\w+=", files("boovae.serve").joinpath("index.html").read_text())


@pytest.mark.parametrize("method", ["boo+distill", "multihead"])
def test_hundreds_of_broken_requests_do_no_harm(served: Callable[[str], Served], method: str) -> None:
    run = served(method)
    before = run.sample(n=3)
    tried, statuses, failures = fuzz(run.client, 300)
    assert tried == 300
    assert not failures
    assert statuses[200] > 50  # some got through to the model
    assert statuses[422] > 50
    assert run.sample(n=3) == before
    assert content(run.folder) == run.before


def test_many_at_once_get_what_one_alone_gets(boo: Served) -> None:
    def ask(seed: int) -> Any:
        if seed % 3:
            return boo.sample(n=4, seed=seed)
        return boo.look(picture(np.full((8, 8), 5 * seed, np.uint8)))

    alone = [ask(seed) for seed in range(12)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, range(12))) == alone


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def process(boo: Served) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-m", "boovae", "serve", str(boo.folder), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        yield started
        started.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_told_to_stop(
    boo: Served, process: subprocess.Popen[str], number: signal.Signals
) -> None:
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    port = int(re.fullmatch(r"http://127\.0\.0\.1:(\d+)/", address)[1])  # type: ignore[index]

    def raw(sent: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(sent)
            return b"".join(iter(lambda: connection.recv(65536), b""))

    def get(path: bytes) -> bytes:
        return raw(b"GET " + path + b" HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nConnection: close\r\n\r\n" % port)

    assert b"Samples</h2>" in get(b"/")
    with Run.open(boo.folder):
        pass  # others may use the folder meanwhile
    for nonsense in (
        b"\x00\xff\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost\r\n\r\n",
    ):
        assert raw(nonsense).startswith(b"HTTP/1.1 4"), nonsense
    with socket.create_connection(("127.0.0.1", port)) as connection:  # somebody hangs up in the middle
        connection.sendall(b"POST /api/look HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\ntoo short")
    for traversal in (b"/../../../../etc/passwd", b"/%2e%2e/config.toml", b"../config.toml"):
        assert get(traversal).startswith(b"HTTP/1.1 4"), traversal
    assert b'"run"' in get(b"/api/model")  # still there
    process.send_signal(number)
    assert process.wait(20) == 0
    assert process.stderr is not None
    said = process.stderr.read().splitlines()
    assert all(line.endswith("Invalid HTTP request received.") for line in said), said


def test_what_cannot_be_served_is_refused(
    boo: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(*words: str) -> str:
        with pytest.raises(SystemExit) as end:
            main(["serve", *words])
        assert end.value.code == 2
        return capsys.readouterr().err

    folder = str(boo.folder)
    assert "not a run folder" in refusal(str(tmp_path))
    assert "--replica is 2" in refusal(folder, "--replica", "2")
    assert "--samples is 0" in refusal(folder, "--samples", "0")
    assert "--port is 70000" in refusal(folder, "--port", "70000")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1:{port}" in refusal(folder, "--port", str(port))
    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.delitem(sys.modules, "boovae.serve.app")
    assert "pip install 'boovae[serve]'" in refusal(folder)


def test_a_run_without_a_finished_task_is_refused(boo: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    run, trainer = load_trainer(boo.folder, "cpu")
    with run:
        monkeypatch.setattr(trainer, "sizes", [])
        with pytest.raises(InputError, match="has not finished its first task"):
            Player(run, trainer)


def test_others_are_let_in_only_if_asked_for(
    boo: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("uvicorn.Server.run", lambda server, sockets: asked.append((server.config.app, sockets)))
    for host, status in (("127.0.0.1", 400), ("0.0.0.0", 200)):
        serve(boo.player, host, 0)
        client = TestClient(asked[-1][0], base_url="http://elsewhere.example")
        assert client.get("/api/model").status_code == status
        assert ("anyone who can reach" in capsys.readouterr().err) == (status == 200)
