"""Downloads, against a server on this machine: resume, mirrors, checksums, two processes at once."""

from __future__ import annotations

import gzip
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

import boovae.data
from boovae.data import DATASETS, DataFile, load_stream, write_idx
from boovae.data import datasets as datasets_module
from boovae.data.download import ResumingDownloader, find_file, get_file
from boovae.errors import InputError

CONTENT = np.random.default_rng(0).bytes(300_000)
PACKED = gzip.compress(CONTENT, mtime=0)
FILE = DataFile("data.gz", hashlib.sha256(CONTENT).hexdigest(), hashlib.md5(PACKED).hexdigest())


class Mirror(ThreadingHTTPServer):
    """Serves ``content`` under any name; what it does wrong can be set."""

    daemon_threads = True

    def __init__(self, content: bytes = PACKED) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = content
        self.ranges = True
        self.cut_after: list[int] = []  # how many bytes the next answers send before they break
        self.delay = 0.0
        self.asked: list[str | None] = []  # the Range of every request

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/files"


class Handler(BaseHTTPRequestHandler):
    server: Mirror

    def do_GET(self) -> None:
        mirror = self.server
        wanted = self.headers.get("Range")
        mirror.asked.append(wanted)
        time.sleep(mirror.delay)
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and mirror.ranges else 0
        if start and start >= len(mirror.content):
            self.send_error(416)
            return
        body = mirror.content[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(mirror.content) - 1}/{len(mirror.content)}")
        self.end_headers()
        self.wfile.write(body[: mirror.cut_after.pop(0)] if mirror.cut_after else body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def start_mirror() -> Iterator[type[Mirror]]:
    started: list[Mirror] = []

    class Started(Mirror):
        def __init__(self, content: bytes = PACKED) -> None:
            super().__init__(content)
            threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
            started.append(self)

    yield Started
    for mirror in started:
        mirror.shutdown()
        mirror.server_close()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BOOVAE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.delenv("BOOVAE_DATA", raising=False)
    monkeypatch.setattr(ResumingDownloader.__init__, "__defaults__", (0.0,))  # no pause between attempts
    return tmp_path / "cache"


def dead_address() -> str:
    """Return the address of a server that is gone."""
    with Mirror() as mirror:
        return mirror.url


def test_a_file_is_downloaded_once_into_the_cache(start_mirror: type[Mirror], cache: Path) -> None:
    mirror = start_mirror()
    for _ in range(2):
        assert get_file("set", FILE, [mirror.url]) == cache / "set" / "data.gz"
    assert (cache / "set" / "data.gz").read_bytes() == PACKED
    assert mirror.asked == [None]


def test_a_broken_transfer_resumes_where_it_stopped(start_mirror: type[Mirror]) -> None:
    mirror = start_mirror()
    mirror.cut_after = [100_000, 50_000]
    assert get_file("set", FILE, [mirror.url]).read_bytes() == PACKED
    first, *resumed = (int((wanted or "0").removeprefix("bytes=").rstrip("-")) for wanted in mirror.asked)
    assert first == 0
    assert len(resumed) == 2
    assert 90_000 < resumed[0] <= 100_000
    assert 130_000 < resumed[1] <= 150_000


def test_what_an_earlier_process_left_is_used(start_mirror: type[Mirror], cache: Path) -> None:
    mirror = start_mirror()
    (cache / "set").mkdir(parents=True)
    (cache / "set" / "data.gz.part").write_bytes(PACKED[:77_000])
    assert get_file("set", FILE, [mirror.url]).read_bytes() == PACKED
    assert mirror.asked == ["bytes=77000-"]
    assert not (cache / "set" / "data.gz.part").exists()


@pytest.mark.parametrize("left", [b"stale" * 1000, PACKED + b"too long", PACKED])
def test_a_stale_beginning_is_thrown_away(start_mirror: type[Mirror], cache: Path, left: bytes) -> None:
    mirror = start_mirror()
    (cache / "set").mkdir(parents=True)
    (cache / "set" / "data.gz.part").write_bytes(left)
    assert get_file("set", FILE, [mirror.url]).read_bytes() == PACKED
    assert mirror.asked == [f"bytes={len(left)}-", None]


def test_a_server_without_ranges_is_asked_from_the_start(start_mirror: type[Mirror]) -> None:
    mirror = start_mirror()
    mirror.ranges = False
    mirror.cut_after = [100_000]
    assert get_file("set", FILE, [mirror.url]).read_bytes() == PACKED


def test_a_server_that_always_breaks_is_given_up(start_mirror: type[Mirror]) -> None:
    mirror = start_mirror()
    mirror.ranges = False
    mirror.cut_after = [1000] * 100
    with pytest.raises(InputError, match="could not be downloaded"):
        get_file("set", FILE, [mirror.url])
    assert len(mirror.asked) < 10


def test_a_wrong_checksum_leads_to_the_next_mirror(start_mirror: type[Mirror], cache: Path) -> None:
    wrong, right = start_mirror(b"<html>log in first</html>"), start_mirror()
    assert get_file("set", FILE, [wrong.url, right.url]).read_bytes() == PACKED
    assert (len(wrong.asked), len(right.asked)) == (1, 1)
    (cache / "set" / "data.gz").unlink()
    with pytest.raises(InputError) as refused:
        get_file("set", FILE, [wrong.url])
    found = hashlib.md5(wrong.content).hexdigest()
    assert all(part in str(refused.value) for part in (wrong.url, str(FILE.md5), found))
    assert not (cache / "set" / "data.gz").exists()


def test_a_wrong_mirror_that_breaks_does_not_spoil_the_next(start_mirror: type[Mirror]) -> None:
    wrong, right = start_mirror(b"x" * 5000), start_mirror()
    wrong.ranges = False
    wrong.cut_after = [1000] * 10
    assert get_file("set", FILE, [wrong.url, right.url]).read_bytes() == PACKED


def test_a_dead_mirror_leads_to_the_next(start_mirror: type[Mirror]) -> None:
    assert get_file("set", FILE, [dead_address(), start_mirror().url]).read_bytes() == PACKED


def test_two_processes_at_once_both_get_the_file(start_mirror: type[Mirror], cache: Path) -> None:
    mirror = start_mirror()
    mirror.delay = 0.5
    script = f"from boovae.data.download import DataFile, get_file\nprint(get_file('set', {FILE!r}, [{mirror.url!r}]))"
    source = str(Path(boovae.data.__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": source}
    processes = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    answers = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert answers == [str(cache / "set" / "data.gz")] * 2
    assert (cache / "set" / "data.gz").read_bytes() == PACKED


def test_two_threads_at_once_download_once(start_mirror: type[Mirror]) -> None:
    mirror = start_mirror()
    mirror.delay = 0.2
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.append(get_file("set", FILE, [mirror.url]).read_bytes()))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [PACKED] * 3
    assert mirror.asked == [None]


def test_without_a_network_the_error_says_what_belongs_where(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(InputError) as refused:
        get_file("set", FILE, [dead_address()])
    message = str(refused.value)
    assert all(part in message for part in (str(cache / "set" / "data.gz"), "data_dir", "BOOVAE_DATA"))
    (tmp_path / "mine").mkdir()
    with pytest.raises(InputError, match=str(tmp_path / "mine" / "set" / "data.gz")):
        get_file("set", FILE, [dead_address()], tmp_path / "mine")


def test_a_cache_that_cannot_be_written_is_an_error_that_names_it(
    tmp_path: Path, start_mirror: type[Mirror], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("BOOVAE_CACHE", str(tmp_path / "file"))
    with pytest.raises(InputError, match="BOOVAE_CACHE"):
        get_file("set", FILE, [start_mirror().url])


def test_the_argument_comes_before_the_variable_and_that_before_the_cache(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("argument", "variable", "cache"):
        (tmp_path / folder / "set").mkdir(parents=True)
        (tmp_path / folder / "set" / "data.gz").write_bytes(PACKED)
    assert find_file("set", FILE) == cache / "set" / "data.gz"
    monkeypatch.setenv("BOOVAE_DATA", str(tmp_path / "variable"))
    assert find_file("set", FILE) == tmp_path / "variable" / "set" / "data.gz"
    assert find_file("set", FILE, tmp_path / "argument") == tmp_path / "argument" / "set" / "data.gz"
    (tmp_path / "argument" / "set" / "data.gz").rename(tmp_path / "argument" / "set" / "data")
    assert find_file("set", FILE, tmp_path / "argument") == tmp_path / "argument" / "set" / "data"


def test_a_data_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data_dir .*nowhere: no such folder"):
        load_stream("mnist", data_dir=tmp_path / "nowhere")


def test_a_known_file_with_other_content_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notmnist").mkdir()
    for file in DATASETS["notmnist"].files:
        write_idx(tmp_path / "notmnist" / file.name, np.zeros((3, 2), np.uint8))
    with pytest.raises(InputError, match=f"notmnist-small-images.*{DATASETS['notmnist'].files[0].sha256}"):
        load_stream("notmnist", data_dir=tmp_path)


def test_a_dataset_without_a_trusted_source_says_how_to_make_its_files(cache: Path) -> None:
    assert not DATASETS["notmnist"].is_present()
    with pytest.raises(InputError) as refused:
        load_stream("notmnist")
    place = cache / "notmnist" / "notmnist-small-images-idx3-ubyte.gz"
    assert all(part in str(refused.value) for part in (str(place), "write_idx", "folder:PATH"))


def test_a_dataset_is_downloaded_and_then_present(
    start_mirror: type[Mirror], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same way as the real ones: 12,000 tiny images, served under the four names one by one."""
    arrays = {
        "train-images-idx3-ubyte.gz": np.zeros((11_000, 2, 2), np.uint8),
        "train-labels-idx1-ubyte.gz": np.arange(11_000, dtype=np.uint8) % 2,
        "t10k-images-idx3-ubyte.gz": np.zeros((1_000, 2, 2), np.uint8),
        "t10k-labels-idx1-ubyte.gz": np.arange(1_000, dtype=np.uint8) % 2,
    }
    files, mirror = [], start_mirror()
    for name, array in arrays.items():
        write_idx(tmp_path / name, array)
        packed = (tmp_path / name).read_bytes()
        unpacked = hashlib.sha256(gzip.decompress(packed)).hexdigest()
        files.append(DataFile(name, unpacked, hashlib.md5(packed).hexdigest()))
        mirror.content = packed
        get_file("mnist", files[-1], [mirror.url])
    info = datasets_module.DatasetInfo("mnist", "", "", "", (2, 2), ("a", "b"), tuple(files), (mirror.url,))
    monkeypatch.setitem(DATASETS, "mnist", info)
    assert info.where() == cache / "mnist"
    assert info.is_present()
    stream = load_stream("mnist")
    assert [task.name for task in stream] == ["a", "b"]
    assert stream.split_record["sizes"] == {"train": 1_000, "valid": 10_000, "test": 1_000}


@pytest.mark.parametrize("info", DATASETS.values(), ids=DATASETS)
def test_every_download_has_two_mirrors_and_checksums(info: boovae.data.DatasetInfo) -> None:
    assert not info.mirrors or len(info.mirrors) >= 2
    assert bool(info.mirrors) == all(file.md5 for file in info.files) or not info.files
    assert all(len(file.sha256) == 64 for file in info.files)
