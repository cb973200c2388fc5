"""The command line as people and scripts use it."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.progress import ProgressColumn

from boovae.bench.scheduler import Board
from boovae.cli.arguments import Train
from boovae.cli.main import VERBS, main
from boovae.cli.terminal import print_rows
from boovae.config import CORE, CORE_NAMES
from boovae.errors import InputError, as_flag
from boovae.methods import REGISTRY, resolve
from boovae.replicas.devices import choose_device
from boovae.report.charts import plotly_script
from boovae.runs.progress import Live
from boovae.runs.reading import read_record
from boovae.runs.warnings import find_warnings
from boovae.training.checkpoint import load_checkpoint
from run_folders import events

FAST = [
    "--net",
    "mlp:16",
    "--latent-dim",
    "4",
    "--limit",
    "24",
    "--epochs",
    "3",
    "--batch-size",
    "8",
    "--replicas",
    "2",
    "--samples",
    "20",
    "--generated",
    "60",
]


def command(*words: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    program = [Path(sys.executable).with_name("boovae"), *map(str, words)]
    return subprocess.run(program, capture_output=True, text=True, timeout=120, check=False, **options)  # type: ignore[call-overload, no-any-return]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three tasks, made by the installed command."""
    out = tmp_path_factory.mktemp("runs") / "run"
    done = command("train", "--tasks", "3", *FAST, "--out", out)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^3 +\d", done.stdout, re.MULTILINE), done.stdout
    assert "task 3/3 (2)" in done.stderr
    return out


def test_help_and_version_answer_without_torch() -> None:
    script = "import sys; from boovae.cli.main import main; main(['--help']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    for verb in VERBS:
        assert verb in done.stdout
    assert command("--version").stdout.strip() == "0.1.0"
    module = subprocess.run([sys.executable, "-m", "boovae", "--version"], capture_output=True, text=True, check=True)
    assert module.stdout.strip() == "0.1.0"


HELP = """
import sys
from boovae.cli.main import main
try:
    main(sys.argv[1:])
finally:
    heavy = {"torch", "numpy", "sklearn"} & set(sys.modules)
    assert not heavy, heavy
"""


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_command_answers_without_torch(verb: str) -> None:
    done = subprocess.run([sys.executable, "-c", HELP, verb, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert str(VERBS[verb].kind.__doc__)[:50] in done.stdout


Help = Callable[..., dict[str, str]]


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Help:
    """Return what a command's help says of each flag."""
    monkeypatch.setenv("COLUMNS", "110")

    def asked(*words: str) -> dict[str, str]:
        with pytest.raises(SystemExit) as stop:
            main([*words])
        assert stop.value.code == 0
        found: dict[str, str] = {}
        flag = ""
        for line in (line.strip("│ ") for line in capsys.readouterr().out.splitlines()):
            if match := re.match(r"--[a-z][a-z-]*", line):
                flag = match[0]
                found[flag] = line.removeprefix(flag)
            elif not line or line[0] in "╭╰─":
                flag = ""
            elif flag:
                found[flag] += f" {line}"
        return found

    return asked


def names(kinds: Iterable[Any]) -> set[str]:
    return {as_flag(item.name) for kind in kinds for item in dataclasses.fields(kind)}


def test_help_shows_the_usual_flags_in_groups(flags: Help, capsys: pytest.CaptureFixture[str]) -> None:
    usual = flags("train", "--help")
    assert 20 <= len(usual) <= 30
    assert {"--dataset", "--method", "--epochs", "--net", "--out", "--preset", "--samples"} <= usual.keys()
    assert usual.keys() <= {as_flag(name) for name in CORE_NAMES} | names([Train])
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    said = capsys.readouterr().out
    assert re.findall(r"^\W*(?:(\w+) )?options\W*$", said, re.MULTILINE) == ["", *CORE, "output"]
    assert "`boovae train --method NAME --help` adds the settings of a method" in said
    assert "`boovae train --help-all` shows all" in said


@pytest.mark.parametrize("method", ["boo", "ewc", "boo+distill", "standard"])
def test_help_for_a_method_adds_its_settings(method: str, flags: Help) -> None:
    added = flags("train", "--method", method, "--help").keys() - flags("train", "--help").keys()
    assert added == names(REGISTRY.sections(method))


def test_help_all_shows_every_flag(flags: Help) -> None:
    every = flags("train", "--help-all")
    assert every.keys() == {as_flag(name) for name in CORE_NAMES} | names([Train, *REGISTRY.all_sections()])
    assert all("(default: " in text for text in every.values())


@pytest.mark.parametrize(
    ("words", "preset"),
    [
        (["train"], None),
        (["train", "--dataset", "mnist"], None),
        (["train", "--dataset", "fashion_mnist", "--preset", "paper"], "paper"),
        (["train", "--method", "ewc", "--dataset", "mnist"], None),
    ],
)
def test_help_shows_the_defaults_that_hold(words: list[str], preset: str | None, flags: Help) -> None:
    named = {word.removeprefix("--"): value for word, value in itertools.pairwise(words) if word.startswith("--")}
    named.pop("preset", None)
    resolved = resolve(named, preset=preset)
    settings = resolved.flat()
    shown = flags(*words, "--help")
    for name in ("epochs", "batch_size", "learning_rate", "net", "latent_dim", "samples", "dataset", "method"):
        default = "from the data" if name in resolved.chosen else settings[name]
        assert f"(default: {default})" in shown[as_flag(name)]
    assert "(default: 500)" in flags("tune", "--dataset", "mnist", "--help")["--samples"]
    assert "(default: 2)" in flags("replay", "--help")["--classes-per-task"]


@pytest.mark.parametrize("verb", ["train", "tune", "latent-map", "replay"])
@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--boo-steps", "3"], "--boo-steps"),
        (["--boo-steps=3"], "--boo-steps"),
        (["--no-boo-reencode"], "--boo-reencode"),
    ],
)
def test_a_flag_of_another_method_is_refused(
    verb: str, words: list[str], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([verb, "--method", "ewc", *words])
    assert stop.value.code == 2
    said = f"{flag} is a setting of method 'boo', and 'ewc' does not read it; leave it out"
    assert capsys.readouterr().err == f"boovae: {said}\n"


def test_settings_of_other_methods_in_a_file_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "all.toml").write_text("boo_steps = 3\newc_strength = 7\n")
    words = [
        "train",
        "--config",
        str(tmp_path / "all.toml"),
        "--method",
        "ewc",
        "--tasks",
        "1",
        *FAST,
        "--metric",
        "nll",
    ]
    main([*words, "--quiet", "--out", str(tmp_path / "run")])
    own = tomllib.loads((tmp_path / "run" / "config.toml").read_text())["method_settings"]
    assert own == {"ewc_strength": 7.0, "ewc_decay": 1.0, "ewc_images": 1000}


def test_the_flag_for_strengths_names_what_took_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["train", "--method", "ewc", "--strengths", "ewc_strength=3"])
    assert stop.value.code == 2
    assert "each setting of a method has its own flag, for example --ewc-strength 3" in capsys.readouterr().err


def test_a_run_folder_holds_everything(run: Path) -> None:
    for name in ("config.toml", "environment.json", "metrics.jsonl", "timing.jsonl", "report.html"):
        assert (run / name).stat().st_size > 0
    pictures = ["components.png", *(f"task_0{t}.png" for t in range(3))]
    assert sorted(path.name for path in (run / "samples").iterdir()) == pictures
    logged = events(run)
    assert [event["event"] for event in logged if event["event"] not in ("epoch", "components")] == [
        "run",
        *["choices", "task_start", "task_end", "evaluation"] * 3,
    ]
    last = logged[-1]
    assert len(last["nll"]["per_task"]) == last["seen"] == 3
    assert len(last["diversity"]["proportions"][0]) == 3
    assert {"epochs": "3", "binarize": "none", "dataset": "digits"}.items() <= read_record(run).config.items()
    environment = json.loads((run / "environment.json").read_text())
    assert environment["command"].startswith("boovae train --tasks 3")


def test_the_same_command_again_does_nothing_new(run: Path) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    main(["train", "--tasks", "3", *FAST, "--out", str(run), "--quiet"])
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_run_of_version_0_1_0_is_continued_and_measured(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = Path(shutil.copytree(run, tmp_path / "old"))
    tables = tomllib.loads((old / "config.toml").read_text())
    method, _ = tables.pop("method"), tables.pop("chosen")
    flat = {"method": method, **{name: value for table in tables.values() for name, value in table.items()}}
    flat |= {"ewc_strength": 7.0, "mog_fit": "em", "strengths": []}  # it wrote the settings of all methods
    (old / "config.toml").write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in flat.items()))
    before = (old / "metrics.jsonl").read_bytes()
    main(["train", "--tasks", "3", *FAST, "--out", str(old), "--quiet"])
    assert (old / "metrics.jsonl").read_bytes() == before
    capsys.readouterr()
    main(["eval", str(old), "--quiet", "--json"])
    assert json.loads(capsys.readouterr().out) == events(run)[-1]


def test_eval_agrees_with_the_run_and_prints_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["eval", str(run), "--quiet", "--json"])
    again = json.loads(capsys.readouterr().out)
    last = events(run)[-1]
    assert again == last
    main(["eval", str(run), "--metric", "nll", "--samples", "200", "--quiet", "--json"])
    more = json.loads(capsys.readouterr().out)
    assert more["nll"]["samples"] == 200
    assert "diversity" not in more
    assert more["nll"]["pooled"] != last["nll"]["pooled"]


def test_eval_compares_only_what_was_measured_with_as_many_samples(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["eval", str(run), "--samples", "40", "--metric", "nll", "--json"])
    assert json.loads(capsys.readouterr().out)["forgetting"]["own"] == [[None, None], [None, None], [0.0, 0.0]]


def test_eval_says_first_what_the_run_warns_of_and_how_many_samples_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run")
    main(["train", "--tasks", "2", *FAST, "--samples", "5", "--metric", "nll", "--out", out])
    warnings = [f"warning: {warning.text}" for warning in find_warnings(read_record(Path(out)))]
    capsys.readouterr()
    assert any("effective importance samples" in line for line in warnings)  # 5 are always few
    main(["eval", out, "--metric", "nll"])
    said = capsys.readouterr()
    assert said.err.splitlines()[: len(warnings)] == warnings
    assert "effective samples" in said.out
    assert re.search(r"- \(cannot be judged: effective samples \d\.\d of 5\)", said.out)
    main(["eval", out, "--metric", "nll", "--json", "--quiet", "--fit-posterior"])
    said = capsys.readouterr()
    assert said.err == ""
    assert np.array(json.loads(said.out)["nll"]["fitted"]).tolist() == [[1.0] * 2] * 2


def test_eval_refuses_no_samples_and_a_run_without_a_finished_task(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("samples", "generated"):
        with pytest.raises(SystemExit):
            main(["eval", str(run), f"--{name}", "0"])
        assert f"--{name} is 0" in capsys.readouterr().err
    process = begun(tmp_path / "stopped", "task 1/3")
    process.terminate()
    process.communicate(timeout=60)
    with pytest.raises(SystemExit):
        main(["eval", str(tmp_path / "stopped")])
    assert "no task is finished yet" in capsys.readouterr().err


def test_sample_writes_a_picture(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    main(["sample", str(run), "--n", "6", "--out", str(tmp_path / "grid.png"), "--replica", "1"])
    assert Image.open(tmp_path / "grid.png").size[0] > 16
    assert capsys.readouterr().out.strip() == str(tmp_path / "grid.png")


def test_sample_writes_pixels_and_another_seed_draws_others(run: Path, tmp_path: Path) -> None:
    found = []
    for seed in ("0", "0", "1"):
        main(["sample", str(run), "--n", "6", "--task", "1", "--seed", seed, "--out", str(tmp_path / "images.npy")])
        found.append(np.load(tmp_path / "images.npy"))
    assert found[0].shape == (6, 8, 8)
    assert found[0].min() >= 0
    assert found[0].max() <= 1
    assert (found[0] == found[1]).all()
    assert (found[0] != found[2]).any(axis=(1, 2)).all()


def test_sample_refuses_a_kind_of_file_that_it_cannot_write(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["sample", str(run), "--out", "grid.jpg"])
    assert "--out grid.jpg: samples are written as a picture (.png) or an array (.npy)" in capsys.readouterr().err


def test_report_of_two_runs(run: Path, tmp_path: Path) -> None:
    main(["report", str(run), str(run), "--out", str(tmp_path / "both.html")])
    assert "</html>" in (tmp_path / "both.html").read_text()


def test_where_pages_cannot_be_made_a_run_ends_with_a_line_and_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    plotly_script.cache_clear()
    out = tmp_path / "run"
    main(["train", "--tasks", "1", *FAST, "--metric", "nll", "--quiet", "--out", str(out)])
    said = capsys.readouterr()
    assert f"no report: plotly.offline is not installed here; elsewhere: boovae report {out}" in said.err
    assert "bytes kept" in said.out
    assert not (out / "report.html").exists()
    monkeypatch.undo()
    main(["report", str(out)])
    assert (out / "report.html").exists()


def test_the_numbers_of_a_run_as_csv(run: Path, tmp_path: Path) -> None:
    main(["report", str(run), "--csv", str(tmp_path / "run.csv")])
    head, *_ = (tmp_path / "run.csv").read_text().split("tasks_seen,metric,task,seed,value\n")
    assert "# command: boovae train --tasks 3" in head
    assert "# seeds: 0 1" in head
    assert "# commit: " in head
    rows = [line.split(",") for line in (tmp_path / "run.csv").read_text().splitlines() if line.startswith("3,nll,,")]
    last = events(run)[-1]
    assert [float(row[-1]) for row in rows] == last["nll"]["pooled"]


def test_names_of_the_user_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    name = "[/b] [old] :cat:"
    print_rows(("task",), [(name,)])
    assert capsys.readouterr().out.splitlines()[1].strip() == name
    for bars, column in ((Live()._bars, 3), (Board(Path())._bars, 0)):
        bars.stop()
        bars.add_task(name, text=name)
        shown = bars.columns[column]
        assert isinstance(shown, ProgressColumn)
        assert str(shown(bars.tasks[-1])) == name


def test_the_smallest_tasks_there_are_can_be_measured(tmp_path: Path) -> None:
    images, labels = np.random.default_rng(0).random((33, 8, 8)), np.repeat([0, 1], (3, 30))
    np.savez(tmp_path / "few.npz", images=images, labels=labels)  # of the first task one image for each purpose
    words = ["--dataset", f"npz:{tmp_path}/few.npz", "--out", str(tmp_path / "run"), *FAST, "--epochs", "1"]
    main(["train", *words, "--quiet"])
    first, last = (event for event in events(tmp_path / "run") if event["event"] == "evaluation")
    assert first["frechet"]["pooled"] == [None, None]  # one image has no spread
    assert all(distance > 0 for distance in last["frechet"]["pooled"])


class Terminal(io.StringIO):
    """Where bars are shown, and the cursor is hidden while they are."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--tasks", "99"],  # refused before anything is shown
        ["eval", "nowhere"],
        ["latent-map", *FAST, "--tasks", "1", "--latent-dim", "2"],  # broken off in the middle
        ["replay", *FAST, "--tasks", "1", "--curve", "boo"],
    ],
)
def test_the_cursor_comes_back_however_a_command_ends(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise KeyboardInterrupt

    screen = Terminal()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("boovae.runs.progress.Watch.epoch", broken)
    monkeypatch.setattr(sys, "stderr", screen)
    with pytest.raises(SystemExit):
        main(words)
    assert screen.getvalue().count("\x1b[?25l") == screen.getvalue().count("\x1b[?25h")


def test_lists_of_datasets_and_methods(capsys: pytest.CaptureFixture[str]) -> None:
    main(["datasets"])
    assert "fashion_mnist" in capsys.readouterr().out
    main(["methods"])
    assert "joint" in capsys.readouterr().out


def test_flags_win_over_the_file_and_the_file_over_what_is_chosen(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        'epochs = 1\nbatch_size = 4\nnet = "mlp:16"\ntasks = 1\nlimit = 20\nsamples = 5'
    )
    out = tmp_path / "run"
    words = ["train", "--config", str(tmp_path / "mine.toml"), "--batch-size", "5", "--metric", "nll", "--quiet"]
    main([*words, "--out", str(out)])
    config = (out / "config.toml").read_text()
    assert "batch_size = 5\n" in config  # the flag
    assert "epochs = 1\n" in config  # the file
    assert "latent_dim = 10\n" in config  # chosen from the data


def test_training_on_an_own_folder_of_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import numpy as np
    from PIL import Image

    generator = np.random.default_rng(0)
    for name in ("cats", "dogs"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for index in range(12):
            pixels = generator.integers(0, 256, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "pets" / name / f"{index}.png")
    words = [word for word in FAST if word not in ("--limit", "24")]
    main(["train", "--dataset", f"folder:{tmp_path / 'pets'}", *words, "--out", str(tmp_path / "run"), "--json"])
    assert json.loads(capsys.readouterr().out)["diversity"]["classes"] == [0, 1]


BAD = {
    "unknown command": (["trian"], "did you mean 'train'"),
    "unknown dataset": (["train", "--dataset", "mnits"], "did you mean 'mnist'"),
    "a path without its kind": (["train", "--dataset", "mine.npz"], "a path needs its kind: npz:mine.npz"),
    "unknown method": (["train", "--method", "standrad"], "did you mean 'standard'"),
    "method twice": (["train", "--method", "standard+standard"], "names a method twice"),
    "joint with another": (["train", "--method", "joint+standard"], "use it alone"),
    "unknown net": (["train", "--net", "resnet"], "--net"),
    "no replicas": (["train", "--replicas", "0"], "--replicas is 0"),
    "negative rate": (["train", "--learning-rate", "-1"], "--learning-rate"),
    "too many tasks": (["train", "--tasks", "11"], "--tasks is 11"),
    "unknown class": (["train", "--class-order", "3", "12"], "class_order"),
    "no such config": (["train", "--config", "nowhere.toml"], "nowhere.toml"),
    "no run": (["eval", "nowhere"], "not a run folder"),
    "resume nothing": (["train", "--resume", "always", "--out", "nowhere"], "--resume always"),
    "no cuda": (["train", "--device", "cuda"], "--device"),
    "no device for this": (["train", "--device", "meta"], "--device meta is not supported"),
    "nothing to report": (["report", "nowhere"], "nowhere"),
    "unwritable": (["train", "--out", "/proc/boovae"], "--out"),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_bad_input_is_refused_with_a_remedy_before_any_work(
    case: tuple[list[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    words, message = case
    with pytest.raises(SystemExit) as stop:
        main(words)
    output = capsys.readouterr()
    assert stop.value.code == 2
    assert message in output.err
    assert "Traceback" not in output.err
    assert output.out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert choose_device("cuda:0").index == 0
    with pytest.raises(InputError) as refused:
        choose_device("cuda:1")
    assert refused.value.spelled(as_flag).startswith("--device cuda:1: there are 1 CUDA devices here")


def test_other_settings_in_the_same_folder_are_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--tasks", "2", *FAST, "--out", str(run)])
    assert "--tasks 3 there, 2 here" in capsys.readouterr().err


def test_a_folder_in_use_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from boovae.runs.run import Run

    with Run.open(run), pytest.raises(SystemExit):
        main(["train", "--tasks", "3", *FAST, "--out", str(run)])
    assert "in use by another process" in capsys.readouterr().err


LONG = ["train", *FAST, "--epochs", "60", "--tasks", "3", "--early-stop", "100", "--metric", "nll"]


def begun(out: Path, where: str = "task 2/3") -> subprocess.Popen[str]:
    """Start a run and wait until it is at its second task, or elsewhere."""
    program = [str(Path(sys.executable).with_name("boovae")), *LONG, "--out", str(out)]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(where):
            return process
    raise AssertionError(f"the run ended before {where}")


def test_a_reader_that_has_read_enough_ends_a_command_quietly_and_loses_no_report(run: Path, tmp_path: Path) -> None:
    boovae = Path(sys.executable).with_name("boovae")
    for words in (
        ["train", "--tasks", "1", *FAST, "--json", "--out", str(tmp_path / "run")],
        ["eval", str(run), "--json"],
    ):
        child = subprocess.Popen([boovae, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()  # as `| head` does
        said = child.stderr.read()
        assert child.wait(timeout=120) == 141
        assert "Traceback" not in said
        assert "BrokenPipe" not in said
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_run_goes_on_where_it_was(number: signal.Signals, tmp_path: Path) -> None:
    main([*LONG, "--out", str(tmp_path / "whole"), "--quiet"])
    process = begun(tmp_path / "stopped")
    time.sleep(0.2)
    os.kill(process.pid, number)
    _, errors = process.communicate(timeout=60)
    if number != signal.SIGKILL:
        assert process.returncode == 1
        assert "the same command continues it" in errors
    checkpoint = load_checkpoint(tmp_path / "stopped" / "checkpoint")
    assert checkpoint is not None
    assert len(checkpoint[1]["sizes"]) < 3
    main([*LONG, "--out", str(tmp_path / "stopped"), "--quiet"])
    whole, stopped = (tmp_path / name / "metrics.jsonl" for name in ("whole", "stopped"))
    assert whole.read_bytes() == stopped.read_bytes()


def test_ctrl_c_ends_a_command_that_keeps_nothing_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(VERBS, "methods", dataclasses.replace(VERBS["methods"], run=stopped))
    with pytest.raises(SystemExit) as stop:
        main(["methods"])
    assert stop.value.code == 130
    assert capsys.readouterr().err == "boovae: stopped\n"


def test_nothing_that_executes_on_load_is_read_or_written() -> None:
    # Weights that others publish come as torch files; `weights_only` reads tensors and nothing else.
    torch_files = r"torch\.save\(|torch\.load\((?!.*weights_only=True)"
    forbidden = re.compile(rf"import (pickle|dill|joblib|cloudpickle)|{torch_files}|allow_pickle=True")
    sources = list((Path(__file__).parents[2] / "src").rglob("*.py"))
    assert len(sources) > 20
    assert [path for path in sources if forbidden.search(path.read_text())] == []
