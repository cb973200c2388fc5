"""Networks for distances: their shapes, their weights files, and the real statistics that are computed once."""

from __future__ import annotations

from pathlib import Path

import filelock
import pooch
import pytest
import torch
from torch import Tensor, nn

from boovae.data import ImageSpec, Split, Task
from boovae.errors import InputError
from boovae.metrics import efficientnet, features
from boovae.metrics.efficientnet import EfficientNetLite0, SameConv2d, folded
from boovae.metrics.features import PictureFeatures, check_names, make_features
from boovae.metrics.fidelity import kernel_distance
from boovae.metrics.frechet import combined, frechet_distances, moments
from boovae.metrics.inception import Inception
from boovae.metrics.reference import Reference

CPU = torch.device("cpu")
COLOURS = ImageSpec((3, 32, 32), (-1.0, 1.0))


class Means(nn.Module):
    """The mean of every colour: features that can be checked by hand."""

    def forward(self, pictures: Tensor) -> Tensor:
        return pictures.mean((2, 3))


def means(shape: tuple[int, ...] = (3, 4, 4), pixel_range: tuple[float, float] = (-1.0, 1.0)) -> PictureFeatures:
    return PictureFeatures("means", Means(), "digest", ImageSpec(shape, pixel_range), CPU)


# --- pictures ---------------------------------------------------------------------------------------------------------


def test_images_are_seen_as_stored_pictures() -> None:
    network = means()
    images = torch.tensor([-1.0, 0.0, 1.0]).repeat_interleave(16).expand(2, 5, 48)
    found = network.features(images)
    assert found.shape == (2, 5, 3)
    torch.testing.assert_close(found[0, 0], torch.tensor([0.0, 128 / 255, 1.0]))  # 8 bits: a half is rounded
    torch.testing.assert_close(network.features(images * 3), found)  # clipped
    grey = means((4, 4), (0.0, 1.0)).features(torch.full((7, 16), 0.2))
    torch.testing.assert_close(grey, torch.full((7, 3), 51 / 255))


def test_many_images_go_through_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.rand(10, 48)
    whole = means().features(images)
    monkeypatch.setitem(features.BATCH, "cpu", 3)
    torch.testing.assert_close(means().features(images), whole)


def test_only_pictures_have_such_features() -> None:
    with pytest.raises(InputError, match=r"features means is for pictures.*use classifier"):
        means((12,))


# --- the networks -----------------------------------------------------------------------------------------------------


def test_inception_has_the_size_and_stages_of_the_published_network() -> None:
    network = Inception().eval()
    # 23,834,568 weights with 1000 classes and without the auxiliary head; eight more classes of 2048 + 1.
    assert sum(parameter.numel() for parameter in network.parameters()) == 23_834_568 + 8 * 2049
    sizes = {}
    for name in ("Conv2d_4a_3x3", "Mixed_5d", "Mixed_6e", "Mixed_7c"):
        network.get_submodule(name).register_forward_hook(
            lambda _, __, output, name=name: sizes.update({name: tuple(output.shape[1:])})
        )
    with torch.no_grad():
        assert network(torch.rand(1, 3, 32, 32)).shape == (1, 2048)
    wanted = {"Conv2d_4a_3x3": (192, 71, 71), "Mixed_5d": (288, 35, 35), "Mixed_6e": (768, 17, 17)}
    assert sizes == {**wanted, "Mixed_7c": (2048, 8, 8)}


def test_inception_reads_the_usual_weights_file_and_refuses_others(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = Inception()
    weights = network.state_dict()
    assert {"Conv2d_1a_3x3.conv.weight", "Mixed_7b.branch3x3dbl_3b.bn.running_var", "fc.bias"} <= weights.keys()
    path = tmp_path / "weights.pth"
    torch.save(weights, path)
    found = make_features(f"inception:{path}", COLOURS, CPU)
    assert found.name == "inception"
    with torch.no_grad():
        wanted = network.eval()(torch.zeros(1, 3, 32, 32))
    torch.testing.assert_close(found.features(torch.full((1, 3072), -1.0)), wanted)
    torch.save({**weights, "fc.weight": torch.zeros(1000, 2048)}, path)
    with pytest.raises(InputError, match=r"'fc.weight' is \(1000, 2048\), not \(1008, 2048\)"):
        make_features(f"inception:{path}", COLOURS, CPU)
    del weights["fc.bias"]
    torch.save(weights, path)
    with pytest.raises(InputError, match=r"lacks 'fc\.bias'"):
        make_features(f"inception:{path}", COLOURS, CPU)
    path.write_bytes(b"no weights")
    with pytest.raises(InputError, match="cannot be read as weights"):
        make_features(f"inception:{path}", COLOURS, CPU)


def test_inception_without_weights_says_where_to_put_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOVAE_CACHE", str(tmp_path))
    monkeypatch.setattr(features, "INCEPTION_MIRROR", "http://127.0.0.1:9/")
    with pytest.raises(
        InputError,
        match=r"pt_inception-2015-12-05-6726825d\.pth was not found and could not be downloaded[\s\S]*Put it at",
    ):
        make_features("inception", COLOURS, CPU)


def test_two_processes_do_not_write_one_download_of_inception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = []

    def other_process(*arguments: object, **options: object) -> str:
        try:
            filelock.FileLock(tmp_path / "inception" / f"{features.INCEPTION_FILE}.lock", timeout=0).acquire()
        except filelock.Timeout:
            held.append(True)
        raise OSError("no network")

    monkeypatch.setenv("BOOVAE_CACHE", str(tmp_path))
    monkeypatch.setattr(pooch, "retrieve", other_process)
    with pytest.raises(InputError, match="no network"):
        make_features("inception", COLOURS, CPU)
    assert held == [True]


def test_efficientnet_has_the_size_of_the_published_network() -> None:
    network = EfficientNetLite0().eval()
    assert sum(parameter.numel() for parameter in network.parameters()) == 4_652_008
    sizes: list[int] = []
    for block in network.blocks:
        block.register_forward_hook(lambda _, __, output: sizes.append(output.shape[-1]))
    with torch.no_grad():
        assert network(torch.rand(1, 3, 32, 32)).shape == (1, 1280)
    assert sizes == [112] + [56] * 2 + [28] * 2 + [14] * 6 + [7] * 5


@pytest.mark.parametrize(("side", "kernel", "stride"), [(7, 3, 2), (8, 3, 2), (8, 5, 2), (5, 5, 1)])
def test_same_padding_puts_the_odd_pixel_behind(side: int, kernel: int, stride: int) -> None:
    layer = SameConv2d(1, 1, kernel, stride, bias=False)
    nn.init.ones_(layer.weight)
    output = layer(torch.ones(1, 1, side, side))[0, 0]
    assert output.shape == (-(-side // stride),) * 2
    missing = max(0, (len(output) - 1) * stride + kernel - side)
    assert output[0, 0].item() == (kernel - missing // 2) ** 2
    assert output[-1, -1].item() == (kernel - (missing - missing // 2)) ** 2


def test_efficientnet_knows_what_is_in_a_photograph() -> None:
    """With the weights of the extra: two photographs that come with scikit-learn."""
    pytest.importorskip(efficientnet.PACKAGE)
    from sklearn.datasets import load_sample_images

    china, flower = (torch.tensor(image).permute(2, 0, 1) / 255 for image in load_sample_images().images)
    found = make_features("efficientnet-lite0", ImageSpec(tuple(china.shape)), CPU)
    assert isinstance(found, PictureFeatures)
    head = found.network.get_submodule("fc")
    likely = [head(found.features(image.reshape(1, -1)))[0].topk(6).indices.tolist() for image in (china, flower)]
    assert {698, 663} <= set(likely[0])  # palace, monastery: a Chinese temple
    assert likely[1][0] == 985  # daisy: a flower


def test_folded_normalisations_give_the_same_features() -> None:
    torch.manual_seed(0)
    network = EfficientNetLite0().eval()
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
                if name in ("weight", "running_var"):
                    nn.init.uniform_(tensor, 0.8, 1.2)
                elif name in ("bias", "running_mean"):
                    nn.init.normal_(tensor, std=0.1)
    pictures = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        wanted = network(pictures)
        found = folded(network)(pictures)
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in network.modules())
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficientnet, "PACKAGE", "no_such_package_at_all")
    with pytest.raises(InputError, match=r"pip install 'boovae\[features\]'"):
        make_features("efficientnet-lite0", COLOURS, CPU)


def test_any_torchscript_file_gives_features_under_its_own_name(tmp_path: Path) -> None:
    path = tmp_path / "means.pt"
    torch.jit.script(Means()).save(str(path))
    found = make_features(f"torchscript:{path}", ImageSpec((3, 4, 4), (-1.0, 1.0)), CPU)
    assert found.name.startswith("means.pt:")
    assert "inception" not in found.name
    images = 2 * torch.rand(5, 48) - 1
    torch.testing.assert_close(found.features(images), means().features(images))
    path.write_bytes(b"nothing")
    with pytest.raises(InputError, match="not a TorchScript file"):
        make_features(f"torchscript:{path}", ImageSpec((3, 4, 4), (-1.0, 1.0)), CPU)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["inceptoin"], "did you mean 'inception'"),
        (["torchscript"], "unknown features"),
        (["inception:/no/such/file"], "no such file"),
        (["classifier:x"], "no such file"),
        (["classifier", "classifier"], "each network once"),
        ([], "at least one"),
    ],
)
def test_unknown_networks_are_refused_before_any_work(names: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_names(names)


# --- the real side ----------------------------------------------------------------------------------------------------


def task(seed: int, train: int = 12, test: int = 9) -> Task:
    generator = torch.Generator().manual_seed(seed)

    def split(count: int) -> Split:
        return Split(2 * torch.rand(count, 48, generator=generator) - 1, torch.zeros(count, dtype=torch.int64))

    return Task(str(seed), split(train), split(3), split(test), (0,))


def test_scores_compare_samples_with_all_tasks_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOVAE_CACHE", str(tmp_path))
    tasks, network = [task(0), task(1, train=1)], means()
    samples = network.features(2 * torch.rand(2, 30, 48) - 1)
    scores = Reference(network).scores(samples, tasks)
    test = network.features(torch.cat([one.test.images for one in tasks]))
    train = network.features(torch.cat([one.train.images for one in tasks]))
    for row in range(2):
        for real, found in ((test, scores.frechet), (train, scores.frechet_train)):
            (wanted,) = frechet_distances([moments(real)], moments(samples[row]))
            assert found is not None
            assert found[row] == pytest.approx(wanted.item(), rel=1e-7)
        assert scores.kid is not None
        assert scores.kid[row] == pytest.approx(kernel_distance(test, samples[row, :18]).item(), rel=1e-7)
    assert all(share is not None and share.shape == (2,) for share in (scores.precision, scores.recall))
    assert (scores.images, scores.samples, scores.digest) == (18, 30, network.digest)


def test_real_images_are_looked_at_once_and_again_only_if_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOOVAE_CACHE", str(tmp_path))
    seen: list[int] = []

    class Counting(PictureFeatures):
        def features(self, images: Tensor) -> Tensor:
            seen.append(len(images))
            return super().features(images)

    def counting(digest: str = "digest") -> Reference:
        return Reference(Counting("means", Means(), digest, ImageSpec((3, 4, 4), (-1.0, 1.0)), CPU))

    reference = counting()
    first = reference.real(task(0))
    assert seen == [9, 12]
    again = counting().real(task(0))  # another process would do the same
    assert seen == [9, 12]
    torch.testing.assert_close(again.test, first.test)
    torch.testing.assert_close(again.train.covariance, first.train.covariance)
    counting().real(task(1))
    counting("other weights").real(task(0))
    assert len(seen) == 6
    next((tmp_path / "features").glob("*.safetensors")).write_bytes(b"damaged")
    for seed in (0, 1):
        counting().real(task(seed))
    counting("other weights").real(task(0))
    assert len(seen) == 8


def test_moments_of_parts_are_those_of_the_whole() -> None:
    parts = [torch.randn(n, 5) + n for n in (1, 7, 30)]
    whole = moments(torch.cat(parts))
    found = combined([moments(part, least=1) for part in parts])
    torch.testing.assert_close(found.mean, whole.mean)
    torch.testing.assert_close(found.covariance, whole.covariance)
    assert found.n == whole.n == 38


def test_the_extra_names_the_package_that_holds_the_weights() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert efficientnet.PACKAGE.replace("_", "-") in text
