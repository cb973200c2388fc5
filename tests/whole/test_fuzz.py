"""Anything at all, in a fixed budget: readers, settings and the command line end well or with one kind of error."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from boovae.cli import main as cli
from boovae.config import CORE, CORE_NAMES, Settings, to_toml
from boovae.data import Stream, read_folder, read_idx, read_npz
from boovae.errors import InputError
from boovae.methods import REGISTRY, from_mapping, resolve
from boovae.training.checkpoint import load_checkpoint
from hostile_files import _data_files, damaged

budget = settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Good files of every kind that is read."""
    made = _data_files(tmp_path_factory.mktemp("good") / "data")
    return {name: path.read_bytes() for name, path in made.items()}


def read(folder: Path, name: str, content: bytes) -> None:
    path = folder / name
    path.write_bytes(content)
    if path.suffix == ".npz":
        read_npz(path)
    elif name.startswith("picture"):
        read_folder(folder)
    else:
        read_idx(path)


@budget
@given(seed=st.integers(0, 2**32))
@pytest.mark.filterwarnings("ignore")  # Pillow warns of odd pictures that it can still read
def test_damaged_files_are_read_or_refused(
    seed: int, files: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    chance = random.Random(seed)
    name = chance.choice(sorted(files))
    with contextlib.suppress(InputError):
        read(tmp_path_factory.mktemp("file"), name, damaged(files[name], chance))


@budget
@given(content=st.binary(max_size=300), name=st.sampled_from(["a.npz", "a.idx", "picture.png", "picture.jpg"]))
def test_random_bytes_are_refused(content: bytes, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(InputError):
        read(tmp_path_factory.mktemp("file"), name, content)


@budget
@given(head=st.binary(max_size=200), tensors=st.binary(max_size=200))
def test_random_checkpoints_are_refused(head: bytes, tensors: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / "0.json").write_bytes(head)
    (folder / "0.safetensors").write_bytes(tensors)
    with pytest.raises(InputError):
        load_checkpoint(folder)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = sorted({*CORE_NAMES, *REGISTRY.owners(), *CORE, "method_settings", "strengths"})


@budget
@given(values=st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=10), ANYTHING, max_size=5))
def test_any_mapping_is_a_configuration_or_refused(values: dict[str, Any]) -> None:
    with contextlib.suppress(InputError):
        assert from_mapping(values).training.epochs >= 1


@budget
@given(seed=st.integers(0, 2**32))
def test_a_damaged_configuration_is_read_or_refused(seed: int, tmp_path: Path) -> None:
    content = to_toml(Settings(), REGISTRY.sections(Settings().method))
    (tmp_path / "run.toml").write_bytes(damaged(content.encode(), random.Random(seed)))
    with contextlib.suppress(InputError):
        assert resolve({}, tmp_path / "run.toml").training.replicas >= 1


SIZES = st.integers(0, 3)


@budget
@given(
    tasks=st.lists(
        st.tuples(SIZES, SIZES, SIZES).flatmap(
            lambda shape: st.sampled_from(["u1", "f4", "f8", "i8", "?", "c8", "U3", "O"]).map(
                lambda kind: np.zeros((4 * shape[0], *shape[1:]), kind)
            )
        )
        | ANYTHING,
        max_size=3,
    ),
    options=st.fixed_dictionaries(
        {}, optional={"test": ANYTHING, "valid": ANYTHING, "shape": st.none(), "seed": ANYTHING}
    ),
)
def test_any_arrays_are_a_stream_or_refused(tasks: list[Any], options: dict[str, Any]) -> None:
    with contextlib.suppress(InputError):
        assert len(Stream.from_tasks(tasks, **options)) == len(tasks)


WORDS = st.sampled_from(
    [
        *cli.VERBS,
        *(f"--{name.replace('_', '-')}" for name in NAMES),
        *[
            "--out",
            "--config",
            "--preset",
            "paper",
            "--resume",
            "never",
            "--json",
            "--quiet",
            "--help",
            "--help-all",
            "-h",
            "--n",
            "-1",
            "0",
            "3",
            "1e9",
            "nan",
            "inf",
            "-",
            "--",
            "=",
            "ü",
            "../x",
        ],
        *[
            "digits",
            "mnist",
            "npz:",
            "folder:/",
            "boo+distill",
            "boo+boo",
            "+",
            "mlp:0",
            "mlp:",
            "cuda:99",
            "None",
            "True",
        ],
    ]
)


@settings(budget, max_examples=25)
@given(
    verb=st.sampled_from(sorted(cli.VERBS)) | st.text(max_size=8),
    words=st.lists(WORDS | st.text(max_size=8), max_size=6),
)
def test_any_words_are_a_command_or_refused(verb: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code: object = 0
    with monkeypatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as errors:
        quiet = {name: dataclasses.replace(verb, run=lambda *arguments: None) for name, verb in cli.VERBS.items()}
        patch.setattr(cli, "VERBS", quiet)
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                cli.main([verb, *words])
            except SystemExit as stop:
                code = stop.code
    assert code in (0, None, 2), errors.getvalue()
    assert "Traceback" not in errors.getvalue()
