"""Batched image operations. Every random draw comes from the generator that is passed in."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from potluck.core.ground.fields import Checked, above, at_least
from potluck.core.ground.inputs import Inputs, by_name
from potluck.core.requests.examples import Preprocess

_TOGETHER = 2**24  # numbers that shrinking holds at once, beside the images


class Step(Protocol):
    """A fixed operation on inputs (batch, ...)."""

    def __call__(self, inputs: Tensor) -> Tensor:
        """Changed inputs."""
        ...


class Augmentation(Protocol):
    """A random operation on images (batch, channels, height, width), with separate draws for each image."""

    def __call__(self, images: Tensor, rng: torch.Generator) -> Tensor:
        """Images of the same shape."""
        ...


@dataclass(frozen=True)
class Pipeline:
    """The preprocessing of stored inputs for a model.

    Attributes:
        prepare: fixed steps, always applied: conversion to float, normalisation, resizing.
        before: augmentations of the stored pixels (a crop pads with black).
        after: augmentations of the prepared inputs (a cut-out leaves the value 0, the mean).
    """

    prepare: tuple[Step, ...]
    before: tuple[Augmentation, ...] = ()
    after: tuple[Augmentation, ...] = ()

    def __call__(self, inputs: Tensor, rng: torch.Generator | None) -> Tensor:
        """Prepared inputs (batch, ...); augmented by draws from `rng` if there is one."""
        if rng is not None:
            inputs = _augment(inputs, self.before, rng)
        for step in self.prepare:
            inputs = step(inputs)
        return inputs if rng is None else _augment(inputs, self.after, rng)

    def without_augmentation(self) -> "Pipeline":
        """The fixed steps alone."""
        return replace(self, before=(), after=())

    def sized(self, size: int | None) -> "Pipeline":
        """With images of `size` x `size` in place of another size; None leaves the stored one."""
        kept = tuple(step for step in self.prepare if not isinstance(step, Resize))
        return replace(self, prepare=kept if size is None else (*kept, Resize(size)))


@dataclass(frozen=True)
class ByName:
    """A preprocessing for each of the named inputs that has one; the others stay as they are.

    Attributes:
        steps: by the input's name.
    """

    steps: Mapping[str, Pipeline]

    def __call__(self, inputs: Mapping[str, Tensor], rng: torch.Generator | None) -> dict[str, Tensor]:
        """Prepared inputs (batch, ...) by name."""
        return {name: self.steps[name](x, rng) if name in self.steps else x for name, x in inputs.items()}


@dataclass(frozen=True)
class Then:
    """A preprocessing that is none of ours, and a fixed step after it."""

    first: Preprocess
    step: Step

    def __call__(self, inputs: Tensor, rng: torch.Generator | None) -> Tensor:
        """Prepared inputs (batch, ...)."""
        return self.step(self.first(inputs, rng))


@dataclass(frozen=True)
class _Fixed:
    """What a preprocessing does without a generator, as a step."""

    preprocess: Preprocess

    def __call__(self, inputs: Tensor) -> Tensor:
        return self.preprocess(inputs, None)


def plain(inputs: Inputs) -> Pipeline | ByName | None:
    """Preprocessing of data that is in no paper: images are scaled to 0 .. 1, all else unchanged."""
    scaled = {name: Pipeline(prepare=(Normalise(),)) for name, x in by_name(inputs).items() if x.dtype == torch.uint8}
    if not scaled:
        return None
    return ByName(scaled) if isinstance(inputs, Mapping) else scaled[""]


def without_augmentation(preprocess: Preprocess | None) -> Pipeline:
    """The fixed part of any preprocessing."""
    if isinstance(preprocess, Pipeline):
        return preprocess.without_augmentation()
    return Pipeline(() if preprocess is None else (_Fixed(preprocess),))


def augmented(preprocess: Preprocess | None, steps: Collection[str]) -> Pipeline:
    """The fixed part of a preprocessing, and these steps of `STEPS` in their order."""
    before, after = ({name: step for name, step in of.items() if name in steps} for of in (_BEFORE, _AFTER))
    return replace(without_augmentation(preprocess), before=tuple(before.values()), after=tuple(after.values()))


@dataclass(frozen=True)
class Normalise(Checked):
    """(input - mean) / std as float32; bytes are first divided by `largest`, the value of full brightness.

    One mean and std for each channel, or one for all. The defaults only scale bytes to 0 .. 1.
    """

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    largest: Annotated[float, above(0)] = 255.0

    def __call__(self, inputs: Tensor) -> Tensor:
        """Inputs (batch, channels, ...) of any type to float32."""
        scaled = inputs.float() / self.largest if inputs.dtype == torch.uint8 else inputs.float()
        return (scaled - _by_channel(self.mean, scaled)) / _by_channel(self.std, scaled)


@dataclass(frozen=True)
class Resize(Checked):
    """Bilinear resizing to `size` x `size` pixels; for float images, so it comes after `Normalise`.

    Done batch by batch, so that large images are never stored.
    """

    size: Annotated[int, at_least(1)]

    def __call__(self, inputs: Tensor) -> Tensor:
        """Float images (batch, channels, height, width) to (batch, channels, size, size)."""
        return functional.interpolate(inputs, size=(self.size, self.size), mode="bilinear", antialias=True)


def shrunk(images: Tensor, height: int, width: int) -> Tensor:
    """Smaller images (n, channels, height, width), by a box filter.

    A pixel is the mean over the area that it covers; pixels of the old image that lie in it in part count by that part.
    Bytes are rounded. Equal on every machine, since sums of bytes are exact.
    """
    rows, columns = _areas(images.shape[-2], height), _areas(images.shape[-1], width)
    made = torch.empty(*images.shape[:2], height, width, dtype=images.dtype)
    count = max(1, _TOGETHER // images[0].numel())
    for part, into in zip(images.split(count), made.split(count), strict=True):
        means = rows @ part.double() @ columns.T / (images.shape[-2] * images.shape[-1])
        into.copy_(means if images.is_floating_point() else means.round())
    return made


def _areas(old: int, new: int) -> Tensor:
    """How much of each old pixel a new one covers along one side, (new, old); a whole old pixel counts `new`."""
    edges, covered = torch.arange(old) * new, torch.arange(new)[:, None] * old
    inside = (edges + new).minimum(covered + old) - edges.maximum(covered)
    return inside.clamp(min=0).double()


@dataclass(frozen=True)
class RandomCrop(Checked):
    """Pad each side by zeros and crop to the old size at a random position.

    Attributes:
        padding: in pixels; None for an eighth of the shorter side, which is 4 of 32 and of 28.
    """

    padding: Annotated[int, at_least(0)] | None = None

    def __call__(self, images: Tensor, rng: torch.Generator) -> Tensor:
        """Images (batch, channels, height, width) to the same shape."""
        count, _, height, width = images.shape
        padding = (min(height, width) + 4) // 8 if self.padding is None else self.padding
        top = _draw(2 * padding + 1, images, rng)
        left = _draw(2 * padding + 1, images, rng)
        padded = functional.pad(images, (padding,) * 4)
        # Every possible crop as a view, (batch, channels, tops, lefts, height, width): indexing it copies
        # whole crops, six times faster than gathering pixel by pixel.
        crops = padded.unfold(2, height, 1).unfold(3, width, 1)
        return crops[torch.arange(count, device=images.device), :, top, left]


@dataclass(frozen=True)
class RandomFlip:
    """Swap left and right in half of the images."""

    def __call__(self, images: Tensor, rng: torch.Generator) -> Tensor:
        """Images (batch, channels, height, width) to the same shape."""
        flipped = _draw(2, images, rng).bool()
        return torch.where(flipped[:, None, None, None], images.flip(-1), images)


@dataclass(frozen=True)
class Cutout(Checked):
    """Set a square to 0 (DeVries and Taylor, 2017).

    Its centre is any pixel, so at the border a part of the square falls outside.

    Attributes:
        size: of the square, in pixels; None for half the shorter side.
    """

    size: Annotated[int, at_least(1)] | None = None

    def __call__(self, images: Tensor, rng: torch.Generator) -> Tensor:
        """Images (batch, channels, height, width) to the same shape."""
        size = min(images.shape[-2:]) // 2 if self.size is None else self.size
        rows = self._covered(size, images.shape[-2], images, rng)
        columns = self._covered(size, images.shape[-1], images, rng)
        return images.masked_fill((rows[:, :, None] & columns[:, None, :])[:, None], 0)

    def _covered(self, size: int, length: int, images: Tensor, rng: torch.Generator) -> Tensor:
        """Which of `length` positions the square covers, (batch, length)."""
        start = _draw(length, images, rng)[:, None] - size // 2
        position = torch.arange(length, device=images.device)
        return (position >= start) & (position < start + size)


_BEFORE: dict[str, Augmentation] = {"crop": RandomCrop(), "flip": RandomFlip()}
_AFTER: dict[str, Augmentation] = {"cutout": Cutout()}
STEPS = (*_BEFORE, *_AFTER)
"""The augmentations that have a name, in the order in which they are applied."""


def _augment(inputs: Tensor, augmentations: tuple[Augmentation, ...], rng: torch.Generator) -> Tensor:
    for augmentation in augmentations:
        inputs = augmentation(inputs, rng)
    return inputs


def _draw(choices: int, images: Tensor, rng: torch.Generator) -> Tensor:
    """One number below `choices` for each image, drawn on the generator's device and moved to the images'."""
    return torch.randint(choices, (len(images),), generator=rng, device=rng.device).to(images.device)


def _by_channel(values: tuple[float, ...], inputs: Tensor) -> Tensor:
    """The values as a tensor that broadcasts along the second axis of `inputs`."""
    return torch.tensor(values, device=inputs.device).view(-1, *[1] * (inputs.dim() - 2))
