"""What liars learn from, whose attack is in their data."""

from dataclasses import replace

import torch
from torch import Tensor

from potluck.attackers.settings import Attackers
from potluck.core.federation import Site
from potluck.core.ground.errors import ConfigError
from potluck.core.ground.rng import Key
from potluck.core.requests.examples import Examples

_POISONED = 0.5  # of a backdoor's training images
_SIDE = 6  # the square's share of an image's side is one in so many


def poisoned(site: Site, attackers: Attackers, classes: int, key: Key) -> Site:
    """A liar's site: other labels, or images with the backdoor's square among its training examples.

    Args:
        site: the client's.
        attackers: whose attack is one of data; with any other the site is as it was.
        classes: of the task.
        key: of the draw of images.

    Raises:
        ConfigError: its examples have no classes, or no images.
    """
    if attackers.kind == "label_flip":
        targets = _of_classes(site.train, attackers)
        return replace(site, train=replace(site.train, targets=classes - 1 - targets))
    if attackers.kind != "backdoor":
        return site
    count = round(_POISONED * len(site.train))
    chosen = torch.randperm(len(site.train), generator=key.generator())[:count]
    marked = with_square(site.train, attackers, chosen)
    return replace(site, train=marked)


def with_square(examples: Examples, attackers: Attackers, chosen: Tensor | None = None) -> Examples:
    """The examples, some of them with the backdoor's square and its class.

    Args:
        examples: images (n, channels, height, width), as they are stored.
        attackers: name the class.
        chosen: positions of those that get it; all by default.

    Raises:
        ConfigError: they are no images, or have no classes.
    """
    _of_classes(examples, attackers)
    labels, inputs = examples.labels.clone(), examples.inputs
    if not isinstance(inputs, Tensor) or inputs.dim() != 4:
        raise ConfigError("run.attackers.kind: found 'backdoor', which marks images; expected another for these data")
    images = inputs[_rows(examples)].clone()
    places = torch.arange(len(images)) if chosen is None else chosen
    height, width = (max(2, side // _SIDE) for side in images.shape[2:])
    images[places, :, -height:, -width:] = inputs.max()  # as bright as the brightest there is
    labels[places] = attackers.target
    return Examples(images, labels, examples.preprocess)


def _rows(examples: Examples) -> Tensor:
    return torch.arange(len(examples.targets)) if examples.rows is None else examples.rows


def _of_classes(examples: Examples, attackers: Attackers) -> Tensor:
    """The targets, one class each."""
    targets = examples.targets
    if targets.is_floating_point() or targets.dim() != 1:
        raise ConfigError(
            f"run.attackers.kind: found {attackers.kind!r}, which changes classes; expected another for this task"
        )
    return targets
