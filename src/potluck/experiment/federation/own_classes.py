"""Clients whose networks have outputs for their own classes alone, as `federation.classes = "own"` asks for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from potluck.core.federation import Builder
from potluck.core.ground.errors import ConfigError
from potluck.core.ground.rng import Key, isolated
from potluck.core.nets.classes import OwnClasses, OwnHead, axes_of_classes
from potluck.core.requests.examples import Examples
from potluck.core.tasks.task import Task
from potluck.experiment.settings.schema import ModelSpec

Parts = tuple[Examples, Examples, Examples]
"""A client's training, validation and test examples."""

_LONGEST = 40  # characters of classes in a name


@dataclass
class OwnHeads:
    """The builders of networks with outputs for some of the federation's classes alone.

    Attributes:
        builder_for: what makes the builder of a model with a number of outputs.
        width: how many classes the federation has.
        builders: those that have been asked for, by the architecture's name.
    """

    builder_for: Callable[[ModelSpec, int], Builder]
    width: int
    builders: dict[str, Builder] = field(default_factory=dict[str, Builder])
    _plain: dict[tuple[str, int], Builder] = field(default_factory=dict[tuple[str, int], Builder])
    _axes: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])

    def named(self, spec: ModelSpec, numbers: Sequence[int]) -> str:
        """The name of a model's architecture with outputs for these classes, in this order.

        Raises:
            ConfigError: its networks do not have as many outputs as they are asked for.
        """
        own = OwnClasses(tuple(numbers), self.width)
        if own.numbers == tuple(range(self.width)):
            return spec.architecture
        name = architecture_with(spec.architecture, own)
        if name not in self.builders:
            # Initial weights come from the network with all classes, whose file has rows for all of them.
            builder = self._builder(replace(spec, weights=None), len(numbers))
            self.builders[name] = OwnHead(builder, spec.architecture, own, self._axes_of(spec))
        return name

    def _builder(self, spec: ModelSpec, outputs: int) -> Builder:
        """One for all clients with so many classes, so that what is known of its networks is found once."""
        if (spec.architecture, outputs) not in self._plain:
            self._plain[spec.architecture, outputs] = self.builder_for(spec, outputs)
        return self._plain[spec.architecture, outputs]

    def _axes_of(self, spec: ModelSpec) -> dict[str, int]:
        if spec.architecture not in self._axes:
            plain = replace(spec, weights=None)
            net, wider = (_built(self._builder(plain, outputs)) for outputs in (self.width, self.width + 1))
            try:
                found = axes_of_classes(net, wider, self.width)
            except ConfigError as problem:
                raise ConfigError(f"federation.classes: {spec.architecture}: {problem}") from problem
            if not found:
                raise ConfigError(
                    f"federation.classes: {spec.architecture} has the same outputs whatever the classes; expected a"
                    " class or function that takes num_classes, since clients have unlike numbers of them"
                )
            self._axes[spec.architecture] = found
        return self._axes[spec.architecture]


def architecture_with(base: str, own: OwnClasses) -> str:
    """The name of an architecture with outputs for some classes."""
    text = str(own)
    return f"{base}[{text if len(text) <= _LONGEST else f'{len(own.numbers)} classes, {Key((text,)).seed:016x}'}]"


def classes_held(parts: Parts) -> tuple[int, ...]:
    """The classes that a client may learn, ascending: those of its training and validation examples."""
    train, validation, _ = parts
    return tuple(torch.cat([train.labels, validation.labels]).unique().tolist())


def of_classes(parts: Parts, numbers: Sequence[int]) -> Parts:
    """A client's examples of these classes; its test part may have held others, which it cannot know."""
    known = torch.tensor(list(numbers))
    train, validation, test = (part.take(torch.isin(part.labels, known).nonzero().flatten()) for part in parts)
    return train, validation, test


def check_has_classes(task: Task) -> None:
    """Check that a task has classes of which clients may have some.

    Raises:
        ConfigError: it has none.
    """
    if not task.has_classes:
        raise ConfigError(
            f"federation.classes: found 'own', and {task.name} has no single class for each example; leave it out"
        )


def _built(builder: Builder) -> nn.Module:
    with isolated(Key(("classes",))):
        return builder()
