"""Batched image operations. Every random draw comes from the generator that is passed in."""

from dataclasses import dataclass, replace
from typing import Annotated, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from potluck.core.fields import Checked, above, at_least


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
    """Bilinear resizing to `size` x `size` pixels; for float images, so it comes after `Normalise`."""

    size: Annotated[int, at_least(1)]

    def __call__(self, inputs: Tensor) -> Tensor:
        """Float images (batch, channels, height, width) to (batch, channels, size, size)."""
        return functional.interpolate(inputs, size=(self.size, self.size), mode="bilinear", antialias=True)


@dataclass(frozen=True)
class RandomCrop(Checked):
    """Pad each side by `padding` zeros and crop to the old size at a random position."""

    padding: Annotated[int, at_least(0)]

    def __call__(self, images: Tensor, rng: torch.Generator) -> Tensor:
        """Images (batch, channels, height, width) to the same shape."""
        count, _, height, width = images.shape
        top = _draw(2 * self.padding + 1, images, rng)
        left = _draw(2 * self.padding + 1, images, rng)
        padded = functional.pad(images, (self.padding,) * 4)
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
    """Set a square of `size` pixels to 0 (DeVries and Taylor, 2017).

    Its centre is any pixel, so at the border a part of the square falls outside.
    """

    size: Annotated[int, at_least(1)]

    def __call__(self, images: Tensor, rng: torch.Generator) -> Tensor:
        """Images (batch, channels, height, width) to the same shape."""
        rows = self._covered(images.shape[-2], images, rng)
        columns = self._covered(images.shape[-1], images, rng)
        return images.masked_fill((rows[:, :, None] & columns[:, None, :])[:, None], 0)

    def _covered(self, length: int, images: Tensor, rng: torch.Generator) -> Tensor:
        """Which of `length` positions the square covers, (batch, length)."""
        start = _draw(length, images, rng)[:, None] - self.size // 2
        position = torch.arange(length, device=images.device)
        return (position >= start) & (position < start + self.size)


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
