"""The plan of an architecture: where its nets are cut into extractor, intermediate layers and classifier.

It is made once, by looking at one net, and holds for every net of the architecture, whatever its weights.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from potluck.core.ground.errors import explained
from potluck.core.ground.inputs import Form, Inputs, each, first_of, rows_of, shape_of
from potluck.core.ground.rng import Key, isolated
from potluck.core.nets.batchnorm import BATCH_NORMS, norms_of
from potluck.core.nets.classes import own_outputs
from potluck.core.nets.modes import mode
from potluck.core.nets.splitting.look import SIZES, CannotSplit, Place, Watched, cutting_places, watch_pass
from potluck.core.nets.splitting.prove import prove
from potluck.core.nets.splitting.run import Course, plain_attention

EXAMPLES = max(SIZES) + 4
"""How many inputs a plan is made with."""

_CHANNELS_LAST = {nn.Linear, nn.LayerNorm, nn.Embedding, nn.RMSNorm}
_CHANNELS_FIRST = (*BATCH_NORMS, nn.GroupNorm, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True, eq=False)
class SplitPlan:
    """Where the nets of one architecture are cut.

    Attributes:
        course: how they go through their modules.
        places: all places where they can be cut, in order, each proven.
        stages: those of the places that have a layer with weights on both sides.
        extractor: where the extractor ends.
        features: what the head reads.
        head: name of the head, if it is one module whose output is the net's in both modes; else None.
        channels: which axis of one example's tensor has the channels where the extractor ends.
        flat: whether features are one row of numbers for each example, since outputs are.
        uses: each time that a weight or buffer is read: how many operations come before it, and its name.
        left_out: why other places were left out.
    """

    course: Course
    places: tuple[Place, ...]
    stages: tuple[Place, ...]
    extractor: Place
    features: Place
    head: str | None
    channels: int
    flat: bool
    uses: tuple[tuple[int, str], ...]
    left_out: tuple[str, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> "SplitPlan":
        return self  # it is the architecture's, and nothing of a net's

    def names(self, start: Place | None, stop: Place | None) -> frozenset[str]:
        """The names of the weights that are read between two places; the inputs and the outputs, if None."""
        return _names(self.uses, start, stop)

    def passed(self, net: nn.Module, x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """What the extractor gives of inputs (batch, ...), what the head reads, and the outputs; in one pass."""
        extracted, features, outputs = self.course.at(net, x, self.extractor, self.features)
        return extracted, self.as_rows(features), outputs

    def as_rows(self, features: Tensor) -> Tensor:
        """Features as methods have them: (batch, width), unless outputs are more than a row for each example."""
        return features.flatten(1) if self.flat else features

    def head_problem(self) -> str | None:
        """Why the head is no module of its own, which reads rows of numbers; None if it is."""
        if self.head is None:
            return f"what is computed from {self.features} is not the output of one module"
        if len(self.features.shape) != 1:
            return f"{self.head} reads features of shape {self.features.shape}"
        if tied := sorted(self.names(self.features, None) & self.names(None, self.features)):
            return f"its {tied[0]} is used before it, too"
        return None

    def channel_axis(self, axes: int) -> int:
        """Which axis of one example's features, of so many, has the channels."""
        return 0 if axes == 1 else self.channels

    @property
    def levels(self) -> tuple[Place, ...]:
        """Where each stage ends; what the head reads is the last one's end."""
        return (*(place for place in self.stages if place.count < self.features.count), self.features)

    @property
    def width(self) -> int:
        """How many numbers of one example the head reads."""
        return math.prod(self.features.shape)


def make_plan(net: nn.Module, inputs: Inputs, cut: Sequence[str] = ()) -> SplitPlan:
    """Look at a net and find where its architecture can be cut. The net stays as it is.

    The head reads what the last layer with weights reads, if all flows through that, and else what is at the last place
    before weights. The extractor ends at the first place with a layer on both sides, or at the end of the small module
    that this is in, such as a stem or an embedding; if only the head has a layer behind it, at the first place.

    Args:
        net: any network from one tensor, or named ones, to one.
        inputs: (batch, ...), `EXAMPLES` of them: some to look at, and others to prove with.
        cut: instead, the name of the module that the extractor ends with, and that of the head; or of places, such as
            "<conv2" for what that reads.

    Raises:
        CannotSplit: there are no such places; the text says why.
    """
    try:
        with isolated(Key(("splitting",))), plain_attention():
            looked_at = copy.deepcopy(net).cpu()  # whose generator the proofs set
            with own_outputs(looked_at):
                return _plan(looked_at, inputs, cut)
    except CannotSplit:
        raise
    except Exception as error:  # of the user's own forward
        raise CannotSplit(f"its forward cannot be followed: {explained(error)}") from error


def _plan(net: nn.Module, inputs: Inputs, cut: Sequence[str]) -> SplitPlan:
    with mode(net, training=False):
        small, large = (watch_pass(net, each(rows_of(inputs, slice(size)), Tensor.clone)) for size in SIZES)
    if (len(small.outputs), len(large.outputs)) != SIZES:
        raise CannotSplit("its outputs do not have one row for each example")
    for call, other in zip(small.calls, large.calls, strict=False):
        call.compare(other)
    candidates = _preferred(cutting_places(small, large), cut, reads := _reads_last(net, small))
    course = Course(small.calls, _forms(inputs))
    proven, left_out = prove(net, course, candidates, rows_of(inputs, slice(max(SIZES), None)))
    found = _Places(net, small, course, proven, left_out)
    return found.as_chosen(cut, inputs) if cut else found.by_rule(reads, inputs)


def _forms(inputs: Inputs) -> Form | Mapping[str, Form]:
    """Of one example."""
    shape = shape_of(inputs)
    return shape if isinstance(shape, Mapping) else Form(shape, first_of(inputs).dtype)


def _reads_last(net: nn.Module, seen: Watched) -> tuple[str, int] | None:
    """Name and call of the last layer that has weights of its own and is no norm."""
    norms = set(norms_of(net))
    layers = {
        path
        for path, module in net.named_modules()
        if module not in norms and "parametrizations" not in path.split(".") and _has_weights(module)
    }
    return next(((call.path, call.number) for call in reversed(seen.calls) if call.path in layers), None)


def _has_weights(layer: nn.Module) -> bool:
    return is_parametrized(layer) or next(layer.parameters(recurse=False), None) is not None


def _preferred(candidates: list[list[Place]], cut: Sequence[str], reads: tuple[str, int] | None) -> list[list[Place]]:
    """The candidates, those of a tensor with what the user names first, or else what the last layer reads."""

    def rank(place: Place) -> bool:
        if cut:
            return not (_is_named(place, cut[0], "out") or _is_named(place, cut[-1], "in"))
        return not (place.side == "in" and place.leaf == 0 and (place.path, place.call) == reads)

    return [sorted(places, key=rank) for places in candidates]


@dataclass(frozen=True)
class _Places:
    """The proven places of a net, among which those of a plan are chosen."""

    net: nn.Module
    seen: Watched
    course: Course
    places: tuple[Place, ...]
    left_out: tuple[str, ...]

    @cached_property
    def uses(self) -> tuple[tuple[int, str], ...]:
        """See `SplitPlan`; what a layer has and does not read, as a BatchNorm its batch count, goes with the rest."""
        found, read = list(self.seen.flow.uses), {name for _, name in self.seen.flow.uses}
        for path, layer in self.net.named_modules():
            own = {f"{path}.{name}".lstrip(".") for name in (*layer._parameters, *layer._buffers)}
            found += [(count, name) for name in own - read for count in {c for c, other in found if other in own}]
        return tuple(sorted(found))

    def by_rule(self, reads: tuple[str, int] | None, inputs: Inputs) -> SplitPlan:
        """See `make_plan`."""
        weighted = [place for place in self.places if _names(self.uses, place, None)]
        read = [place for place in weighted if place.side == "in" and (place.path, place.call) == reads]
        if not weighted:
            raise CannotSplit(self._why_none("no layer with weights reads all that its outputs are computed from"))
        features = (read or weighted)[-1]
        inner = [place for place in self._stages() if place.count < features.count]
        before = [place for place in self.places if place.count < features.count]
        if not before:
            raise CannotSplit(self._why_none("it has one layer with weights before its head, and nothing between them"))
        return self._plan(self._whole_module(inner) if inner else before[0], features, inputs)

    def as_chosen(self, cut: Sequence[str], inputs: Inputs) -> SplitPlan:
        """With the extractor and the head that the user names."""
        if len(cut) != 2:
            raise CannotSplit(f"cut: found {len(cut)} names; expected two: what the extractor ends with, and the head")
        ends, reads = self._named(cut[0], "out"), self._named(cut[1], "in")
        if ends.count >= reads.count:
            raise CannotSplit(f"cut: {cut[0]} does not come before {cut[1]}")
        return self._plan(ends, reads, inputs)

    def _named(self, name: str, side: Literal["out", "in"]) -> Place:
        known = [place for place in self.places if _is_named(place, name, side)]
        if not known:
            what = "puts out" if side == "out" else "reads"
            names = ", ".join(map(str, self.places))
            raise CannotSplit(f"cut: not everything flows through what {name!r} {what}; expected one of: {names}")
        return known[-1]

    def _plan(self, extractor: Place, features: Place, inputs: Inputs) -> SplitPlan:
        return SplitPlan(
            course=self.course,
            places=self.places,
            stages=self._stages(),
            extractor=extractor,
            features=features,
            head=features.path if _is_head(self.net, features, inputs) else None,
            channels=self._channels(extractor),
            flat=self.seen.outputs.dim() == 2,
            uses=self.uses,
            left_out=self.left_out,
        )

    def _channels(self, place: Place) -> int:
        """By the layers that put out or read the tensor; else by its axes: the last of two, the first of more."""
        layers = {type(self.net.get_submodule(one.call.path)) for one in self.seen.seen if one.node == place.node}
        if layers & _CHANNELS_LAST:
            return len(place.shape) - 1
        return 1 if len(place.shape) == 2 and not any(issubclass(layer, _CHANNELS_FIRST) for layer in layers) else 0

    def _stages(self) -> tuple[Place, ...]:
        """The places that have a matrix of weights behind them, and one between them and the one before."""
        matrices = {name for name, weight in self.net.named_parameters(remove_duplicate=False) if weight.dim() > 1}
        found, low = list[Place](), None
        for place, following in zip(self.places, [*self.places[1:], None], strict=True):
            if all(_names(self.uses, *ends) & matrices for ends in ((low, place), (place, following))):
                found.append(place)
                low = place
        return tuple(found)

    def _whole_module(self, stages: Sequence[Place]) -> Place:
        """The first stage's end, or that of the module that it is in, if this is a small part of the net."""
        first, whole = stages[0], sum(weight.numel() for weight in self.net.parameters())
        for place in stages[1:]:
            if place.side == "out" and first.path.startswith(f"{place.path}."):
                module = self.net.get_submodule(place.path)
                if 2 * sum(weight.numel() for weight in module.parameters()) < whole:
                    return place
        return first

    def _why_none(self, reason: str) -> str:
        return "; ".join([reason, *self.left_out[:1]])


def _is_named(place: Place, name: str, side: Literal["out", "in"]) -> bool:
    """Whether a user means a place: by the name of its module, of which this side is meant, or by "<" and that."""
    return str(place) == name if "<" in name or "#" in name else (place.path, place.side) == (name, side)


def _is_head(net: nn.Module, features: Place, inputs: Inputs) -> bool:
    """Whether what the module that reads the features puts out is what the net does, in both modes."""
    if features.side == "out":
        return False
    given = list[Any]()
    handle = net.get_submodule(features.path).register_forward_hook(lambda module, args, output: given.append(output))
    try:
        for training in (False, True):
            with torch.no_grad(), mode(net, training=training):
                outputs: Tensor = net(inputs)
            last = given[-1]
            if not isinstance(last, Tensor) or last.shape != outputs.shape or not torch.equal(last, outputs):
                return False
        return True
    finally:
        handle.remove()


def _names(uses: Sequence[tuple[int, str]], start: Place | None, stop: Place | None) -> frozenset[str]:
    low, high = (start.count if start else 0), (stop.count if stop else math.inf)
    return frozenset(name for count, name in uses if low <= count < high)
