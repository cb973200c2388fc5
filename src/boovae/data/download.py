"""Find the files of a dataset on disk, or download them."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from boovae.errors import InputError

DATA_VARIABLE = "BOOVAE_DATA"
CACHE_VARIABLE = "BOOVAE_CACHE"
LARGEST = 4 << 30  # no file of a dataset is larger; a server that sends more is not trusted
CHUNK = 1 << 13  # small, because a broken connection loses the current chunk


@dataclass(frozen=True)
class DataFile:
    """A file of a dataset: its name, the SHA-256 of its unpacked content, the MD5 of the public gzip file.

    The content is checked on every reading, so a recompressed copy works like the original. Without an MD5 there is no
    public file to download.
    """

    name: str
    sha256: str
    md5: str | None = None


def cache_folder() -> Path:
    """Return the folder for downloads: BOOVAE_CACHE or the platform's default."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    import pooch

    return Path(pooch.os_cache("boovae"))


def search_folders(data_dir: str | Path | None = None) -> list[Path]:
    """Return the folders to search: ``data_dir`` or else BOOVAE_DATA, then the cache."""
    chosen = data_dir or os.environ.get(DATA_VARIABLE)
    return [Path(chosen).expanduser(), cache_folder()] if chosen else [cache_folder()]


def find_file(dataset: str, file: DataFile, data_dir: str | Path | None = None) -> Path | None:
    """Return the path of a file on this disk, compressed or not, or None."""
    names = (file.name, file.name.removesuffix(".gz"))
    paths = (folder / dataset / name for folder in search_folders(data_dir) for name in names)
    return next((path for path in paths if path.is_file()), None)


def get_file(
    dataset: str, file: DataFile, mirrors: Sequence[str], data_dir: str | Path | None = None, remedy: str = ""
) -> Path:
    """Return the path of a file; download it into the cache if it is not on this disk.

    ``mirrors`` are addresses of folders that hold the file; ``remedy`` ends the error if no download succeeds.
    """
    if data_dir is not None and not Path(data_dir).expanduser().is_dir():
        raise InputError(f"{{data_dir}} {data_dir}: no such folder; it should hold {dataset}/{file.name}")
    found = find_file(dataset, file, data_dir) or _download(file, mirrors, cache_folder() / dataset)
    if isinstance(found, Path):
        return found
    lines = [
        f"dataset '{dataset}': {file.name} is not on this disk and could not be downloaded",
        *(f"  {reason}" for reason in found),
        f"Put it at {search_folders(data_dir)[0] / dataset / file.name}",
        f"or name the folder that holds {dataset}/{file.name} with {{data_dir}} or {DATA_VARIABLE}.",
    ]
    raise InputError("\n".join([*lines, remedy] if remedy else lines))


def _download(file: DataFile, mirrors: Sequence[str], folder: Path) -> Path | list[str]:
    """Return the path of a file downloaded from one of the mirrors, or the reasons why each of them failed."""
    import filelock
    import pooch

    if not mirrors or file.md5 is None:
        return ["there is no public copy with a known checksum"]
    pooch.get_logger().setLevel("WARNING")
    reasons = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # One process downloads; others that want the same file wait, then find it.
        with filelock.FileLock(folder / f"{file.name}.lock", timeout=1800):
            for mirror in mirrors:
                try:
                    return _retrieve(mirror, file, folder)
                except (OSError, ValueError) as error:  # no connection, an error page, a wrong checksum
                    reasons.append(f"{mirror}: {error}")
    except (OSError, NotImplementedError) as error:  # the latter: a file system that has no locks
        reasons.append(f"{folder}: {error}; choose another folder with {CACHE_VARIABLE}")
    return reasons


def _retrieve(mirror: str, file: DataFile, folder: Path) -> Path:
    import pooch

    part = folder / f"{file.name}.part"
    had_part = part.exists()
    try:
        path = pooch.retrieve(
            mirror.rstrip("/") + "/" + file.name,
            known_hash=f"md5:{file.md5}",
            fname=file.name,
            path=folder,
            downloader=ResumingDownloader(part),
        )
    except (OSError, ValueError):
        if had_part and not part.exists():  # a stale partial download failed, not this mirror
            return _retrieve(mirror, file, folder)
        raise
    return Path(path)


class ResumingDownloader:
    """Download for pooch, and resume a broken transfer where it stopped.

    Bytes are collected in ``part``, which outlives this process; after a broken connection the transfer is resumed
    as long as each attempt makes progress.
    """

    def __init__(self, part: Path, pause: float = 0.5) -> None:
        self.part = part
        self.pause = pause

    def __call__(self, url: str, output_file: str | Path, pooch: object) -> None:
        """Download ``url`` to ``output_file``; the signature is pooch's."""
        import requests

        while True:
            before = self._size()
            try:
                self._transfer(url)
                break
            except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError):
                if self._size() <= before:
                    raise
                time.sleep(self.pause)
        self.part.replace(output_file)

    def _size(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def _transfer(self, url: str) -> None:
        import requests

        have = self._size()
        headers = {"Accept-Encoding": "identity"}  # the stored bytes, to which the checksum belongs
        if have:
            headers["Range"] = f"bytes={have}-"
        with requests.get(url, headers=headers, stream=True, timeout=(10, 30)) as answer:
            resumed = answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")
            if answer.status_code == 416 or (answer.status_code == 206 and not resumed):
                self.part.unlink()  # not the beginning of this file
                raise requests.ConnectionError(f"cannot resume at byte {have}")
            answer.raise_for_status()
            self._write(answer, have if answer.status_code == 206 else 0)

    def _write(self, answer: Any, start: int) -> None:
        import requests

        length = answer.headers.get("Content-Length")
        total = start + int(length) if length else None
        with self.part.open("ab" if start else "wb") as file, progress_bar(DownloadColumn()) as progress:
            bar = progress.add_task(self.part.stem, total=total, completed=start)
            for chunk in answer.iter_content(CHUNK):
                file.write(chunk)
                progress.advance(bar, len(chunk))
                if file.tell() > LARGEST:
                    self.part.unlink()
                    raise ValueError(f"received more than {LARGEST:,} bytes; no dataset is that large")
        if total is not None and self._size() != total:
            raise requests.ConnectionError(f"received {self._size()} of {total} bytes")


def progress_bar(amount: ProgressColumn) -> Progress:
    """Return a progress bar on stderr that disappears when done; if stderr is not a terminal, show nothing."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
