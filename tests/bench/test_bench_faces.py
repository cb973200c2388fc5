"""The bench on faces: the paper's columns and rows, distances under the names of their features, and no real face."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from bench_parts import made_up_record, request, typed
from boovae.bench.cells import Cell, plan
from boovae.bench.figures import as_png, component_pictures, learned
from boovae.bench.paper import Paper
from boovae.bench.paper_tables import findings, table
from boovae.bench.published import FACES_PAPER_METHODS, numbers
from boovae.bench.request import Request
from boovae.bench.results import Measured
from boovae.cli.main import main
from boovae.methods.coreset import CoresetSettings
from boovae.metrics.schema import to_json
from boovae.runs.data import load_data
from faces import four_colours, write_celeba

BOTH = ("frechet_efficientnet-lite0", "frechet_classifier")


def faces(folder: Path, **changes: Any) -> Request:
    return request(folder, **{"datasets": ("celeba",), "methods": (), "given": {"replicas": 2}, **changes})


def with_distances(cell: Cell, distance: float) -> Measured:
    """Return a finished cell whose distance grows by one with every task, on both features."""
    summary = made_up_record(cell, lambda seen, seed: 1.0, lambda seen: [1 / seen] * seen)
    for event in summary["evaluations"]:
        seen = event["seen"] * cell.settings.data.classes_per_task
        values = {"frechet": [distance + seen, distance + seen]}
        sets = {"efficientnet-lite0": values, "classifier": values}
        event["frechet"] = {"pooled": values["frechet"], "features": "efficientnet-lite0", "sets": sets}
    found = Measured("celeba")
    found.add(cell, typed(summary))
    return found


def test_the_papers_table_of_faces_is_whole() -> None:
    printed = numbers("frechet_classifier")
    assert len(printed) == 28
    assert {method for _, method, _ in printed} == set(FACES_PAPER_METHODS)
    assert printed["celeba", "boo", 4].text == "43.1 (0.2)"


def test_faces_have_the_columns_and_tasks_of_the_papers_table(tmp_path: Path) -> None:
    cells = Paper().plan(faces(tmp_path))
    assert {*FACES_PAPER_METHODS, "boo+distill", "joint"} == {cell.label for cell in cells}
    kept = {
        cell.label: cell.settings.of(CoresetSettings).coreset_images
        for cell in cells
        if cell.settings.method == "coreset"
    }
    assert kept == {"coreset": 40, "coreset-80": 80}
    assert [cell.tasks for cell in cells if cell.label == "joint"] == [1, 2, 3, 4]
    assert {cell.tasks for cell in cells if cell.label != "joint"} == {4}
    assert {cell.settings.model.components for cell in cells if cell.label == "boo"} == {40}


def test_faces_beside_grey_images_keep_their_own_columns(tmp_path: Path) -> None:
    cells = Paper().plan(faces(tmp_path, datasets=("mnist", "celeba")))
    standard = {cell.settings.data.dataset for cell in cells if cell.label == "standard"}
    assert standard == {"mnist"}
    assert faces(tmp_path).shown == ["nll", "diversity", *BOTH]
    assert faces(tmp_path, datasets=("mnist",)).shown == ["nll", "diversity"]
    assert faces(tmp_path, metrics=("frechet",), features=("inception",)).shown == ["fid"]


def test_a_distance_stands_beside_the_papers_and_is_never_called_better_or_fid() -> None:
    (cell,) = plan(["celeba"], ["boo"], {"replicas": 2}, 4)
    found = table(with_distances(cell, 100.0), "frechet_efficientnet-lite0")
    assert [seen for seen, _ in found.rows] == [1, 2, 3, 4]
    assert [row[0].better for _, row in found.rows] == [""] * 4
    text = found.markdown()
    assert "## Fréchet distance (efficientnet-lite0) on CelebA" in text
    assert "| 4 | 104.0 (0.0) / 43.1 (0.2) |" in text
    assert "cannot be compared" in text
    assert "**" not in text


def test_faces_are_scored_from_the_first_task_on_but_one_class_has_no_diversity() -> None:
    (cell,) = plan(["celeba"], ["boo"], {"replicas": 2}, 4)
    measured = with_distances(cell, 1.0)
    assert [[seen for seen, _ in table(measured, name).rows] for name in ("nll", "diversity")] == [
        [1, 2, 3, 4],
        [2, 3, 4],
    ]


@pytest.mark.parametrize(("boo", "ours", "first", "near"), [(10.0, 21.0, 4, 4), (60.0, 80.0, 0, 0)])
def test_findings_say_whether_the_order_is_the_papers(boo: float, ours: float, first: int, near: int) -> None:
    together = Measured("celeba")
    distances = {"ewc": 50.0, "boo": boo, "boo+distill": ours, "joint": 20.0}
    for cell in plan(["celeba"], list(distances), {"replicas": 2}, 4):
        (part,) = with_distances(cell, distances[cell.label]).cells
        together.add(*part)
    found = findings([together], BOTH)
    for features in ("efficientnet-lite0", "classifier"):
        name = f"Fréchet distance ({features})"
        assert found[f"boo: {name} below every other method of the paper's table"] == f"{first} of 4 cells"
        assert found[f"boo+distill: {name} within 10 % of joint"] == f"{near} of 4 cells"


def test_cells_on_other_features_are_not_mixed_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (cell,) = plan(["celeba"], ["boo"], {"replicas": 2, "seed": 0}, 4)
    (tmp_path / "cells").mkdir()
    ((_, summary),) = with_distances(cell, 1.0).cells
    raw = [to_json(each) for each in summary["evaluations"]]
    (tmp_path / "cells" / f"{cell.name}.json").write_text(json.dumps(summary | {"evaluations": raw}))
    words = ["bench", "paper", "--datasets", "celeba", "--methods", "boo", "--replicas", "2", "--only-tables"]
    words += ["--out", str(tmp_path / "cells"), "--results", str(tmp_path / "results")]
    main(words)
    assert "FID" not in (tmp_path / "results" / "frechet_classifier.csv").read_text()
    heads = {name: (tmp_path / "results" / f"{name}.md").read_text().splitlines()[0] for name in ("nll", *BOTH)}
    assert heads == {"nll": "Mean (standard deviation) over seeds."} | dict.fromkeys(
        BOTH, "Ours / the paper's: mean (standard deviation) over seeds."
    )
    with pytest.raises(SystemExit):
        main([*words, "--features", "inception"])
    assert "finished without inception (--features)" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*words, "--features", "torchscript:some.pt"])
    assert "tables of a bench cannot have torchscript:FILE" in capsys.readouterr().err


def tile(picture: NDArray[Any]) -> str:
    content = io.BytesIO()
    Image.fromarray(picture).save(content, format="PNG")
    return base64.b64encode(content.getvalue()).decode()


def test_of_learned_components_the_decoded_are_shown_the_heaviest_first(tmp_path: Path) -> None:
    (cell,) = plan(["celeba"], ["boo"], {"replicas": 2}, 4)
    red, blue = np.full((4, 4, 3), (255, 0, 0), np.uint8), np.full((4, 4, 3), (0, 0, 255), np.uint8)
    component = {"task": 0, "name": "black", "pseudo_input": tile(red), "decoded": tile(blue)}
    listed = [component | {"weight": 0.1}, component | {"weight": 0.9, "decoded": tile(blue // 2)}]
    (tmp_path / cell.name).mkdir()
    (tmp_path / cell.name / "components.json").write_text(json.dumps({"components": listed}))
    measured = with_distances(cell, 1.0)
    measured.cells[0][1]["components"] = component_pictures(tmp_path / cell.name)
    sheet = learned(measured)
    assert sheet is not None
    pixels = np.asarray(Image.open(io.BytesIO(as_png(sheet))))
    assert not (pixels == (255, 0, 0)).all(2).any()
    columns = [int(np.flatnonzero((pixels == (0, 0, value)).all(2).any(0))[0]) for value in (127, 255)]
    assert columns[0] < columns[1]


def test_no_real_face_comes_into_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept images, pseudo-inputs that start at images and clusters of one image: none of them is shown."""
    monkeypatch.setenv("BOOVAE_CACHE", str(tmp_path / "cache"))
    data = write_celeba(tmp_path / "data", four_colours(train=6))
    config, results = tmp_path / "tiny.toml", tmp_path / "results"
    config.write_text(
        'net = "conv:4"\nlatent_dim = 4\nepochs = 1\nsamples = 2\ngenerated = 20\nboo_steps = 0\ncomponents = 4\n'
        "coreset_images = 4\nbatch_size = 4\n"
    )
    words = [
        "bench",
        "paper",
        "--datasets",
        "celeba",
        "--tasks",
        "1",
        "--replicas",
        "1",
        "--methods",
        "coreset",
        "joint",
    ]
    words += [
        "boo+distill",
        "--features",
        "classifier",
        "--config",
        str(config),
        "--data-dir",
        str(data),
        "--workers",
        "1",
    ]
    main([*words, "--device", "cpu", "--quiet", "--out", str(tmp_path / "cells"), "--results", str(results)])
    assert {path.name for path in results.glob("*.png")} == {"celeba_samples.png", "celeba_components.png"}
    (cell,) = plan(["celeba"], ["coreset"], {"replicas": 1}, 1)
    real = (load_data(cell.settings, data)[0].train.images.unflatten(1, (3, 32, 32)).permute(0, 2, 3, 1) + 1) * 127.5
    for path in results.glob("*.png"):
        assert nearest(np.asarray(Image.open(path).convert("RGB"), np.float64), real.numpy()) > 20
    components = next((tmp_path / "cells").glob("*/samples/components.png"))  # a run's own folder shows pseudo-inputs
    assert nearest(np.asarray(Image.open(components).convert("RGB"), np.float64), real.numpy()) < 10


def nearest(sheet: NDArray[np.float64], real: NDArray[np.float64]) -> float:
    """Return how near any part of a sheet comes to any real image, in mean levels of 255, at either enlargement."""
    found = []
    for scale in (1, 2):
        rough = real[:, ::8, ::8]  # 4 x 4 pixels of each tell faces apart
        views = np.lib.stride_tricks.sliding_window_view(sheet, (32 * scale, 32 * scale), (0, 1))
        views = views[..., :: 8 * scale, :: 8 * scale].transpose(0, 1, 3, 4, 2)
        found += [float(np.abs(views - image).mean((2, 3, 4)).min()) for image in rough]
    return min(found)
