import math
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError
from potluck.core.ground.rng import Key
from potluck.core.requests.fit import Fit, LocalTraining
from potluck.engine.client.training import train
from potluck.parts.noise import LEAVES_AT_ONCE, Leaves, draw_leaves, noise_examples

KINDS = ["gaussian", "dead_leaves", "stylegan"]
IMAGES = ["dead_leaves", "stylegan"]
EXACTLY = {"rtol": 0, "atol": 0}


def batch(kind, count=16, shape=(3, 16, 16), seed=0):
    inputs, _, _ = noise_examples(kind, count, shape).batch(torch.arange(count), Key(("noise", seed)))
    return inputs


def equal_neighbours(images):
    """The share of horizontal neighbours that are equal."""
    return float((images[..., 1:] == images[..., :-1]).all(1).float().mean())


def smoothness(images):
    """The correlation of horizontal neighbours."""
    return float(torch.corrcoef(torch.stack([images[..., 1:].flatten(), images[..., :-1].flatten()]))[0, 1])


# Every kind


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_decides_the_noise(kind):
    assert_close(batch(kind, seed=1), batch(kind, seed=1), **EXACTLY)
    assert not torch.allclose(batch(kind, seed=1), batch(kind, seed=2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("global_generator_unchanged")
def test_noise_is_not_drawn_from_the_global_generator(kind):
    batch(kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(3, 16, 16), (1, 12, 20), (3, 4, 4), (2, 9, 3)])
def test_noise_has_the_shape_asked_for_and_no_holes(kind, shape):
    examples = noise_examples(kind, 16, shape)
    assert examples.input_shape == shape
    assert batch(kind, shape=shape).shape == (16, *shape)
    assert batch(kind, shape=shape).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_has_mean_zero_and_deviation_one_in_every_channel(kind):
    noise = batch(kind, count=64)
    # Of 64 * 16 * 16 independent entries the mean deviates by 1 / 128, the standard deviation by less.
    tolerance = {"rtol": 0, "atol": 4 / 128 if kind == "gaussian" else 1e-4}
    assert_close(noise.mean((0, 2, 3)), torch.zeros(3), **tolerance)
    assert_close(noise.std((0, 2, 3)), torch.ones(3), **tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_no_two_images_of_a_batch_are_alike(kind):
    images = batch(kind).flatten(1)
    gaps = (images[:, None] - images[None]).abs().mean(2) + 9 * torch.eye(16)
    assert gaps.amin() > 0.1


def test_noise_is_never_seen_twice():
    seen = []

    def look(net, batch, extras):
        seen.append(batch[0])
        return net(batch[0]).square().mean()

    train(
        Fit(nn.Linear(5, 1), look, noise_examples("gaussian", 16, (5,)), LocalTraining(epochs=3, batch_size=8)),
        Key((0,)),
    )
    assert [len(noise) for noise in seen] == [8] * 6
    for place, noise in enumerate(seen):
        assert not any(torch.equal(noise, other) for other in seen[place + 1 :])


def test_noise_takes_no_memory_before_it_is_drawn():
    examples = noise_examples("gaussian", 10**6, (3, 32, 32))
    assert len(examples) == 10**6
    assert examples.inputs.untyped_storage().nbytes() == examples.targets.untyped_storage().nbytes() == 0


# Gaussian


def test_gaussian_noise_serves_inputs_of_any_shape():
    for shape in [(10,), (7, 5), (2, 3, 4, 5)]:
        assert batch("gaussian", shape=shape).shape == (16, *shape)


def test_gaussian_noise_is_normal_and_independent():
    noise = batch("gaussian", count=64)
    # A standard normal lies within 1 with probability erf(1 / sqrt 2), and its fourth moment is 3.
    assert float((noise.abs() < 1).float().mean()) == pytest.approx(math.erf(1 / math.sqrt(2)), abs=0.01)
    assert float(noise.pow(4).mean()) == pytest.approx(3, abs=0.2)
    assert abs(smoothness(noise)) < 0.02
    assert equal_neighbours(noise) == 0


# Images


@pytest.mark.parametrize("kind", IMAGES)
@pytest.mark.parametrize("shape", [(10,), (2, 3, 4, 5)])
def test_image_noise_refuses_inputs_that_are_no_images_in_one_line(kind, shape):
    with pytest.raises(ConfigError, match=rf"noise '{kind}' makes images; expected .*, found \({shape[0]},") as error:
        noise_examples(kind, 4, shape)
    assert "\n" not in str(error.value)


def test_dead_leaves_are_patches_of_one_colour():
    images = batch("dead_leaves", shape=(3, 32, 32))
    assert equal_neighbours(images) > 0.3
    colours = [len(image.flatten(1).T.unique(dim=0)) for image in images]
    assert min(colours) > 2
    assert max(colours) < 32 * 32 / 2


def test_colours_of_leaves_are_uniform():
    # A uniform colour has standard deviation sqrt(1/12), so that standardised values end at about sqrt(3) = 1.73.
    images = batch("dead_leaves", count=64)
    assert 1.6 < images.amax() < 1.95
    assert -1.95 < images.amin() < -1.6


def leaf(*corners, radius, round=False):
    """One leaf around the middle of an image of 41 x 41 pixels."""
    angles = torch.tensor(corners) * math.pi
    return Leaves(torch.full((1, 1, 2), 20.0), torch.full((1, 1), radius), angles[None, None], torch.tensor([[round]]))


def covered(leaf):
    y, x = torch.ones(41, 41).nonzero().unbind(1)
    return leaf.cover(torch.zeros_like(y), y, x).view(41, 41)


def test_a_disc_covers_its_circle():
    down, right = torch.meshgrid(torch.arange(41) - 20, torch.arange(41) - 20, indexing="ij")
    found = covered(leaf(0.25, 0.75, 1.25, 1.75, radius=13.0, round=True))
    assert_close(found, down**2 + right**2 <= 13**2)


def test_an_upright_square_has_its_corners_on_the_circle():
    found = covered(leaf(0.25, 0.75, 1.25, 1.75, radius=10 * math.sqrt(2)))
    expected = torch.zeros(41, 41, dtype=torch.bool)
    expected[10:31, 10:31] = True
    assert_close(found, expected)


def test_a_turned_square_is_a_diamond():
    down, right = torch.meshgrid(torch.arange(41) - 20, torch.arange(41) - 20, indexing="ij")
    assert_close(covered(leaf(0.0, 0.5, 1.0, 1.5, radius=12.0)), down.abs() + right.abs() <= 12)


def test_a_triangle_may_lie_beside_its_centre():
    # Corners at 0, 45 and 90 degrees; twice the area is r^2 (sin 45 + sin 45 + sin 270) by the shoelace formula.
    found = covered(leaf(0.0, 0.25, 0.5, 0.5, radius=20.0))
    assert not found[20, 20]
    assert not found[:20].any()
    assert not found[:, :20].any()
    area = 20**2 * (2 * math.sin(math.pi / 4) - 1) / 2
    edge = 20 * (2 * 2 * math.sin(math.pi / 8) + math.sqrt(2))
    assert area - edge / 2 < int(found.sum()) < area + edge / 2


def test_a_pixel_shows_the_foremost_leaf_that_covers_it(monkeypatch):
    def three_discs(count, height, width, rng):
        """A small disc in front of a larger one, both in front of one that covers the image."""
        radius = torch.tensor([[4.0, 9.0, 99.0]]).expand(count, 3)
        corners = torch.arange(4) * math.pi / 2
        return Leaves(torch.full((count, 3, 2), 20.0), radius, corners.expand(count, 3, 4), radius > 0)

    monkeypatch.setattr("potluck.parts.noise.draw_leaves", three_discs)
    down, right = torch.meshgrid(torch.arange(41) - 20, torch.arange(41) - 20, indexing="ij")
    ring = (down**2 + right**2 > 4**2).int() + (down**2 + right**2 > 9**2).int()
    for image in batch("dead_leaves", count=4, shape=(3, 41, 41)):
        shown = [image[:, ring == place].unique(dim=1) for place in range(3)]
        assert [colours.shape[1] for colours in shown] == [1, 1, 1]
        assert len(torch.cat(shown, 1).unique(dim=1).T) == 3


def test_leaves_are_of_six_kinds_with_small_ones_the_most():
    leaves = draw_leaves(500, 100, 100, torch.Generator().manual_seed(0))
    assert leaves.radius.shape == (500, LEAVES_AT_ONCE)
    # From 0.03 to 1 the integral of 1/r^3 - 1 is 1/(2 * 0.03^2) - 1/2 - 0.97 = 554.1; up to 0.05925, the seventh of the
    # 200 radii, it is 413.1. A sum over the grid adds to the integral half a step of 0.00487 of the values at both
    # ends, 90.3 at 0.03 and 11.7 at 0.05925 (Euler and Maclaurin): (413.1 + 102.0) / (554.1 + 90.3) = 0.80.
    assert float((leaves.radius < 6).float().mean()) == pytest.approx(0.80, abs=0.015)
    assert leaves.radius.amin() == 3
    assert float(leaves.round.float().mean()) == pytest.approx(1 / 6, abs=0.02)
    for one, next in pairwise(leaves.corners.unbind(2)):
        assert (one <= next).all()


def test_centres_lie_anywhere_in_the_image():
    rows, columns = draw_leaves(500, 10, 30, torch.Generator().manual_seed(0)).centre.unbind(2)
    assert sorted(set(rows.flatten().tolist())) == list(range(10))
    assert sorted(set(columns.flatten().tolist())) == list(range(30))


def test_the_untrained_generator_makes_smooth_images_with_colours_of_their_own():
    images = batch("stylegan", shape=(3, 32, 32))
    assert smoothness(images) > 0.5
    assert equal_neighbours(images) < 0.2
    means = images.mean((2, 3))
    assert means.std(0).amin() > 0.2
