from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from scipy import stats

from boovae.replicas.randomness import Draw, Generators, seed_for

CPU = torch.device("cpu")
NORMAL, UNIFORM = Draw("normal", (50, 4)), Draw("uniform", (50, 4))


def test_seeds_differ_by_every_part_of_the_key() -> None:
    key = (3, 1, 7, 2, "latent")
    changed: list[tuple[int | str, ...]] = [
        (4, 1, 7, 2, "latent"),
        (3, 2, 7, 2, "latent"),
        (3, 1, 8, 2, "latent"),
        (3, 1, 7, 3, "latent"),
    ]
    changed += [(3, 1, 7, 2, "pixels"), (1, 3, 7, 2, "latent"), (3, 17, 2, "latent"), (3, 1, 7, "2", "latent")]
    seeds = [seed_for(*one) for one in (key, *changed)]
    assert len(set(seeds)) == len(seeds)
    assert seed_for(*key) == seeds[0]


def test_seeds_of_many_keys_do_not_collide_and_fit_a_generator() -> None:
    seeds = {seed_for(seed, task, epoch, "order") for seed in range(20) for task in range(10) for epoch in range(50)}
    assert len(seeds) == 10_000
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_are_the_same_in_every_process() -> None:
    code = "from boovae.replicas.randomness import seed_for; print(seed_for(3, 'order', 12))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == seed_for(3, "order", 12)


@pytest.mark.parametrize("draw", [NORMAL, UNIFORM])
def test_draws_of_a_replica_do_not_depend_on_the_others(draw: Draw) -> None:
    three = Generators([5, 6, 7], CPU).draw(draw, 0, 1, "latent", steps=3)
    assert three.shape == (3, 3, 50, 4)
    other = Generators([9, 6], CPU).draw(draw, 0, 1, "latent", steps=3)
    alone = Generators([6], CPU).draw(draw, 0, 1, "latent", steps=3)
    assert torch.equal(three[1], alone[0])
    assert torch.equal(other[1], alone[0])
    assert not torch.equal(three[0], three[1])


def test_draws_depend_on_the_key_alone_not_on_what_was_drawn_before() -> None:
    generators = Generators([0, 1], CPU)
    first = generators.draw(NORMAL, 0, 3)
    generators.draw(UNIFORM, 0, 4)
    generators.order(10, 0, 3)
    assert torch.equal(generators.draw(NORMAL, 0, 3), first)
    assert not torch.equal(generators.draw(NORMAL, 0, 4), first)


def test_named_draws_are_independent_of_each_other() -> None:
    generators = Generators([0, 1], CPU)
    drawn = generators.draw_all({"latent": NORMAL, "other": NORMAL, "pixels": UNIFORM}, 2, 5, steps=2)
    assert list(drawn) == ["latent", "other", "pixels"]
    assert not torch.equal(drawn["latent"], drawn["other"])
    # What else is drawn changes nothing.
    assert torch.equal(generators.draw_all({"other": NORMAL}, 2, 5, steps=2)["other"], drawn["other"])


def test_draws_leave_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    generators = Generators([0, 1], CPU)
    generators.draw(NORMAL, 0)
    generators.order(10, 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_draws_have_the_distribution_they_are_named_after() -> None:
    generators = Generators([0], CPU)
    normal = generators.draw(Draw("normal", (20_000,)), 0)[0].numpy()
    uniform = generators.draw(Draw("uniform", (20_000,)), 0)[0].numpy()
    assert stats.kstest(normal, "norm").pvalue > 1e-3
    assert stats.kstest(uniform, "uniform").pvalue > 1e-3
    assert uniform.min() >= 0
    assert uniform.max() < 1


@pytest.mark.parametrize("images", [1, 2, 97])
def test_order_is_a_permutation_of_the_images_for_each_replica(images: int) -> None:
    order = Generators([0, 1, 2], CPU).order(images, 0, 5)
    assert order.shape == (3, images)
    assert all(sorted(row) == list(range(images)) for row in order.tolist())


def test_order_changes_with_epoch_and_replica() -> None:
    generators = Generators([0, 1], CPU)
    one, two = generators.order(97, 0, 5), generators.order(97, 0, 6)
    assert not torch.equal(one, two)
    assert not torch.equal(one[0], one[1])
    assert torch.equal(generators.order(97, 0, 5), one)


def test_every_image_comes_first_equally_often() -> None:
    order = Generators(range(3000), CPU).order(6, 0, 0)
    assert stats.chisquare(order[:, 0].bincount(minlength=6).numpy()).pvalue > 1e-3
