from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from boovae.data.tasks import Stream
from boovae.errors import InputError
from boovae.metrics import cache, classifier, classifier_training
from boovae.metrics.cache import read_cached, write_cached
from boovae.metrics.classifier import UNCLASSIFIED, Classifier
from boovae.metrics.classifier_training import trained_classifier
from boovae.training import checkpoint
from conftest import Killed


def bars(shape: Sequence[int] = (8, 8), labels: Sequence[int] = (0, 1, 2), n: int = 40) -> Stream:
    """One task per label; class i has a bright bar at its own place, in noise."""
    rng = np.random.default_rng(0)
    tasks = []
    for i, label in enumerate(labels):
        images = rng.random((n, *shape), dtype=np.float32) * 0.4
        images[:, ..., 1 + 2 * i : 3 + 2 * i] += 0.6
        tasks.append((images, np.full(n, label)))
    return Stream.from_tasks(tasks)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Nets this small only get slower when threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> tuple[Stream, Path, bytes]:
    """A stream, the name of its classifier's cache file and the file's content."""
    stream, folder = bars(labels=(0, 1)), tmp_path_factory.mktemp("cache")
    trained_classifier(stream, device="cpu", cache_dir=folder)
    (file,) = folder.iterdir()
    return stream, Path(file.name), file.read_bytes()


def pooled_test(stream: Stream) -> tuple[Tensor, Tensor]:
    return torch.cat([t.test.images for t in stream]), torch.cat([t.test.labels for t in stream])


def never(message: str) -> None:
    raise AssertionError(f"trained although cached: {message}")


@pytest.mark.parametrize("shape", [(8, 8), (8,)])
def test_learns_images_and_flat_features_with_any_labels(shape: tuple[int, ...], tmp_path: Path) -> None:
    stream = bars(shape, labels=(1, 4, 9))
    net = trained_classifier(stream, device="cpu", cache_dir=tmp_path)
    images, labels = pooled_test(stream)
    assert net.classes == (1, 4, 9)
    assert net.classify_features(net.features(images), classes=net.classes).tolist() == labels.tolist()
    assert net.accuracy == 1.0


def test_a_constant_feature_does_no_harm(tmp_path: Path) -> None:
    stream = bars((9,), labels=(0, 1))
    for task in stream:
        for split in (task.train, task.valid, task.test):
            split.images[:, 8] = 0.3
    net = trained_classifier(stream, device="cpu", cache_dir=tmp_path)
    assert net.accuracy == 1.0
    assert net.logits(torch.full((1, 9), 0.7)).isfinite().all()


def test_same_seed_same_weights_and_the_global_random_state_is_untouched(tmp_path: Path) -> None:
    stream = bars()
    before = torch.get_rng_state()
    one = trained_classifier(stream, device="cpu", cache_dir=tmp_path / "1")
    torch.rand(7)  # must not matter
    state = torch.get_rng_state()
    two = trained_classifier(stream, device="cpu", cache_dir=tmp_path / "2")
    three = trained_classifier(stream, seed=1, device="cpu", cache_dir=tmp_path / "1")
    again = trained_classifier(stream, device="cpu", cache_dir=tmp_path / "1")
    assert one.digest == two.digest == again.digest
    assert one.digest != three.digest
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(before, state)


def test_second_call_comes_from_the_cache_and_answers_the_same(tmp_path: Path) -> None:
    stream, lines = bars(), list[str]()
    first = trained_classifier(stream, device="cpu", cache_dir=tmp_path, progress=lines.append)
    second = trained_classifier(stream, device="cpu", cache_dir=tmp_path, progress=never)
    assert lines
    assert "validation accuracy" in lines[-1]
    assert second.accuracy == first.accuracy
    assert second.classes == first.classes
    assert torch.equal(first.logits(stream[0].test.images), second.logits(stream[0].test.images))
    assert [path.suffix for path in tmp_path.iterdir()] == [".safetensors"]


def test_other_data_is_another_classifier(tmp_path: Path) -> None:
    trained_classifier(bars(), device="cpu", cache_dir=tmp_path)
    trained_classifier(bars(n=41), device="cpu", cache_dir=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_slice_gets_the_classifier_of_the_whole_dataset(tmp_path: Path) -> None:
    stream = bars()
    part = trained_classifier(stream[:1], device="cpu", cache_dir=tmp_path)
    assert part.classes == (0, 1, 2)
    assert trained_classifier(stream, device="cpu", cache_dir=tmp_path, progress=never).digest == part.digest


def test_the_order_of_the_tasks_does_not_change_the_weights(tmp_path: Path) -> None:
    stream = bars()
    other = replace(stream, tasks=stream.tasks[::-1])
    assert other.digest == stream.digest
    one = trained_classifier(stream, device="cpu", cache_dir=tmp_path / "1")
    two = trained_classifier(other, device="cpu", cache_dir=tmp_path / "2")
    assert one.digest == two.digest


def damage_weights(good: bytes) -> bytes:
    return good[:-3] + bytes([good[-3] ^ 1]) + good[-2:]


@pytest.mark.parametrize(
    "damage",
    [
        lambda good: b"",
        lambda good: b"not a classifier",
        lambda good: good[: len(good) // 2],
        damage_weights,
        lambda good: good.replace(b'\\"seed\\\\\\": 0', b'\\"seed\\\\\\": 1'),
        lambda good: good.replace(b'"boovae"', b'"voobae"'),
    ],
    ids=["empty", "garbage", "truncated", "flipped bit", "other key", "no description"],
)
def test_a_damaged_cache_file_is_trained_again_with_a_warning(
    damage: Callable[[bytes], bytes],
    cached: tuple[Stream, Path, bytes],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stream, name, content = cached
    assert damage(content) != content
    (tmp_path / name).write_bytes(damage(content))
    lines: list[str] = []
    net = trained_classifier(stream, device="cpu", cache_dir=tmp_path, progress=lines.append)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "damaged" in caplog.text
    assert lines
    assert net.accuracy == 1.0
    caplog.clear()
    trained_classifier(stream, device="cpu", cache_dir=tmp_path, progress=never)
    assert (tmp_path / name).read_bytes() == content
    assert not caplog.records


def test_a_cache_that_cannot_be_written_only_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    net = trained_classifier(bars(labels=(0, 1)), device="cpu", cache_dir=tmp_path / "file" / "cache")
    assert net.accuracy == 1.0
    assert "not cached" in caplog.text


def test_of_two_that_need_it_at_once_one_trains_and_the_other_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, trained = threading.Event(), []
    really_train = classifier_training._train

    def train(*arguments: Any) -> Classifier:
        training.set()
        time.sleep(0.2)  # the other one comes meanwhile
        trained.append(threading.current_thread().name)
        return really_train(*arguments)

    monkeypatch.setattr(classifier_training, "_train", train)
    stream = bars(labels=(0, 1))
    first = threading.Thread(target=trained_classifier, args=(stream,), kwargs={"device": "cpu", "cache_dir": tmp_path})
    first.start()
    training.wait()
    net = trained_classifier(stream, device="cpu", cache_dir=tmp_path)
    first.join()
    assert trained == [first.name]
    assert net.accuracy == 1.0


def test_waiting_is_reported_and_can_be_left_and_another_dataset_does_not_wait(tmp_path: Path) -> None:
    stream = bars(labels=(0, 1))
    trained_classifier(stream, device="cpu", cache_dir=tmp_path)
    (cached,) = tmp_path.glob("*.safetensors")
    cached.unlink()

    class LeftError(Exception):
        pass

    def leave(text: str) -> None:
        raise LeftError(text)

    with cached.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(LeftError, match="waiting for another process"):
            trained_classifier(stream, device="cpu", cache_dir=tmp_path, progress=leave)
        lines: list[str] = []
        trained_classifier(bars(labels=(0, 1), n=41), device="cpu", cache_dir=tmp_path, progress=lines.append)
    assert not any("waiting" in line for line in lines)
    assert not cached.exists()


def test_an_interrupted_write_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(self: Path, target: Path) -> Path:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", full_disk)
    trained_classifier(bars(labels=(0, 1)), device="cpu", cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


# --- an interrupted training ----------------------------------------------------------------------------------------


class Steps:
    """Counts the steps of trainings, and dies before one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done, self.last = 0, -1
        really_step = classifier_training._Training.step

        def step(*arguments: Any) -> None:
            if self.done == self.last:
                raise Killed
            really_step(*arguments)
            self.done += 1

        monkeypatch.setattr(classifier_training._Training, "step", step)
        monkeypatch.setattr(checkpoint, "CHECKPOINT_SECONDS", 0.0)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(monkeypatch)


EPOCHS, STEPS = 20, 3  # of three times 40 bars


def interrupted(stream: Stream, folder: Path, steps: Steps, after: int) -> Path:
    """Kill a training after `after` steps; return the file of its state."""
    steps.done, steps.last = 0, after
    with pytest.raises(Killed):
        trained_classifier(stream, device="cpu", cache_dir=folder)
    steps.done, steps.last = 0, -1
    (kept,) = folder.glob("*.training")
    return kept


@pytest.mark.parametrize("shape", [(8, 8), (8,)])
@pytest.mark.parametrize("after", [1, STEPS, 9 * STEPS, 9 * STEPS + 1, EPOCHS * STEPS - 1])
def test_a_killed_training_continues_and_ends_with_the_same_weights(
    shape: tuple[int, ...], after: int, steps: Steps, tmp_path: Path
) -> None:
    stream, lines = bars(shape), list[str]()
    whole = trained_classifier(stream, device="cpu", cache_dir=tmp_path / "whole")
    assert steps.done == EPOCHS * STEPS
    interrupted(stream, tmp_path / "killed", steps, after)
    resumed = trained_classifier(stream, device="cpu", cache_dir=tmp_path / "killed", progress=lines.append)
    assert steps.done == EPOCHS * STEPS - after
    assert len(lines) == EPOCHS - after // STEPS
    assert (resumed.digest, resumed.accuracy) == (whole.digest, whole.accuracy)
    assert [path.suffix for path in (tmp_path / "killed").iterdir()] == [".safetensors"]


def forged(kept: Path, **changes: Tensor) -> bytes:
    """Return what was kept with other tensors and a good checksum."""
    with safe_open(kept, framework="pt") as file:
        key = json.loads(file.metadata()["boovae"])["key"]
    tensors = read_cached(kept, key, lambda tensors, about: tensors, "damaged")
    assert tensors
    assert write_cached(kept, key, {**tensors, **changes}, "lost")
    return kept.read_bytes()


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept: b"",
        lambda kept: b"not a training",
        lambda kept: kept.read_bytes()[:-9],
        lambda kept: damage_weights(kept.read_bytes()),
        lambda kept: kept.read_bytes().replace(b"cpu", b"cup"),
        lambda kept: forged(kept, done=torch.tensor(10**6)),
        lambda kept: forged(kept, score=torch.zeros(3)),
    ],
    ids=["empty", "garbage", "truncated", "flipped bit", "other device", "too many steps", "other shape"],
)
def test_a_damaged_training_starts_over_with_a_warning(
    damage: Callable[[Path], bytes], steps: Steps, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stream = bars()
    kept = interrupted(stream, tmp_path, steps, 9)
    content = damage(kept)
    kept.write_bytes(content)
    net = trained_classifier(stream, device="cpu", cache_dir=tmp_path)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "damaged and starts over" in caplog.text
    assert steps.done == EPOCHS * STEPS
    assert net.digest == trained_classifier(stream, device="cpu", cache_dir=tmp_path / "other").digest
    assert not kept.exists()


def test_what_is_left_of_a_training_that_is_over_is_removed(steps: Steps, tmp_path: Path) -> None:
    stream = bars()
    kept = interrupted(stream, tmp_path, steps, 9)
    content = kept.read_bytes()
    trained_classifier(stream, device="cpu", cache_dir=tmp_path)
    kept.write_bytes(content)  # killed before it was removed
    kept.with_name(f".{kept.name}.12ab.tmp").write_bytes(b"half")
    trained_classifier(stream, device="cpu", cache_dir=tmp_path, progress=never)
    assert [path.suffix for path in tmp_path.iterdir()] == [".safetensors"]


def test_a_quick_training_writes_nothing_but_the_classifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, really_write = list[str](), cache.write_cached

    def write(path: Path, *arguments: Any, **about: Any) -> bool:
        written.append(path.suffix)
        return really_write(path, *arguments, **about)

    monkeypatch.setattr(classifier_training, "write_cached", write)
    trained_classifier(bars(), device="cpu", cache_dir=tmp_path)
    assert written == [".safetensors"]


def test_the_environment_moves_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("BOOVAE_CACHE", "~/cache")  # as for datasets
    trained_classifier(bars(labels=(0, 1)), device="cpu")
    assert len(list((tmp_path / "home" / "cache" / "classifiers").glob("*.safetensors"))) == 1


@pytest.mark.parametrize(
    "shape", [(8, 8), (28, 28), (9, 30), (3, 32, 32), (1, 64, 64), (3, 100, 100), (5,), (4, 4), (3, 5, 5)]
)
def test_answers_have_the_shape_of_the_question(shape: tuple[int, ...]) -> None:
    net = Classifier(shape, classes=range(4))
    size = int(np.prod(shape))
    assert net.logits(torch.rand(2, 3, size)).shape == (2, 3, 4)
    assert net.features(torch.rand(2, 3, size)).shape == (2, 3, 128)
    assert net.classify_features(net.features(torch.rand(2, 3, size)), classes=[0, 2]).shape == (2, 3)
    assert net.logits(torch.rand(size)).shape == (4,)
    assert net.logits(torch.rand(0, size)).shape == (0, 4)


def test_the_head_on_the_features_gives_the_logits() -> None:
    net = Classifier((8, 8), classes=range(3))
    images = torch.rand(6, 64)
    torch.testing.assert_close(net.head(net.features(images)), net.logits(images))


def test_chunks_do_not_change_the_answer_nor_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Classifier((8, 8), classes=range(3)).train()
    images = torch.rand(2, 50, 64, dtype=torch.float64)
    whole = net.logits(images)
    monkeypatch.setattr(classifier, "_CPU_CHUNK_VALUES", 64 * 7)
    torch.testing.assert_close(net.logits(images), whole)
    assert net.training
    assert not whole.requires_grad
    torch.testing.assert_close(net.logits(images[1, 3]), whole[1, 3])


def test_labels_are_restricted_to_the_classes_seen() -> None:
    net = Classifier((8, 8), classes=(2, 5, 7))
    images = torch.rand(200, 64)
    logits = net.logits(images)
    expected = torch.where(logits[:, 0] >= logits[:, 2], 2, 7)
    assert net.classify_features(net.features(images), classes=(7, 2)).tolist() == expected.tolist()
    assert set(net.classify_features(net.features(images), classes=[5]).tolist()) == {5}


def test_an_image_that_is_not_a_number_is_unclassified() -> None:
    net = Classifier((8, 8), classes=(0, 1))
    images = torch.rand(3, 64)
    images[1, 5] = torch.nan
    labels = net.classify_features(net.features(images), classes=(0, 1)).tolist()
    assert labels[1] == UNCLASSIFIED
    assert UNCLASSIFIED not in (labels[0], labels[2])


def test_unusable_arguments_are_named() -> None:
    net = Classifier((8, 8), classes=(0, 1))
    with pytest.raises(InputError, match="the last axis must be 64"):
        net.logits(torch.rand(3, 8, 8))
    with pytest.raises(InputError, match=r"classes \[0, 3\].*\(0, 1\)"):
        net.classify_features(net.features(torch.rand(3, 64)), classes=[0, 3])
    with pytest.raises(InputError, match="classes"):
        net.classify_features(net.features(torch.rand(3, 64)), classes=[])
    with pytest.raises(InputError, match="shape"):
        Classifier((1, 3, 8, 8), classes=(0, 1))
    with pytest.raises(InputError, match="classes is empty"):
        Classifier((8, 8), classes=())


@pytest.mark.slow
def test_digits_reach_97_percent(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels, labels = (digits.images / 16).astype(np.float32), digits.target
    stream = Stream.from_tasks([(pixels[labels == c], labels[labels == c]) for c in range(10)])
    assert trained_classifier(stream, device="cpu", cache_dir=tmp_path).accuracy >= 0.97


@pytest.mark.slow
def test_two_processes_at_once_both_end_well(tmp_path: Path) -> None:
    code = (
        "import sys, numpy as np\n"
        "from boovae.data.tasks import Stream\n"
        "from boovae.metrics.classifier_training import trained_classifier\n"
        "noise = np.random.default_rng(0).random((2, 40, 8, 8)) / 2\n"
        "stream = Stream.from_tasks([noise[0], noise[1] + 0.5])\n"
        "print(trained_classifier(stream, device='cpu', cache_dir=sys.argv[1]).digest)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert answers[0] == answers[1] != ""
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.gpu
def test_training_repeats_on_a_gpu_and_the_cpu_agrees(tmp_path: Path) -> None:
    stream = bars((28, 28))
    one = trained_classifier(stream, device="cuda", cache_dir=tmp_path / "1")
    two = trained_classifier(stream, device="cuda", cache_dir=tmp_path / "2")
    assert one.digest == two.digest
    images, labels = pooled_test(stream)
    assert one.classify_features(one.features(images), classes=one.classes).tolist() == labels.tolist()
    moved = trained_classifier(stream, device="cpu", cache_dir=tmp_path / "1", progress=never)
    torch.testing.assert_close(moved.logits(images), one.logits(images).cpu(), rtol=1e-2, atol=1e-2)
