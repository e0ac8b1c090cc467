"""The plan of an architecture: where its nets are cut into extractor, intermediate layers and classifier.

It is made once, by looking at one net, and holds for every net of the architecture, whatever its weights.
"""

import copy
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import cached_property
from io import StringIO
from itertools import chain, combinations, count, pairwise, takewhile
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from potluck.core.ground.errors import explained
from potluck.core.ground.inputs import Form, Inputs, count_of, each, first_of, rows_of, shape_of
from potluck.core.ground.rng import Key, isolated
from potluck.core.nets.batchnorm import BATCH_NORMS, norms_of
from potluck.core.nets.classes import own_outputs
from potluck.core.nets.modes import mode
from potluck.core.nets.soundness import UNREPEATED, advice_on_size, repeats
from potluck.core.nets.splitting.look import SIZES, CannotSplit, Place, Watched, cutting_places, watch_pass
from potluck.core.nets.splitting.picking import is_picked, numbered
from potluck.core.nets.splitting.prove import always_reached, prove
from potluck.core.nets.splitting.run import Course, plain_attention

EXAMPLES = max(SIZES) + 4
"""How many inputs a plan is made with."""

_CHANNELS_LAST = {nn.Linear, nn.LayerNorm, nn.Embedding, nn.RMSNorm}
_CHANNELS_FIRST = (*BATCH_NORMS, nn.GroupNorm, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Stage:
    """What lies between two places where a net can be cut, or between its inputs and the first of them.

    Attributes:
        name: after the module that it is; or else after the one that has all its weights, or the first of them.
        end: where it ends.
        module: name of the one module that it is; None if it is none, such as a layer and the functions behind it.
        names: of the weights and buffers that it reads.
    """

    name: str
    end: Place
    module: str | None
    names: frozenset[str]

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False)
class SplitPlan:
    """Where the nets of one architecture are cut.

    Attributes:
        course: how they go through their modules.
        places: all places where they can be cut, in order, each proven.
        stages: in order; the first is the extractor, and the last ends where pooling and head begin, or the head.
        extractor: where the extractor ends.
        features: what the head reads.
        head: name of the head, if it is one module whose output is the net's in both modes; else None, and what comes
            behind the features is the head, such as a function of parameters.
        picks: whether the head is applied at every position, and the outputs of one are picked: then features are what
            it reads there, see `potluck.core.nets.splitting.picking`.
        goes_on: whether a net can be run from its places, so that it takes features which were computed elsewhere.
        channels: by place, which axis of one example's tensor has the channels.
        flat: whether features are one row of numbers for each example, since outputs are.
        uses: each time that a weight or buffer is read: how many operations come before it, and its name.
        blocks: names of the modules that are a block of the net: of a class that it has several of, and never cut
            inside by a stage that nobody has named.
        left_out: why other places were left out.
    """

    course: Course
    places: tuple[Place, ...]
    stages: tuple[Stage, ...]
    extractor: Place
    features: Place
    head: str | None
    channels: Mapping[Place, int]
    flat: bool
    uses: tuple[tuple[int, str], ...]
    picks: bool = False
    goes_on: bool = True
    blocks: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> "SplitPlan":
        return self  # it is the architecture's, and nothing of a net's

    def names(self, start: Place | None, stop: Place | None) -> frozenset[str]:
        """The names of the weights that are read between two places; the inputs and the outputs, if None."""
        return _names(self.uses, start, stop)

    def passed(self, net: nn.Module, x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """What the extractor gives of inputs (batch, ...), what the head reads, and the outputs; in one pass."""
        if not self.picks:
            extracted, features, outputs = self.course.at(net, x, self.extractor, self.features)
            return extracted, self.as_rows(features), outputs
        with numbered(net, self.features.path) as picked:
            extracted, found = self.course.at(net, x, self.extractor)
        return extracted, *picked(found)

    def features_of(self, net: nn.Module, x: Inputs, start: Place | None = None) -> Tensor:
        """What the head reads, of inputs (batch, ...) or of what the net has at a place."""
        if not self.picks:
            return self.as_rows(self.course.run(net, x, start, self.features))
        with numbered(net, self.features.path) as picked:
            found = self.course.run(net, x, start)
        return picked(found)[0]

    def as_rows(self, features: Tensor) -> Tensor:
        """Features as methods have them: (batch, width), unless outputs are more than a row for each example."""
        return features.flatten(1) if self.flat else features

    def head_problem(self) -> str | None:
        """Why the head does not stand alone, as one that reads rows of numbers; None if it does."""
        if len(self.feature_shape) != 1:
            return f"{self.head or f'what comes behind {self.features}'} reads features of shape {self.features.shape}"
        if self.head is None and self.features.by_value:
            return f"its forward looks at numbers before {self.features}"
        if tied := sorted(self.names(self.features, None) & self.names(None, self.features)):
            return f"its {tied[0]} is used before it, too"
        return None

    @cached_property
    def stages_problem(self) -> str | None:
        """Why stages cannot be trained apart, or be left out; None if they can."""
        if problem := self.middle_problem:
            return problem
        first, *others = self.stages
        if not others:
            return f"has one stage, {first}: no layer with weights lies between that and the head"
        for one, other in combinations(self.stages, 2):
            if tied := sorted(one.names & other.names):
                return f"reads {tied[0]} in two of its stages, {one} and {other}"
        return None

    @property
    def middle_problem(self) -> str | None:
        """Why what lies behind the extractor cannot go on from features alone; None if it can."""
        if self.goes_on:
            return None
        if self.left_out:
            return f"cannot go on from {self.left_out[0]}"
        return f"reads its inputs again behind {self.extractor}, such as a mask, or which token counts"

    @property
    def reads_every_token(self) -> bool:
        """Whether features are a row for each token of a text of which the outputs are one row."""
        forms = self.course.inputs.values() if isinstance(self.course.inputs, Mapping) else [self.course.inputs]
        tokens = len(self.feature_shape) == 2 and self.channels[self.features] == 1
        return self.flat and tokens and not any(form.dtype.is_floating_point for form in forms)

    @property
    def feature_shape(self) -> tuple[int, ...]:
        """Of what the head reads of one example."""
        return self.features.shape[-1:] if self.picks else self.features.shape

    def channel_axis(self, axes: int) -> int:
        """Which axis of one example's features, of so many, has the channels."""
        return 0 if axes == 1 else self.channels[self.extractor]

    @property
    def levels(self) -> tuple[Place, ...]:
        """Where each stage ends, up to what the head reads."""
        return (*(stage.end for stage in self.stages[:-1]), self.features)

    @property
    def width(self) -> int:
        """How many numbers of one example the head reads."""
        return math.prod(self.feature_shape)


def make_plan(net: nn.Module, inputs: Inputs, cut: Sequence[str] = ()) -> SplitPlan:
    """Look at a net and find where its architecture can be cut. The net stays as it is.

    The head reads what the last layer with weights reads, if all flows through that, and else what is at the last place
    before weights; where a function reads a matrix behind that layer, what is at the last place before it. The
    extractor ends at the first place with a layer on both sides, or at the end of the small module that this is in,
    such as a stem or an embedding; if only the head has a layer behind it, at the first place.

    Args:
        net: any network from one tensor, or named ones, to one.
        inputs: (batch, ...), `EXAMPLES` of them: some to look at, and others to prove with.
        cut: instead, the name of the module that the extractor ends with, and that of the head; or of places, such as
            "<conv2" for what that reads and ">conv2" for what it puts out. Names between the two are of the ends of
            further stages.

    Raises:
        CannotSplit: there are no such places; the text says why.
    """
    try:
        with isolated(Key(("splitting",))), plain_attention():
            looked_at = copy.deepcopy(net).cpu()  # whose generator the proofs set
            with own_outputs(looked_at), redirect_stdout(StringIO()):  # what it prints is of made-up inputs
                return _plan(looked_at, inputs, cut)
    except CannotSplit:
        raise
    except Exception as error:  # of the user's own forward
        with redirect_stdout(StringIO()):
            size = advice_on_size(net, rows_of(inputs, slice(max(SIZES))))
        raise CannotSplit(f"its forward cannot be followed: {explained(error)}{size}") from error


def _plan(net: nn.Module, inputs: Inputs, cut: Sequence[str]) -> SplitPlan:
    with mode(net, training=False):
        if not repeats(net, rows_of(inputs, slice(max(SIZES)))):
            raise CannotSplit(f"it {UNREPEATED}")
        small, large = (watch_pass(net, each(rows_of(inputs, slice(size)), Tensor.clone)) for size in SIZES)
    if (len(small.outputs), len(large.outputs)) != SIZES:
        raise CannotSplit("its outputs do not have one row for each example")
    for call, other in zip(small.calls, large.calls, strict=False):
        call.compare(other)
    candidates = _preferred(cutting_places(small, large), cut, reads := _reads_last(net, small))
    course, others = Course(small.calls, _forms(inputs)), rows_of(inputs, slice(max(SIZES), None))
    proven, left_out = prove(net, course, candidates, others)
    found = _Places(net, small, course, proven, left_out)
    if cut:
        return found.as_chosen(cut, inputs)
    try:
        return found.by_rule(reads, inputs)
    except CannotSplit:
        beside = _preferred(cutting_places(small, large, beside=True), cut, reads)
        ends = tuple(places[0] for places in always_reached(net, course, beside, others))
        plan = replace(found, places=ends).read_only(reads, inputs, others)
        if plan is None or not (plan.head or plan.features in proven):
            raise
        return plan


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
            held = (*layer._parameters.items(), *layer._buffers.items())
            own = {f"{path}.{name}".lstrip(".") for name, tensor in held if tensor is not None}
            found += [(count, name) for name in own - read for count in {c for c, other in found if other in own}]
        return tuple(sorted(found))

    def by_rule(self, reads: tuple[str, int] | None, inputs: Inputs) -> SplitPlan:
        """See `make_plan`."""
        weighted = [place for place in self.places if _names(self.uses, place, None)]
        read = [place for place in weighted if place.side == "in" and (place.path, place.call) == reads]
        if not weighted:
            raise CannotSplit(self._why_none("no layer with weights reads all that its outputs are computed from"))
        by_function = [
            place for place in weighted if read and place.count > read[-1].count and self._reads_matrix(place)
        ]
        features = (by_function or read or weighted)[-1]
        inner = [place for place in self._between_layers() if place.count < features.count]
        before = [place for place in self.places if place.count < features.count]
        if not before:
            raise CannotSplit(self._why_none("it has one layer with weights before its head, and nothing between them"))
        return self._plan(self._whole_module(inner) if inner else before[0], features, inputs)

    def read_only(self, reads: tuple[str, int] | None, inputs: Inputs, others: Inputs) -> SplitPlan | None:
        """The same among places from which a net cannot be run; None if `others` show that there is none."""
        try:
            plan = replace(self.by_rule(reads, inputs), goes_on=False)
            for training in (False, True):
                with torch.no_grad(), mode(self.net, training=training):
                    ends = self.course.at(self.net, others, plan.extractor, plan.features)[:-1]
                if [end.shape[1:] for end in ends] != [plan.extractor.shape, plan.features.shape]:
                    return None
                if any(len(end) != count_of(others) for end in ends):
                    return None
        except CannotSplit:
            return None
        return plan

    def as_chosen(self, cut: Sequence[str], inputs: Inputs) -> SplitPlan:
        """With the extractor and the head that the user names, and the ends of stages between them."""
        if len(cut) < 2:
            raise CannotSplit(
                f"cut: found {len(cut)} names; expected at least two: what the extractor ends with, and the head"
            )
        found = [*(self._named(name, "out") for name in cut[:-1]), self._named(cut[-1], "in")]
        for (name, place), (later, following) in pairwise(zip(cut, found, strict=True)):
            if place.count >= following.count:
                raise CannotSplit(f"cut: {name} does not come before {later}")
        ends = (*found[:-1], self._last_end(found[-2], found[-1])) if len(cut) > 2 else ()
        return self._plan(found[0], found[-1], inputs, ends, chosen=True)

    def _named(self, name: str, side: Literal["out", "in"]) -> Place:
        known = [place for place in self.places if _is_named(place, name, side)]
        if not known:
            what = "puts out" if side == "out" else "reads"
            names = ", ".join(map(str, self.places))
            raise CannotSplit(f"cut: not everything flows through what {name!r} {what}; expected one of: {names}")
        return known[-1]

    def _plan(
        self, extractor: Place, features: Place, inputs: Inputs, ends: Sequence[Place] = (), *, chosen: bool = False
    ) -> SplitPlan:
        head = features.path if self._is_last(features) and _is_head(self.net, features, inputs) else None
        picks = head is None and self._may_pick(features) and is_picked(self.net, features.path, inputs)
        return SplitPlan(
            course=self.course,
            places=self.places,
            stages=self._stages(ends or self._ends(extractor, features, chosen=chosen)),
            extractor=extractor,
            features=features,
            head=features.path if picks else head,
            picks=picks,
            channels={place: self._channels(place) for place in self.places},
            flat=self.seen.outputs.dim() == 2,
            uses=self.uses,
            blocks=tuple(self.blocks),
            left_out=self.left_out,
        )

    def _may_pick(self, features: Place) -> bool:
        """Whether one module reads tokens, and the outputs of an example are one row."""
        return features.side == "in" and len(features.shape) == 2 and self.seen.outputs.dim() == 2

    def _is_last(self, features: Place) -> bool:
        """Whether no weight is read behind the module at a place, such as a factor that begins as 1."""
        outs = [one.count for one in self.seen.seen if one.side == "out" and one.call.path == features.path]
        return all(count < max(outs, default=0) for count, _ in self.seen.flow.uses)

    @cached_property
    def blocks(self) -> dict[str, set[int]]:
        """By name, the modules of a class with layers inside that the net has several of, and what they put out.

        Those that have others such inside are no blocks, and neither are lists of modules.
        """
        of_class = Counter(type(module) for module in self.net.modules())
        nodes, found = {place.node for place in self.places}, dict[str, set[int]]()
        for one in self.seen.seen:
            module = self.net.get_submodule(one.call.path)
            several = of_class[type(module)] > 1 and not isinstance(module, nn.Sequential) and any(module.children())
            if several and one.side == "out" and one.node in nodes and self._has_matrix(module):
                found.setdefault(one.call.path, set()).add(one.node)
        return {name: put_out for name, put_out in found.items() if not any(o.startswith(f"{name}.") for o in found)}

    def _read_in(self, path: str) -> frozenset[str]:
        return frozenset(name for _, name in self.uses if name.startswith(f"{path}."))

    def _has_matrix(self, module: nn.Module) -> bool:
        return any(weight.dim() > 1 for weight in module.parameters())

    def _channels(self, place: Place) -> int:
        """By the layers that put out or read the tensor; else by its axes: the last of two, the first of more."""
        layers = {type(self.net.get_submodule(one.call.path)) for one in self.seen.seen if one.node == place.node}
        if layers & _CHANNELS_LAST:
            return len(place.shape) - 1
        return 1 if len(place.shape) == 2 and not any(issubclass(layer, _CHANNELS_FIRST) for layer in layers) else 0

    @cached_property
    def _matrices(self) -> set[str]:
        return {name for name, weight in self.net.named_parameters(remove_duplicate=False) if weight.dim() > 1}

    def _reads_matrix(self, place: Place) -> bool:
        """Whether a matrix is read behind a place, and not just numbers that are a factor or are added."""
        sizes = dict(self.net.named_parameters(remove_duplicate=False))
        found = _names(self.uses, place, None) & self._matrices
        return any(sum(side > 1 for side in sizes[name].shape) > 1 for name in found)

    def _between_layers(self) -> tuple[Place, ...]:
        """The places that have a matrix of weights behind them, and one between them and the one before."""
        found, low = list[Place](), None
        for place, following in zip(self.places, [*self.places[1:], None], strict=True):
            if all(_names(self.uses, *ends) & self._matrices for ends in ((low, place), (place, following))):
                found.append(place)
                low = place
        return tuple(found)

    def _stages(self, ends: Sequence[Place]) -> tuple[Stage, ...]:
        """What lies before each of these places, and behind the one before."""
        bounds = list(zip([None, *ends[:-1]], ends, strict=True))
        read = [_names(self.uses, before, end) for before, end in bounds]
        modules = [self._module_of(end, names) for end, names in zip(ends, read, strict=True)]
        called = [module or self._first_between(*ends) for module, ends in zip(modules, bounds, strict=True)]
        return tuple(map(Stage, _told_apart(called), ends, modules, read))

    def _module_of(self, end: Place, names: frozenset[str]) -> str | None:
        """The block, or the outermost module, that puts out what is at a place and has these weights and no others."""
        outs = dict.fromkeys(one.call.path for one in self.seen.seen if one.side == "out" and one.node == end.node)
        same = [path for path in outs if names == self._read_in(path)]
        return min(same, key=lambda path: (path not in self.blocks, path.count(".")), default=None)

    def _first_between(self, before: Place | None, end: Place) -> str:
        """The module that all weights are in that are read between two places, or the first of them."""
        start = before.count if before else 0
        layers = [name.rpartition(".")[0].split(".") for count, name in self.uses if start <= count < end.count]
        shared = [parts[0] for parts in takewhile(lambda p: len(set(p)) == 1, zip(*layers, strict=False))]
        return ".".join(shared or layers[0]) if layers else ""

    def _ends(self, extractor: Place, features: Place, *, chosen: bool) -> tuple[Place, ...]:
        """From the extractor on, one place between any two layers with a matrix of weights, but none inside a block.

        That is the end of a block, if there is one, and else the last; the last stage's end is found likewise.

        Args:
            extractor: where it ends; the first stage has also what follows it before a layer, unless it is chosen.
            features: what the head reads.
            chosen: whether the user has named where the extractor ends.
        """
        found, before = [extractor], extractor
        between = [place for place in self.places if extractor.count < place.count < features.count]
        for place in [place for place in between if not self._is_inside_a_block(place)]:
            if self._has_layer(before, place):
                found.append(place)
            elif not (self._ends_a_block(found[-1]) or (chosen and len(found) == 1)):
                found[-1] = place
            before = place
        if len(found) > 1 and not self._has_layer(found[-1], features):
            found.pop()
        last = self._last_end(found[-1], features)
        return (*found, last) if self._has_layer(found[-1], last) else tuple(found)

    def _has_layer(self, start: Place, stop: Place) -> bool:
        """Whether a layer's matrix is read between two places, and not just a table that is added, as positions are."""
        return any(self._is_of_a_layer(name) for name in _names(self.uses, start, stop) & self._matrices)

    def _is_of_a_layer(self, name: str) -> bool:
        owner = self.net.get_submodule(path := name.rpartition(".")[0])
        is_layer = isinstance(owner, nn.MultiheadAttention) or not any(owner.children())
        return is_layer or "parametrizations" in path.split(".")

    def _last_end(self, before: Place, features: Place) -> Place:
        """Where the stage ends that begins at a place and is the last: with a block, or with what the head reads."""
        ends = (p for p in self.places if before.count < p.count < features.count and self._ends_a_block(p))
        return next((p for p in ends if not self._has_layer(p, features)), features)

    def _ends_a_block(self, place: Place) -> bool:
        return any(place.node in put_out for put_out in self.blocks.values())

    def _is_inside_a_block(self, place: Place) -> bool:
        inner = any(place.path.startswith(f"{name}.") for name in self.blocks)
        return inner and not self._ends_a_block(place)

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
        if next(self.net.parameters(), None) is None:
            return "it has no weights; expected layers, such as nn.Linear, that learn"
        if not any(self.net.children()) and len(self._matrices) > 1:
            return "it has no modules, between which it could be cut; make its layers modules, such as nn.Linear"
        return "; ".join([reason, *self.left_out[:1]])


def _told_apart(modules: Sequence[str]) -> list[str]:
    """Names of stages by modules: without the module that all are in, without dots, and each another."""
    parents = {module.rpartition(".")[0] for module in modules}
    found = list[str]()
    for module in modules:
        name = (module.rpartition(".")[2] if len(parents) == 1 else module).replace(".", "-") or "net"
        numbered = chain([name], (f"{name}-{number}" for number in count(2)))
        free = (one for one in numbered if one not in found and not hasattr(nn.ModuleDict, one))  # which exits are in
        found.append(next(free))
    return found


def _is_named(place: Place, name: str, side: Literal["out", "in"]) -> bool:
    """Whether a user means a place: by the name of its module, of which this side is meant, or by "<" or ">" and it."""
    if name.startswith(">"):
        return place.side == "out" and str(place) == name[1:]
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
