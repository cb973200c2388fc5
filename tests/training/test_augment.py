"""Changes of training images: colours against Pillow's own enhancements, places against SciPy's interpolation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance
from scipy.ndimage import map_coordinates
from torch.func import vmap

from boovae.config import TrainingSettings
from boovae.data import ImageSpec, load_stream
from boovae.errors import InputError
from boovae.methods import resolve
from boovae.runs.progress import Display, Watch
from boovae.training import augment
from boovae.training.augment import colour_jitter, deform, mirror
from boovae.training.trainer import Trainer

SHAPE = (3, 6, 5)
SIGNED = ImageSpec(SHAPE, (-1.0, 1.0))


def images(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 90), generator=generator) / 127.5 - 1


def test_equals_pillow_up_to_its_rounding() -> None:
    x = images(40)
    uniform = torch.rand(40, 3, generator=torch.Generator().manual_seed(1))
    got = (colour_jitter(x, uniform, 0.3, SIGNED) + 1) * 127.5
    for before, draw, after in zip(x, uniform.tolist(), got, strict=True):
        pixels = ((before + 1) * 127.5).round().reshape(SHAPE).permute(1, 2, 0).numpy().astype(np.uint8)
        picture = Image.fromarray(pixels)
        enhancements = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
        for enhance, share in zip(enhancements, draw, strict=True):
            picture = enhance(picture).enhance(1 + 0.3 * (2 * share - 1))
        wanted = np.asarray(picture, np.float64).transpose(2, 0, 1).ravel()
        np.testing.assert_allclose(after.numpy(), wanted, atol=4)  # Pillow rounds after each step


def test_the_middle_of_the_draw_changes_nothing_and_pixels_stay_in_range() -> None:
    x = images(8)
    torch.testing.assert_close(colour_jitter(x, torch.full((8, 3), 0.5), 0.1, SIGNED), x)
    wild = colour_jitter(x, torch.rand(8, 3), 0.9, SIGNED)
    assert wild.min() >= -1
    assert wild.max() <= 1
    assert not torch.equal(wild, x)


@pytest.mark.parametrize("pixel_range", [(0.0, 1.0), (-1.0, 1.0)])
def test_each_image_has_its_own_factors_and_replicas_their_own_draws(pixel_range: tuple[float, float]) -> None:
    low, high = pixel_range
    x = (images(4) + 1) / 2 * (high - low) + low
    uniform = torch.rand(2, 4, 3)
    both = vmap(lambda u: colour_jitter(x, u, 0.2, ImageSpec(SHAPE, pixel_range)))(uniform)
    for replica in range(2):
        for row in range(4):
            one = colour_jitter(x[row : row + 1], uniform[replica, row : row + 1], 0.2, ImageSpec(SHAPE, pixel_range))
            torch.testing.assert_close(both[replica, row], one[0])


def test_images_that_are_drawn_black_and_white_are_so_after_the_jitter_too() -> None:
    settings = resolve({"method": "standard", "jitter": 0.9, "net": "mlp:8", "latent_dim": 2})
    trainer = Trainer(settings, ImageSpec(SHAPE, binarize="dynamic"))
    model, seen = trainer.build(), []
    model.encoder.register_forward_pre_hook(lambda encoder, inputs: seen.append(inputs[0]))
    batch = {"x": (images(4) + 1) / 2, "pixels": torch.rand(4, 90), "jitter": torch.rand(4, 3)}
    batch |= {"weight": torch.ones(4), "kl_weight": torch.tensor(1.0), "latent": torch.randn(4, 2)}
    trainer.objective(model, batch)
    assert sorted(seen[0].unique().tolist()) == [0, 1]


def test_jitter_is_refused_where_pixels_are_to_be_black_and_white() -> None:
    with pytest.raises(InputError, match="jitter makes grey pixels"):
        Trainer(resolve({"jitter": 0.1}), ImageSpec(SHAPE, binarize="threshold"))


# --- mirror ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(9, 10), (3, 6, 5)])
def test_mirror_exchanges_left_and_right_of_every_colour_where_it_was_drawn(shape: tuple[int, ...]) -> None:
    x = torch.rand(2, 3, 90)
    uniform = torch.tensor([[0.1, 0.9, 0.49], [0.5, 0.0, 1.0]])
    both = vmap(lambda pictures, u: mirror(pictures, u, shape))(x, uniform)
    for replica, row in np.ndindex(2, 3):
        before, after = (each[replica, row].reshape(shape).numpy() for each in (x, both))
        np.testing.assert_array_equal(after, np.flip(before, -1) if uniform[replica, row] < 0.5 else before)


def test_training_draws_mirrored_images_and_scoring_does_not() -> None:
    settings = resolve({"dataset": "digits", "method": "standard", "mirror": True, "latent_dim": 10})
    trainer = Trainer(settings, ImageSpec((8, 8)))
    assert "mirror" in trainer.objective.draws(8, training=True)
    assert "mirror" not in trainer.objective.draws(8, training=False)
    model, seen = trainer.build(), []
    model.encoder.register_forward_pre_hook(lambda encoder, inputs: seen.append(inputs[0]))
    x = torch.rand(2, 64)
    batch = {"x": x, "weight": torch.ones(2), "kl_weight": torch.tensor(1.0), "latent": torch.randn(2, 10)}
    batch |= {"mirror": torch.tensor([0.2, 0.8])}
    trainer.objective(model, batch)
    torch.testing.assert_close(seen[0], torch.stack([x[0].reshape(8, 8).flip(1).flatten(), x[1]]))


def test_mirror_is_refused_where_there_is_no_left_and_right() -> None:
    with pytest.raises(InputError, match=r"mirror needs pictures, these have shape \(64,\)"):
        Trainer(resolve({"mirror": True}), ImageSpec((64,)))


# --- deform ---------------------------------------------------------------------------------------------------------


def test_deform_equals_scipy_and_leaves_the_others_as_they_are() -> None:
    height, width, strength = 9, 7, 0.2
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(6, height * width, generator=generator, dtype=torch.float64) * 2 - 1
    normal = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    uniform = torch.tensor([0.0, 0.3, 0.69, 0.71, 0.9, 1.0])
    got = deform(x, normal, uniform, strength, ImageSpec((height, width), (-1.0, 1.0)))
    assert torch.equal(got[3:], x[3:])
    across, down = np.meshgrid((2 * np.arange(width) + 1) / width - 1, (2 * np.arange(height) + 1) / height - 1)
    for before, draw, after in zip(x[:3], normal.numpy(), got, strict=False):
        a, b, c, d, right, below = strength * draw
        columns = ((across + a * across + b * down + 0.6 * right + 1) * width - 1) / 2
        rows = ((down + c * across + d * down + 0.6 * below + 1) * height - 1) / 2
        framed = np.pad(before.reshape(height, width).numpy(), 20, constant_values=-1.0)
        wanted = map_coordinates(framed, [rows + 20, columns + 20], order=1)
        np.testing.assert_allclose(after.reshape(height, width).numpy(), wanted, atol=1e-9)


def test_deform_moves_all_colours_together_and_each_replica_its_own_way() -> None:
    grey = torch.rand(2, 5, 30)
    normal, uniform = torch.randn(2, 5, 6), torch.zeros(2, 5)
    colours = grey.repeat(1, 1, 3)
    both = vmap(lambda x, n, u: deform(x, n, u, 0.1, ImageSpec(SHAPE)))(colours, normal, uniform)
    for replica in range(2):
        one = deform(colours[replica], normal[replica], uniform[replica], 0.1, ImageSpec(SHAPE))
        torch.testing.assert_close(one, both[replica])
        torch.testing.assert_close(one[:, :30].repeat(1, 3), one)
    assert not torch.allclose(both[0], deform(colours[0], normal[1], uniform[0], 0.1, ImageSpec(SHAPE)))


def test_a_colour_picture_is_reflected_at_its_edges() -> None:
    bright = torch.full((4, 90), 0.9)
    moved = deform(bright, torch.randn(4, 6), torch.zeros(4), 0.5, ImageSpec(SHAPE))
    torch.testing.assert_close(moved, bright)  # no black corners
    dark = deform(bright[:, :30], torch.full((4, 6), 1.0), torch.zeros(4), 0.5, ImageSpec((6, 5)))
    assert dark.min() == 0


def test_training_draws_deformed_images_and_scoring_does_not() -> None:
    settings = resolve({"dataset": "digits", "epochs": 1, "deform": 0.1, "limit": 40})
    stream = load_stream("digits", limit=40)
    trainer = Trainer(settings, stream.spec)
    assert {"deform", "deformed"} <= trainer.objective.draws(8, training=True).keys()
    assert not {"deform", "deformed"} & trainer.objective.draws(8, training=False).keys()
    plain = Trainer(settings.changed(deform=0.0), stream.spec)
    for each in (trainer, plain):
        each.learn(stream[0], Watch(Display()))
    assert not any(
        torch.equal(new, plain.replicas.parameters[name]) for name, new in trainer.replicas.parameters.items()
    )


@pytest.mark.parametrize(
    ("shape", "binarize", "message"),
    [((64,), "none", "deform=0.1 needs pictures"), ((8, 8), "threshold", "use binarize='dynamic'")],
)
def test_deform_is_refused_where_it_does_not_fit(shape: tuple[int, ...], binarize: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Trainer(resolve({"deform": 0.1}), ImageSpec(shape, binarize=binarize))


def test_input_noise_has_the_deviation_that_was_asked_for() -> None:
    spec, settings = ImageSpec((40,), (-3.0, 3.0)), TrainingSettings(input_noise=0.3)
    drawn = augment.draws(settings, spec, 500)
    generator = torch.Generator().manual_seed(0)
    batch = {name: torch.randn(*draw.shape, generator=generator) for name, draw in drawn.items()}
    x = torch.full((500, 40), 2.0)
    noise = augment.changed(x, batch, settings, spec) - x
    assert noise.std().item() == pytest.approx(0.3, rel=0.02)
    assert augment.changed(x, {}, settings, spec) is x  # validation
