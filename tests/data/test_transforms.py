"""Batched operations against loops over single pixels."""

import pytest
import torch
from torch import Tensor

from potluck.core.ground.rng import fold_in
from potluck.core.requests.examples import Examples
from potluck.data.transforms import Cutout, Normalise, Pipeline, RandomCrop, RandomFlip, Resize, shrunk

KEY = fold_in(0, "test")


@pytest.fixture
def images() -> Tensor:
    return torch.randint(1, 256, (40, 3, 8, 6), dtype=torch.uint8, generator=KEY.generator())


def draws(count: int, *choices: int) -> list[list[int]]:
    """The draws of one generator, in order, one list a call."""
    rng = KEY.generator()
    return [torch.randint(choice, (count,), generator=rng).tolist() for choice in choices]


def test_crop_equals_a_loop_over_pixels(images: Tensor) -> None:
    top, left = draws(len(images), 5, 5)
    expected = torch.zeros_like(images)
    for n in range(len(images)):
        for y in range(8):
            for x in range(6):
                row, column = y + top[n] - 2, x + left[n] - 2
                if 0 <= row < 8 and 0 <= column < 6:
                    expected[n, :, y, x] = images[n, :, row, column]
    assert torch.equal(RandomCrop(2)(images, KEY.generator()), expected)


def test_crop_reaches_every_place(images: Tensor) -> None:
    top, left = draws(len(images), 5, 5)
    assert set(top) == set(left) == {0, 1, 2, 3, 4}


def test_flip_equals_a_loop_over_images(images: Tensor) -> None:
    (flipped,) = draws(len(images), 2)
    expected = torch.stack(
        [image[:, :, range(5, -1, -1)] if f else image for f, image in zip(flipped, images, strict=True)]
    )
    assert 0 < sum(flipped) < len(images)
    assert torch.equal(RandomFlip()(images, KEY.generator()), expected)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_cutout_equals_a_loop_over_pixels(images: Tensor, size: int) -> None:
    rows, columns = draws(len(images), 8, 6)
    expected = images.clone()
    for n in range(len(images)):
        for y in range(rows[n] - size // 2, rows[n] - size // 2 + size):
            for x in range(columns[n] - size // 2, columns[n] - size // 2 + size):
                if 0 <= y < 8 and 0 <= x < 6:
                    expected[n, :, y, x] = 0
    before = images.clone()
    assert torch.equal(Cutout(size)(images, KEY.generator()), expected)
    assert torch.equal(images, before)


@pytest.mark.parametrize(("side", "padding"), [(8, 1), (16, 2), (28, 4), (32, 4), (64, 8), (224, 28)])
def test_without_a_size_steps_are_as_large_as_the_images_are(side: int, padding: int) -> None:
    images = torch.rand(12, 1, side, side, generator=KEY.generator())
    crop, cutout = RandomCrop()(images, KEY.generator()), Cutout()(images, KEY.generator())
    assert torch.equal(crop, RandomCrop(padding)(images, KEY.generator()))
    assert torch.equal(cutout, Cutout(side // 2)(images, KEY.generator()))


def test_shrinking_by_whole_blocks_gives_their_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("potluck.data.transforms._TOGETHER", 100_000)  # so that there are several parts
    images = torch.randint(0, 256, (1500, 3, 8, 12), dtype=torch.uint8, generator=KEY.generator())
    blocks = images.double().reshape(1500, 3, 4, 2, 4, 3).mean((3, 5))
    assert torch.equal(shrunk(images.double(), 4, 4), blocks)
    assert torch.equal(shrunk(images, 4, 4), blocks.round().to(torch.uint8))
    floats = torch.rand(3, 1, 8, 8, generator=KEY.generator())
    torch.testing.assert_close(shrunk(floats, 4, 4), floats.reshape(3, 1, 4, 2, 4, 2).mean((3, 5)))


def test_shrinking_weighs_pixels_by_the_area_that_is_covered() -> None:
    """5 to 3 is every pixel thrice and then the mean of fives; an edge's pixels are neither lost nor counted twice."""
    images = torch.randint(0, 256, (4, 2, 5, 5), dtype=torch.uint8, generator=KEY.generator()).double()
    fine = images.repeat_interleave(3, 2).repeat_interleave(3, 3)
    expected = fine.reshape(4, 2, 3, 5, 3, 5).mean((3, 5))
    torch.testing.assert_close(shrunk(images, 3, 3), expected, rtol=1e-14, atol=1e-12)


def test_normalise_bytes() -> None:
    images = torch.tensor([[[[0, 255]], [[51, 102]]]], dtype=torch.uint8)
    prepared = Normalise(mean=(0.5, 0.2), std=(0.5, 0.4))(images)
    assert prepared.dtype == torch.float32
    torch.testing.assert_close(prepared, torch.tensor([[[[-1.0, 1.0]], [[0.0, 0.5]]]]))


def test_normalise_leaves_the_scale_of_floats_alone() -> None:
    features = torch.tensor([[3.0, 5.0]], dtype=torch.float64)
    torch.testing.assert_close(Normalise((1.0,), (2.0,))(features), torch.tensor([[1.0, 2.0]]))


def test_one_mean_serves_all_channels(images: Tensor) -> None:
    torch.testing.assert_close(Normalise((0.5,), (0.25,))(images), Normalise((0.5,) * 3, (0.25,) * 3)(images))


def test_resize_equals_bilinear_interpolation_by_hand() -> None:
    image = torch.rand(1, 1, 7, 7, generator=KEY.generator())
    expected = torch.zeros(1, 1, 8, 8)
    for y in range(8):
        for x in range(8):
            for row in range(7):
                for column in range(7):
                    # Pixel centres lie at halves; places beyond the outer centres take the outer pixel.
                    at_y = min(max((y + 0.5) * 7 / 8 - 0.5, 0), 6)
                    at_x = min(max((x + 0.5) * 7 / 8 - 0.5, 0), 6)
                    weight = max(0, 1 - abs(at_y - row)) * max(0, 1 - abs(at_x - column))
                    expected[0, 0, y, x] += weight * image[0, 0, row, column]
    torch.testing.assert_close(Resize(8)(image), expected)


PIPELINE = Pipeline(prepare=(Normalise((0.5,), (0.5,)),), before=(RandomCrop(2), RandomFlip()), after=(Cutout(3),))


def test_pipeline_without_a_generator_only_prepares(images: Tensor) -> None:
    expected = Normalise((0.5,), (0.5,))(images)
    assert torch.equal(PIPELINE(images, None), expected)
    assert torch.equal(PIPELINE.without_augmentation()(images, KEY.generator()), expected)


def test_pipeline_takes_its_steps_in_order(images: Tensor) -> None:
    rng = KEY.generator()
    expected = RandomFlip()(RandomCrop(2)(images, rng), rng)
    expected = Cutout(3)(Normalise((0.5,), (0.5,))(expected), rng)
    assert torch.equal(PIPELINE(images, KEY.generator()), expected)


def test_pipeline_draws_from_its_generator_alone(images: Tensor) -> None:
    state = torch.get_rng_state()
    first, second = PIPELINE(images, KEY.generator()), PIPELINE(images, KEY.generator())
    other = PIPELINE(images, KEY.fold("other").generator())
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_pipeline_serves_examples(images: Tensor) -> None:
    examples = Examples(images, torch.zeros(len(images), dtype=torch.int64), PIPELINE)
    plain, _, _ = examples.batch(torch.arange(4))
    augmented, _, _ = examples.batch(torch.arange(4), KEY)
    assert plain.shape == augmented.shape == (4, 3, 8, 6)
    assert not torch.equal(plain, augmented)
