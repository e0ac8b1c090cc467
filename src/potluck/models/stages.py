"""A network as stages in a row, behind which it can end or have exits: a staged one, or any other by its dataflow.

Methods that train parts of a network's depth ask `stages_of` alone, so that they need not know which of the two they
have.
"""

import copy
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TypeVar, cast

from torch import Size, Tensor, nn

from potluck.core.ground.inputs import Inputs, InputShape
from potluck.core.nets.batchnorm import batch_norms
from potluck.core.nets.classes import own_classes_of, spread_outputs, with_classes
from potluck.core.nets.slicing import cut_of
from potluck.core.nets.splitting import CannotSplit, Stage, plan_of
from potluck.core.nets.weights import Weights, parameters_of
from potluck.models.contract import (
    Blocks,
    Exit,
    GlobalPool,
    StagedNet,
    blocks,
    is_norm,
    linear_exit,
    of_depth,
    place_names,
    place_shapes,
    staged,
    with_exits,
)
from potluck.models.cutnet import CutNet, TokenMean

N = TypeVar("N", bound=nn.Module)

BlockTensors = Mapping[str, str]
"""The names of a block's weights and buffers in the network, by names that blocks of one kind have in common."""


class Stages(ABC):
    """A network's depth.

    Attributes:
        net: the network.
    """

    net: nn.Module

    @property
    @abstractmethod
    def blocks(self) -> list[str]:
        """The places behind the blocks, which depth counts: of all stages, or blocks of stages, but the stem."""

    @property
    @abstractmethod
    def rows(self) -> dict[str, list[BlockTensors]]:
        """The blocks in rows: those of one stage or one list of modules, and all others together."""

    @property
    @abstractmethod
    def stages(self) -> list[str]:
        """All stages, by name."""

    @abstractmethod
    def between(self, start: int, stop: int) -> nn.Module:
        """The stages from `start` to before `stop` as one module, which shares its tensors with the network."""

    @property
    @abstractmethod
    def classifier(self) -> nn.Module:
        """What lies behind the last stage, pooling and head, as one module."""

    @abstractmethod
    def is_norm(self, number: int) -> bool:
        """Whether a stage has norms alone."""

    @abstractmethod
    def names_between(self, start: int, stop: int) -> frozenset[str]:
        """The names of the weights and buffers of the stages from `start` to before `stop`."""

    @abstractmethod
    def without(self, start: int, stop: int) -> "Stages":
        """The network without the stages from `start` to before `stop`."""

    @abstractmethod
    def to_outputs(self, start: int, stop: int, after: int, link: nn.Module | None = None) -> nn.Module:
        """The stages from `start` to before `stop`, the link, the stages from `after` on, and pooling and head."""

    @abstractmethod
    def to_exit(self, start: int, stop: int, exit: nn.Module) -> nn.Module:
        """The stages from `start` to before `stop`, and an exit, which has outputs for the network's classes."""

    @abstractmethod
    def behind(self, stop: int) -> Weights:
        """A copy of the trained weights behind the stages before `stop`, by their names in `to_outputs`."""

    @abstractmethod
    def names(self) -> dict[str, frozenset[str]]:
        """By place, in order, the names of the weights and buffers before it and behind the one before."""

    @abstractmethod
    def shapes(self, input_shape: InputShape) -> dict[str, Size]:
        """By place, in order, the shape of one example's features there."""

    @abstractmethod
    def leading(self, depth: int, exits: Mapping[str, nn.Module]) -> nn.Module:
        """So many leading blocks, with these exits by place; it ends in the last of them unless it has all blocks.

        Its tensors are those of the network, and have the names that they have there.
        """

    @abstractmethod
    def small_exit(self, features: Size, outputs: int, *, track: bool = True) -> Exit:
        """A norm, a mean over positions and a linear layer, see `potluck.models.contract.linear_exit`."""

    @abstractmethod
    def has_maps(self, features: Size) -> bool:
        """Whether features of this shape are images, (channels, height, width)."""

    def _with_classes(self, ending: N) -> N:
        """A net that ends as the network does, which puts out what the network would, see `with_classes`."""
        own = own_classes_of(self.net)
        return ending if own is None or own_classes_of(ending) else with_classes(ending, own)

    def kept_at(self, place: str, of: Callable[[int], int], input_shape: InputShape) -> slice | Tensor:
        """Which channels at a place a narrower net has that is cut out of this one.

        Args:
            place: behind a block that is not the last.
            of: how many channels are left of a number of channels.
            input_shape: of one example.

        Raises:
            ConfigError: what lies before the place cannot be made narrower.
        """
        reader = self.small_exit(self.shapes(input_shape)[place], 2)
        net = copy.deepcopy(self.leading(1 + self.blocks.index(place), {place: reader}))
        return cut_of(net, of, input_shape).places[f"exits.{place}.head.weight"][1]


class _OfStages(Stages):
    """A staged network's."""

    def __init__(self, net: StagedNet) -> None:
        self.net = self._staged = net

    @property
    def blocks(self) -> list[str]:
        return blocks(self._staged)

    @property
    def rows(self) -> dict[str, list[BlockTensors]]:
        found, counted = dict[str, list[BlockTensors]](), self.blocks
        for name, stage in self._staged.named_stages().items():
            if isinstance(stage, Blocks):
                found[name] = [self._inside(f"stages.{name}.{number}.") for number in range(len(stage))]
            elif name in counted:
                found.setdefault("", []).append(self._inside(f"stages.{name}."))
        return found

    def names(self) -> dict[str, frozenset[str]]:
        return {place: frozenset(self._inside(prefix).values()) for place, prefix in place_names(self._staged).items()}

    @property
    def stages(self) -> list[str]:
        return list(self._staged.named_stages())

    def between(self, start: int, stop: int) -> nn.Module:
        return nn.Sequential(OrderedDict(self._parts[start:stop]))

    @property
    def classifier(self) -> nn.Module:
        return self._with_classes(nn.Sequential(self._staged.pool, self._staged.head))

    def is_norm(self, number: int) -> bool:
        return is_norm(self._parts[number][1])

    def names_between(self, start: int, stop: int) -> frozenset[str]:
        inside = (self._inside(f"stages.{name}.") for name in self.stages[start:stop])
        return frozenset(name for tensors in inside for name in tensors.values())

    def without(self, start: int, stop: int) -> Stages:
        left = self._staged.with_stages(dict([*self._parts[:start], *self._parts[stop:]]))
        return _OfStages(self._with_classes(left))

    def to_outputs(self, start: int, stop: int, after: int, link: nn.Module | None = None) -> nn.Module:
        links = [] if link is None else [("skip link", link)]
        parts = dict([*self._parts[start:stop], *links, *self._parts[after:]])
        return self._with_classes(self._staged.with_stages(parts))

    def to_exit(self, start: int, stop: int, exit: nn.Module) -> nn.Module:
        return self._with_classes(StagedNet(dict(self._parts[start:stop]), exits={self.stages[stop - 1]: exit}))

    def behind(self, stop: int) -> Weights:
        before = self.names_between(0, stop)
        return {name: weight for name, weight in parameters_of(self._staged).items() if name not in before}

    @property
    def _parts(self) -> list[tuple[str, nn.Module]]:
        return list(self._staged.named_stages().items())

    def shapes(self, input_shape: InputShape) -> dict[str, Size]:
        return place_shapes(self._staged, input_shape)

    def leading(self, depth: int, exits: Mapping[str, nn.Module]) -> nn.Module:
        return self._with_classes(of_depth(with_exits(self._staged, exits), depth, 0, ()))  # the last exit is there

    def small_exit(self, features: Size, outputs: int, *, track: bool = True) -> Exit:
        return linear_exit(self._staged, features, outputs, track=track)

    def has_maps(self, features: Size) -> bool:
        return len(features) == 3

    def _inside(self, prefix: str) -> BlockTensors:
        return {name.removeprefix(prefix): name for name in self._staged.state_dict() if name.startswith(prefix)}


class _OfPlan(Stages):
    """By the plan of an architecture, see `potluck.core.nets.splitting`."""

    def __init__(self, net: nn.Module, kept: Sequence[int] | None = None) -> None:
        self.net = net
        self._plan = plan_of(net)
        self._kept = range(len(self._plan.stages)) if kept is None else kept
        if problem := self._plan.stages_problem:
            raise CannotSplit(f"{type(net).__name__} {problem}")

    @property
    def blocks(self) -> list[str]:
        return [stage.name for stage in self._blocks]

    @property
    def rows(self) -> dict[str, list[BlockTensors]]:
        found = dict[str, list[BlockTensors]]()
        for stage in self._blocks:
            row = stage.module.rpartition(".")[0] if stage.module in self._plan.blocks else ""
            found.setdefault(row, []).append(self._inside(stage))
        return found

    def names(self) -> dict[str, frozenset[str]]:
        return {stage.name: stage.names for stage in self._plan.stages}

    @property
    def stages(self) -> list[str]:
        return [self._plan.stages[number].name for number in self._kept]

    def between(self, start: int, stop: int) -> nn.Module:
        return self._between(start, stop, {})

    @property
    def classifier(self) -> nn.Module:
        return self._with_classes(CutNet(self.net, start=self._plan.stages[-1].end))

    def is_norm(self, number: int) -> bool:
        return False  # a stage has a layer

    def names_between(self, start: int, stop: int) -> frozenset[str]:
        return frozenset[str]().union(*(self._plan.stages[number].names for number in self._kept[start:stop]))

    def without(self, start: int, stop: int) -> Stages:
        return _OfPlan(self.net, [*self._kept[:start], *self._kept[stop:]])

    def to_outputs(self, start: int, stop: int, after: int, link: nn.Module | None = None) -> nn.Module:
        links = {} if link is None else {"link": link}
        parts = {"stages": self.between(start, stop), **links, "behind": self.between(after, len(self._kept))}
        return nn.Sequential(OrderedDict(parts, classifier=self.classifier)).train(self.net.training)

    def to_exit(self, start: int, stop: int, exit: nn.Module) -> nn.Module:
        return self._with_classes(self._between(start, stop, {self.stages[stop - 1]: exit}))

    def behind(self, stop: int) -> Weights:
        parts = nn.Sequential(OrderedDict(behind=self.between(stop, len(self._kept)), classifier=self.classifier))
        return parameters_of(parts)

    def _between(self, start: int, stop: int, exits: Mapping[str, nn.Module]) -> nn.Module:
        """A net for each run of stages that follow one another in the network, in a row; the last has the exits."""
        runs, ends = list[nn.Module](), [None, *(stage.end for stage in self._plan.stages)]
        numbers = self._kept[start:stop]
        first = [n for place, n in enumerate(numbers) if place == 0 or numbers[place - 1] != n - 1]
        last = [n for place, n in enumerate(numbers) if place == len(numbers) - 1 or numbers[place + 1] != n + 1]
        for low, high in zip(first, last, strict=True):
            runs.append(CutNet(self.net, ends[low], ends[high + 1], exits if high == numbers[-1] else None))
        return runs[0] if len(runs) == 1 else nn.Sequential(*runs)

    def shapes(self, input_shape: InputShape) -> dict[str, Size]:
        return {stage.name: Size(stage.end.shape) for stage in self._plan.stages}

    def leading(self, depth: int, exits: Mapping[str, nn.Module]) -> nn.Module:
        ending = None if depth == len(self._blocks) else self._blocks[depth - 1].end
        return self._with_classes(CutNet(self.net, stop=ending, exits=exits))

    def small_exit(self, features: Size, outputs: int, *, track: bool = True) -> Exit:
        if len(features) > 1 and (channels := self._channels(features)) > 0:
            return Exit(nn.Sequential(nn.LayerNorm(features[channels]), TokenMean()), nn.Linear(features[-1], outputs))
        norm = {2: nn.BatchNorm1d, 3: nn.BatchNorm2d, 4: nn.BatchNorm3d}.get(len(features), nn.BatchNorm1d)
        norms = [norm(features[0], track_running_stats=track)] if batch_norms(self.net) else []
        return Exit(nn.Sequential(*norms, GlobalPool()), nn.Linear(features[0], outputs))

    def has_maps(self, features: Size) -> bool:
        return len(features) == 3 and self._channels(features) == 0

    @property
    def _blocks(self) -> tuple[Stage, ...]:
        first, *others = self._plan.stages
        return (first, *others) if first.module in self._plan.blocks else tuple(others)

    def _channels(self, features: Size) -> int:
        """Which axis has the channels where features have this shape."""
        ends = [stage.end for stage in self._plan.stages if stage.end.shape == tuple(features)]
        return self._plan.channels[ends[0]]

    def _inside(self, stage: Stage) -> BlockTensors:
        """By their names in the module that has all of them; or else by the number of the layer that reads them."""
        read = dict.fromkeys(name for _, name in self._plan.uses if name in stage.names)
        layers = list(dict.fromkeys(name.rpartition(".")[0] for name in read))
        if (module := stage.module or self._around(layers, stage.names)) is not None:
            return {name.removeprefix(f"{module}."): name for name in sorted(stage.names)}
        parted = (name.rpartition(".") for name in read)
        return {f"{layers.index(layer)}.{own}": f"{layer}.{own}".lstrip(".") for layer, _, own in parted}

    def _around(self, layers: Sequence[str], names: Set[str]) -> str | None:
        """The module that has these layers, if they are several, and no other tensors than these."""

        def inside(path: str) -> Set[str]:
            return {name for _, name in self._plan.uses if name.startswith(f"{path}.")}

        path = layers[0] if len(layers) > 1 else ""
        while path and not names <= inside(path):
            path = path.rpartition(".")[0]
        return path if path and inside(path) == names else None


def stages_of(net: nn.Module | Stages) -> Stages:
    """The stages of a network; or those that are given.

    Raises:
        ConfigError: it has none that can be told apart.
    """
    if isinstance(net, Stages):
        return net
    return _OfStages(net) if isinstance(net, StagedNet) else _OfPlan(net)


def behind_extractor(net: nn.Module) -> nn.Module:
    """The layers behind a net's extractor as a net, under the names that they have in it.

    Raises:
        TypeError: `net` is a staged network without a stage behind its extractor.
        ConfigError: it cannot be cut there.
    """
    if not isinstance(net, StagedNet):
        return CutNet(net, start=plan_of(net).extractor)
    behind = dict([*staged(net).named_stages().items()][net.extractor_stages :])
    return net.with_stages(behind, extractor_stages=0)


def with_extractor_of(net: nn.Module, behind: nn.Module) -> nn.Module:
    """A net's extractor, and behind it the layers of another one's `behind_extractor`."""
    if isinstance(net, StagedNet) and isinstance(behind, StagedNet):
        extractor = dict([*net.named_stages().items()][: net.extractor_stages])
        return behind.with_stages({**extractor, **behind.named_stages()}, net.extractor_stages)
    staged_net = isinstance(net, StagedNet)
    extractor = net.stages[: net.extractor_stages] if staged_net else CutNet(net, stop=plan_of(net).extractor)
    return nn.Sequential(OrderedDict(extractor=extractor, behind=behind)).train(net.training)


def exit_outputs(net: nn.Module, x: Inputs) -> dict[str, Tensor]:
    """Of a net with exits and inputs (batch, ...), the outputs of all exits by place, in order, and its own last.

    Raises:
        TypeError: it is no net that has exits.
    """
    if not isinstance(net, (StagedNet, CutNet)):
        raise TypeError(f"{type(net).__name__} has no exits; expected what `Stages.leading` makes")
    return {place: spread_outputs(net, outputs) for place, outputs in net.exit_outputs(cast(Tensor, x)).items()}


def heads_of(net: nn.Module) -> list[nn.Module]:
    """The modules that put out what a net or one of its exits does; its own may have other layers beside those."""
    if isinstance(net, StagedNet):
        return [net.head, *(found.head for found in net.exits.children() if isinstance(found, Exit))]
    assert isinstance(net, CutNet)
    exits = [found.head for found in net.modules() if isinstance(found, Exit)]
    return [*net.own_head, *exits]


def has_early_exits(net: nn.Module) -> bool:
    """Whether a net has other exits than the one it ends in."""
    exits = net._modules.get("exits")
    ending = net.ending if isinstance(net, StagedNet) else net.__dict__["_ending"]
    return exits is not None and len(cast(nn.ModuleDict, exits)) > bool(ending)
