"""A network as stages in a row, behind which it can end or have exits: a staged one, or any other by its dataflow.

Methods that train parts of a network's depth ask `stages_of` alone, so that they need not know which of the two they
have.
"""

import copy
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import cast

from torch import Size, Tensor, nn

from potluck.core.ground.inputs import Inputs, InputShape
from potluck.core.nets.batchnorm import batch_norms
from potluck.core.nets.slicing import cut_of
from potluck.core.nets.splitting import CannotSplit, Place, Stage, plan_of, pruned
from potluck.models.contract import (
    Blocks,
    Exit,
    GlobalPool,
    StagedNet,
    blocks,
    linear_exit,
    of_depth,
    place_names,
    place_shapes,
    staged,
    with_exits,
)

BlockTensors = Mapping[str, str]
"""The names of a block's weights and buffers in the network, by names that blocks of one kind have in common."""


class Stages(ABC):
    """A network's depth."""

    @property
    @abstractmethod
    def blocks(self) -> list[str]:
        """The places behind the blocks, which depth counts: of all stages, or blocks of stages, but the stem."""

    @property
    @abstractmethod
    def rows(self) -> dict[str, list[BlockTensors]]:
        """The blocks in rows: those of one stage or one list of modules, and all others together."""

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
        self._net = net

    @property
    def blocks(self) -> list[str]:
        return blocks(self._net)

    @property
    def rows(self) -> dict[str, list[BlockTensors]]:
        found, counted = dict[str, list[BlockTensors]](), self.blocks
        for name, stage in self._net.named_stages().items():
            if isinstance(stage, Blocks):
                found[name] = [self._inside(f"stages.{name}.{number}.") for number in range(len(stage))]
            elif name in counted:
                found.setdefault("", []).append(self._inside(f"stages.{name}."))
        return found

    def names(self) -> dict[str, frozenset[str]]:
        return {place: frozenset(self._inside(prefix).values()) for place, prefix in place_names(self._net).items()}

    def shapes(self, input_shape: InputShape) -> dict[str, Size]:
        return place_shapes(self._net, input_shape)

    def leading(self, depth: int, exits: Mapping[str, nn.Module]) -> nn.Module:
        return of_depth(with_exits(self._net, exits), depth, 0, ())  # the last exit is there

    def small_exit(self, features: Size, outputs: int, *, track: bool = True) -> Exit:
        return linear_exit(self._net, features, outputs, track=track)

    def has_maps(self, features: Size) -> bool:
        return len(features) == 3

    def _inside(self, prefix: str) -> BlockTensors:
        return {name.removeprefix(prefix): name for name in self._net.state_dict() if name.startswith(prefix)}


class _OfPlan(Stages):
    """By the plan of an architecture, see `potluck.core.nets.splitting`."""

    def __init__(self, net: nn.Module) -> None:
        self._net = net
        self._plan = plan_of(net)
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

    def shapes(self, input_shape: InputShape) -> dict[str, Size]:
        return {stage.name: Size(stage.end.shape) for stage in self._plan.stages}

    def leading(self, depth: int, exits: Mapping[str, nn.Module]) -> nn.Module:
        ending = None if depth == len(self._blocks) else self._blocks[depth - 1].end
        return CutNet(self._net, stop=ending, exits=exits)

    def small_exit(self, features: Size, outputs: int, *, track: bool = True) -> Exit:
        if len(features) > 1 and (channels := self._channels(features)) > 0:
            return Exit(nn.Sequential(nn.LayerNorm(features[channels]), TokenMean()), nn.Linear(features[-1], outputs))
        norm = {2: nn.BatchNorm1d, 3: nn.BatchNorm2d, 4: nn.BatchNorm3d}.get(len(features), nn.BatchNorm1d)
        norms = [norm(features[0], track_running_stats=track)] if batch_norms(self._net) else []
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
        """By their names in the module that the stage is; or else by the number of the layer that reads them."""
        if stage.module is not None:
            return {name.removeprefix(f"{stage.module}."): name for name in sorted(stage.names)}
        read = dict.fromkeys(name for _, name in self._plan.uses if name in stage.names)
        layers = list(dict.fromkeys(name.rpartition(".")[0] for name in read))
        return {f"{layers.index(layer)}.{own}": f"{layer}.{own}".lstrip(".") for layer, _, own in map(_parted, read)}


def _parted(name: str) -> tuple[str, str, str]:
    return name.rpartition(".")


def stages_of(net: nn.Module) -> Stages:
    """The stages of a network.

    Raises:
        ConfigError: it has none that can be told apart.
    """
    return _OfStages(net) if isinstance(net, StagedNet) else _OfPlan(net)


class TokenMean(nn.Module):
    """Mean over all positions where channels come last: (batch, ..., channels) to (batch, channels)."""

    def forward(self, x: Tensor) -> Tensor:
        """Of tokens, or of a map that has its channels behind height and width."""
        return x.flatten(1, -2).mean(1)


class CutNet(nn.Module):
    """A network from one of its places to another, by its own `forward`, with those of its tensors that are read there.

    They are the network's own, and have their names in it. What else belongs to it has no public name here, since the
    modules of a network may have any. Behind places it can have exits, as `exits`, and it can end in one.

    Args:
        net: whose plan is known.
        start: where inputs come in; where the network has them, if None.
        stop: where it ends; with its outputs, if None.
        exits: by names of stages; if there is one at `stop`, it makes the outputs.

    Raises:
        ConfigError: a module of the network has the name that exits have, or it cannot run from `start` without what
            lies before it.
    """

    def __init__(
        self,
        net: nn.Module,
        start: Place | None = None,
        stop: Place | None = None,
        exits: Mapping[str, nn.Module] | None = None,
    ) -> None:
        super().__init__()
        plan = plan_of(net)
        if start is not None and start.by_value:
            raise CannotSplit(f"{type(net).__name__} looks at numbers before {start}, so that it cannot begin there")
        if exits and "exits" in dict(net.named_children()):
            raise CannotSplit(f"{type(net).__name__} has a module called exits, as what is put behind stages is called")
        self._plan = plan
        self._start, self._stop = start, stop
        names = plan.names(start, stop) if start or stop else net.state_dict().keys()
        own = pruned(net, names)
        self.__dict__["_own"] = own  # as no module of this one, whose tensors would have longer names
        self._modules.update(own._modules)
        for held in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[held] = own.__dict__[held]
        self._places = {stage.name: stage.end for stage in plan.stages if stage.name in (exits or {})}
        self._ending = next((name for name, place in self._places.items() if place == stop), None)
        if exits:
            self._modules["exits"] = nn.ModuleDict({name: exits[name] for name in self._places})
        if not net.training:
            self.eval()  # else its layers would seem to be held in that mode

    def forward(self, x: Inputs) -> Tensor:
        """What the network has at `start`, (batch, ...), to its outputs or those of the exit that it ends in."""
        self._own.training = self.training
        found = self._plan.course.run(self._own, x, self._start, self._stop)
        return found if self._ending is None else self._exit(self._ending, found)

    def exit_outputs(self, x: Inputs) -> dict[str, Tensor]:
        """Of inputs (batch, ...) the outputs of all exits by place, in order; the last are those of `forward`.

        Those are called "head" unless the net ends in an exit.
        """
        self._own.training = self.training
        before = {name: place for name, place in self._places.items() if name != self._ending}
        *found, last = self._plan.course.at(self._own, x, *before.values(), stop=self._stop)
        outputs = {name: self._exit(name, h) for name, h in zip(before, found, strict=True)}
        return {**outputs, self._ending or "head": last if self._ending is None else self._exit(self._ending, last)}

    @property
    def _own(self) -> nn.Module:
        return self.__dict__["_own"]

    def _exit(self, place: str, h: Tensor) -> Tensor:
        exits = cast(nn.ModuleDict, self._modules["exits"])
        return exits[place](h)

    @property
    def own_head(self) -> list[nn.Module]:
        """The layers that put out what the network does; none if it ends before."""
        if self._stop is not None:
            return []
        behind = [name for count, name in self._plan.uses if count >= self._plan.features.count]
        return [self.get_submodule(path) for path in dict.fromkeys(name.rpartition(".")[0] for name in behind)]

    def extra_repr(self) -> str:
        """From where to where it goes."""
        return f"from {self._start or 'inputs'} to {self._stop or 'outputs'}"


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
    return net.exit_outputs(cast(Tensor, x))


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
