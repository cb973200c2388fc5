"""Nothing lost, nothing let in: kills, hostile files, bad input, long runs. Prints a table; ends with 1 on any loss.

    python benchmarks/drill.py             # all of it, a quarter of an hour on two cores
    python benchmarks/drill.py --reduced   # what continuous integration runs

See docs/reliability.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bad_input import CASES, documented
from bad_input import attempt as try_bad_input
from boovae.errors import BoovaeError
from boovae.show import print_rows
from hostile_files import bombs, try_files
from kills import RUNS, kill_bench, kill_training
from soak import METHODS as SOAKED
from soak import Soak, soak


@dataclass(frozen=True)
class Size:
    """How much is tried."""

    kills: int
    runs: tuple[str, ...]
    bench_kills: int
    files: int
    tasks: int
    soaked: tuple[str, ...]


FULL = Size(kills=60, runs=tuple(RUNS), bench_kills=6, files=400, tasks=200, soaked=tuple(SOAKED))
REDUCED = Size(kills=4, runs=("boo+distill", "ewc"), bench_kills=0, files=25, tasks=16, soaked=("boo+distill",))


@dataclass
class Sheet:
    """The table as it grows, and all that went wrong."""

    rows: list[tuple[str, str, str]] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)

    def add(self, what: str, tried: str, result: str, losses: Sequence[str] = ()) -> None:
        """Put a row into the table."""
        self.rows.append((what, tried, f"{result}, {len(losses)} LOST" if losses else result))
        self.losses += losses
        print(f"{what}: {tried}; {self.rows[-1][2]}", file=sys.stderr, flush=True)


def drill(size: Size, folder: Path, *, device: str = "cpu", seed: int = 0) -> Sheet:
    """Do everything, in folders under `folder`."""
    os.environ.setdefault("BOOVAE_CACHE", str(folder / "cache"))
    sheet = Sheet()
    _kills(sheet, size, folder, device, seed)
    _files(sheet, size, folder, seed)
    _bad_input(sheet, folder)
    _long_runs(sheet, size, device)
    return sheet


def _kills(sheet: Sheet, size: Size, folder: Path, device: str, seed: int) -> None:
    runs = {name: RUNS[name] for name in size.runs}
    tally = kill_training(folder / "kills", size.kills, runs, device=device, seed=seed)
    where = ", ".join(f"{count} {moment}" for moment, count in tally.kills.most_common())
    sheet.add("kills survived", f"{tally.kills.total()} ({where})", f"{len(runs)} methods")
    sheet.add("resumed runs", str(tally.identical + len(tally.losses)), f"{tally.identical} identical", tally.losses)
    bench = kill_bench(folder / "bench", size.bench_kills, seed) if size.bench_kills else None
    if bench is not None:
        tried = f"{bench.identical + len(bench.losses)} ({bench.kills.total()} kills)"
        sheet.add("resumed benches", tried, f"{bench.identical} identical", bench.losses)


def _files(sheet: Sheet, size: Size, folder: Path, seed: int) -> None:
    outcome = alone(try_files, folder / "files", size.files, seed)
    if isinstance(outcome, str):
        sheet.add("corrupted files", "", "", [f"the process that reads them died: {outcome}"])
    else:
        result = f"{outcome.refused} refused, {outcome.harmless} harmless, {len(outcome.crashes)} crashed"
        tried = ", ".join(f"{count} {kind}" for kind, count in outcome.tried.items())
        sheet.add("corrupted files", f"{outcome.tried.total()} ({tried})", result, outcome.crashes)
    found = alone(_refused_bombs, folder / "bombs")
    losses = [found] if isinstance(found, str) else [f"{name} was not refused: {how}" for name, how in found if how]
    sheet.add("decompression bombs", str(len(found)), f"{len(found) - len(losses)} refused", losses)


def _refused_bombs(folder: Path) -> list[tuple[str, str]]:
    results = []
    for name, read in bombs(folder).items():
        try:
            read()
            results.append((name, "it was read"))
        except BoovaeError:
            results.append((name, ""))
        except Exception as error:
            results.append((name, f"{type(error).__name__}: {error}"))
    return results


def _bad_input(sheet: Sheet, folder: Path) -> None:
    losses = []
    for number, (name, expected) in enumerate(documented().items()):
        problem = try_bad_input(CASES[name], expected, folder / "input" / str(number))
        losses += [f"{name}: {problem}"] if problem else []
    tried = len(documented())
    sheet.add("bad inputs", str(tried), f"{tried - len(losses)} as documented", losses)


def _long_runs(sheet: Sheet, size: Size, device: str) -> None:
    for method in size.soaked:
        result: Soak | str = alone(soak, method, size.tasks, device)
        if isinstance(result, str):
            sheet.add(f"{method}", f"{size.tasks} tasks", "", [f"{method}: the process died: {result}"])
            continue
        growth = f"leak {result.leak / 1024:+.1f} KiB per task, {result.resident[-1] / 2**20:,.0f} MiB in the end"
        if device != "cpu":
            growth += f", {result.device_leak / 1024:+.1f} KiB per task on the GPU"
        pace = f"the last tasks took {result.growth:.1f} times as long as the first"
        losses = [result.problem] if result.problem else []
        sheet.add(f"{method}, tasks in sequence", str(size.tasks), f"{growth}; {pace}", losses)


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns in a process of its own; if that dies, how it died."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        return f"exit code {process.exitcode}"
    finally:
        process.join()


def _answer(sender: Connection, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    sender.send(function(*arguments))


def main() -> None:
    """Run the drill and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--reduced", action="store_true", help="what continuous integration runs: under a minute")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--seed", type=int, default=0, help="of the kills and of the damage")
    parser.add_argument("--keep", type=Path, help="a new folder for all files; thrown away if not given")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if arguments.keep is None else arguments.keep
        size = REDUCED if arguments.reduced else FULL
        sheet = drill(size, folder, device=arguments.device, seed=arguments.seed)
    print_rows(("what", "tried", "result"), sheet.rows)
    print(
        f"{len(sheet.losses)} losses in {time.monotonic() - began:.0f} s on {arguments.device}, seed {arguments.seed}"
    )
    for loss in sheet.losses:
        print(loss)
    raise SystemExit(1 if sheet.losses else 0)


if __name__ == "__main__":
    main()
