"""The contract of models, so that methods need not know a family's attribute names.

A staged network is a sequence of named stages, a pooling and a head: `forward(x) = head(pool(stages(x)))`. Behind
any stage, and behind any block of a stage that is made of `Blocks`, it can have an exit: a classifier of its own, named
by its place. FedIN, FeDepth and similar methods cut networks through this contract alone. Bring your own model by
giving its parts to `StagedNet`; a method that only moves weights takes any `nn.Module` as it is.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Size, Tensor, nn

from potluck.core.ground.errors import ConfigError
from potluck.core.ground.inputs import Inputs, InputShape
from potluck.core.needs import Need, Offer, Problem
from potluck.core.nets.batchnorm import batch_norms, norms_of
from potluck.core.nets.entrance import blank_inputs
from potluck.core.nets.modes import mode
from potluck.core.nets.slicing import cut_by
from potluck.core.nets.splitting import plan_of, split_problem
from potluck.core.nets.tracing import Unfollowed, trace
from potluck.core.requests.beside_training import NetPart

_FIT = "feature_fit"


class GlobalPool(nn.Module):
    """Mean over all positions of a feature map: (batch, channels, ...) to (batch, channels)."""

    def forward(self, x: Tensor) -> Tensor:
        """Flat inputs (batch, channels) are returned unchanged."""
        return x if x.dim() == 2 else x.flatten(2).mean(2)


class Blocks(nn.Sequential):
    """A stage made of blocks, behind each of which the net may be cut or have an exit.

    Attributes:
        shortened: whether blocks that the full net has are left out at its end.
    """

    shortened = False


class Exit(nn.Module):
    """A classifier behind a stage or block: `forward(x) = head(body(x))`.

    Attributes:
        body: a stage's output to features (batch, num_features).
        head: features to outputs.
        num_features: how many the head reads.

    Raises:
        ConfigError: the head does not state how many it reads, and they are not given.
    """

    def __init__(self, body: nn.Module, head: nn.Module, num_features: int | None = None) -> None:
        super().__init__()
        self.body = body
        self.head = head
        self.num_features = _width_read_by(head, num_features)

    def after_slicing(self) -> None:
        """Called when the exit's layers have become narrower."""
        self.num_features = _width_now_read(self.head, self.num_features)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs of a stage (batch, ...) to those of a net."""
        return self.head(self.body(x))


class StagedNet(nn.Module):
    """A network cut into named stages and a head.

    Attributes:
        stages: named blocks, applied in order.
        exits: classifiers by the place behind which they stand, see `places`; `forward` runs none but the last one
            of a net that has no head of its own.
        num_features: width of the representation that the head reads.
        extractor_stages: how many leading stages are the extractor when the net is split in three.

    Args:
        stages: as above.
        head: any module from (batch, num_features) to outputs; None if the net ends in the exit behind its last stage.
        pool: stage output to (batch, num_features), without parameters; the mean over positions by default.
        extractor_stages: as above.
        num_features: needed if the head is no `nn.Linear` and has no `in_features` to state it.
        exits: as above.
        feature_fit: a layer from what the pooling gives to (batch, num_features), of a net that has a head; see
            `fit_features`.

    Raises:
        ConfigError: the head does not state how many features it reads, and they are not given; there is no head and no
            exit behind the last stage; or an exit stands at no place of the net.
    """

    stages: nn.Sequential
    exits: nn.ModuleDict

    def __init__(
        self,
        stages: Mapping[str, nn.Module],
        head: nn.Module | None = None,
        pool: nn.Module | None = None,
        extractor_stages: int = 1,
        *,
        num_features: int | None = None,
        exits: Mapping[str, nn.Module] | None = None,
        feature_fit: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.stages = nn.Sequential()
        for name, stage in stages.items():
            self.stages.add_module(name, stage)
        # Past `__setattr__`, since reading them goes through properties; the names of their tensors are the same.
        self._modules["pool"] = GlobalPool() if pool is None else pool
        if feature_fit is not None:
            self._modules[_FIT] = feature_fit
        self.ending: str | None = None
        if head is not None:
            self._modules["head"] = head
            self.num_features = _width_read_by(head, num_features)
        self.exits = nn.ModuleDict(_in_order(places(self), exits or {}))
        if head is None:
            self.ending, last = self._last_exit()
            self.num_features = last.num_features
        self.extractor_stages = extractor_stages

    def after_slicing(self) -> None:
        """Called when the net's layers have become narrower."""
        self.num_features = _width_now_read(self.head, self.num_features)

    @property
    def own_pool(self) -> nn.Module:
        """The pooling that was given, without parameters, also of a net that ends in an exit."""
        return self._modules["pool"]  # type: ignore[return-value]

    @property
    def pool(self) -> nn.Module:
        """Stage output to (batch, num_features); what an exit has before its head, if the net ends in an exit."""
        if self.ending:
            return self.exits[self.ending].body  # type: ignore[return-value]
        return self.own_pool if self.feature_fit is None else nn.Sequential(self.own_pool, self.feature_fit)

    @property
    def feature_fit(self) -> nn.Module | None:
        """The layer that brings features to a width that other networks' have too; None of a net without one."""
        return self._modules.get(_FIT)

    def fit_features(self, feature_fit: nn.Module, head: nn.Linear) -> "StagedNet":
        """Put a layer behind the pooling and this head in place of the net's own; the net is changed and returned.

        Args:
            feature_fit: what the pooling gives, (batch, ...), to (batch, head.in_features).
            head: features to outputs.
        """
        self._modules.pop("head")
        self._modules.update({_FIT: feature_fit, "head": head})
        self.num_features = head.in_features
        return self

    @property
    def head(self) -> nn.Module:
        """The last module, (batch, num_features) to outputs; an exit's head, if the net ends in an exit."""
        return self.exits[self.ending].head if self.ending else self._modules["head"]  # type: ignore[return-value]

    @property
    def head_name(self) -> str:
        """What the names of the head's tensors begin with, without the dot."""
        return f"exits.{self.ending}.head" if self.ending else "head"

    def named_stages(self) -> dict[str, nn.Module]:
        """The stages by name, in order; one that has two names is there twice, unlike among `named_children`."""
        return dict(zip(self.stages._modules, self.stages, strict=True))

    def with_stages(self, stages: Mapping[str, nn.Module], extractor_stages: int = 1) -> "StagedNet":
        """A net of these stages with this net's pooling and head, all of them shared."""
        return StagedNet(
            stages,
            self.head,
            self.pool if self.ending else self.own_pool,
            extractor_stages,
            num_features=self.num_features,
            feature_fit=self.feature_fit,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Inputs (batch, ...) to logits (batch, classes)."""
        return self.head(self.pool(self.stages(x)))

    def exit_outputs(self, x: Tensor) -> dict[str, Tensor]:
        """Of inputs (batch, ...) the outputs of all exits by place, in order; the last are those of `forward`.

        Those are called "head" unless the net ends in an exit.
        """
        return self._passed(x)[2]

    def part_outputs(self, x: Inputs) -> dict[NetPart, Tensor]:
        """Of inputs (batch, ...) what the parts give.

        What the extractor gives; the features (batch, num_features); the outputs of all exits (batch, exits, ...), the
        net's own last; and those alone.
        """
        extracted, found, exits = self._passed(x)
        *_, outputs = exits.values()
        return {
            "extracted": extracted,
            "features": found,
            "exits": torch.stack([*exits.values()], 1),
            "outputs": outputs,
        }

    def _passed(self, x: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """What the extractor gives, the features, and all outputs."""
        extracted, found = x, dict[str, Tensor]()
        for number, (name, stage) in enumerate(self.named_stages().items(), start=1):
            for place, module in _walk(name, stage):
                x = module(x)
                if place in self.exits and place != self.ending:
                    found[place] = self.exits[place](x)
            if number == self.extractor_stages:
                extracted = x
        x = self.pool(x)
        return extracted, x, {**found, self.ending or "head": self.head(x)}

    def _last_exit(self) -> tuple[str, Exit]:
        *_, place = places(self)
        if place not in self.exits:
            raise ConfigError(f"a net without a head: expected an exit behind {place}, found {', '.join(self.exits)}")
        last = self.exits[place]
        if not isinstance(last, Exit):
            raise ConfigError(
                f"exit behind {place}, in which the net ends: expected an Exit, found {type(last).__name__}"
            )
        return place, last

    def split_problem(self) -> str | None:
        """Why the net cannot be split into extractor, intermediate layers and classifier; None if it can."""
        if 0 < self.extractor_stages < len(self.stages):
            return None
        return (
            f"{type(self).__name__} has {len(self.stages)} stages, its extractor {self.extractor_stages};"
            " there must be at least one stage before the cut and one after it"
        )


def _width_read_by(head: nn.Module, stated: int | None) -> int:
    """How many features a head reads: as stated, or as it says itself."""
    own = getattr(head, "in_features", None)
    if stated is None and not isinstance(own, int):
        raise ConfigError(
            f"head: {type(head).__name__} does not say how many features it reads;"
            " give num_features to StagedNet, or the module an `in_features`"
        )
    if stated is not None and isinstance(own, int) and own != stated:
        raise ConfigError(f"num_features {stated}: the head, {type(head).__name__}, reads {own}")
    return stated if stated is not None else own  # type: ignore[return-value]


def _width_now_read(head: nn.Module, before: int) -> int:
    """How many features a head reads whose layers have changed: as many as its first layer that states it."""
    stated = (getattr(module, "in_features", None) for module in head.modules())
    return next((width for width in stated if isinstance(width, int)), before)


def _walk(name: str, stage: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A stage as modules in order, each with the place behind it."""
    if not isinstance(stage, Blocks):
        yield name, stage
        return
    for number, block in enumerate(stage, start=1):
        whole = number == len(stage) and not stage.shortened
        yield name if whole else f"{name}-{number}", block


def places(net: StagedNet) -> list[str]:
    """Where a net can have exits, in order: behind every stage, and between the blocks of those made of `Blocks`.

    Behind a stage the place has the stage's name; behind its second block, if more follow in the full net, it is
    "NAME-2". A place has the same name in nets of one family that are of different depth.
    """
    return [place for name, stage in net.named_stages().items() for place, _ in _walk(name, stage)]


def place_names(net: StagedNet) -> dict[str, str]:
    """By place, in order, what the names begin with of the tensors of the stage or block before it."""
    return {
        place: f"stages.{name}.{number}." if isinstance(stage, Blocks) else f"stages.{name}."
        for name, stage in net.named_stages().items()
        for number, (place, _) in enumerate(_walk(name, stage))
    }


def _in_order(known: list[str], exits: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    if unknown := [place for place in exits if place not in known]:
        raise ConfigError(f"exit behind {unknown[0]!r}: the net has no such place; expected {', '.join(known)}")
    return {place: exits[place] for place in known if place in exits}


def with_exits(net: StagedNet, exits: Mapping[str, nn.Module]) -> StagedNet:
    """A net of the same layers that has these exits beside its own, or in place of those of the same name.

    Raises:
        ConfigError: an exit stands at no place of the net.
    """
    head = None if net.ending else net.head
    return StagedNet(
        net.named_stages(),
        head,
        net.own_pool,
        net.extractor_stages,
        num_features=None if head is None else net.num_features,
        exits={**dict(net.exits.items()), **exits},
        feature_fit=net.feature_fit,
    )


def place_shapes(net: StagedNet, input_shape: InputShape) -> dict[str, Size]:
    """By place, the shape of one example's output there; nets that embed read tokens."""
    found: dict[str, Size] = {}
    with mode(net, training=False), torch.no_grad():
        x = blank_inputs(net, input_shape, 1)
        for name, stage in net.named_stages().items():
            for place, module in _walk(name, stage):
                x = module(x)
                found[place] = x.shape[1:]
    return found


def linear_exit(net: StagedNet, features: Size, outputs: int, *, track: bool = True) -> Exit:
    """A norm, a pooling and a linear layer, without ReLU: m-FeDepth's auxiliary classifier.

    The norm is a BatchNorm, if the net has any, and the pooling the mean over positions. In transformers, whose
    features are (tokens, channels), they are a LayerNorm and the net's own pooling.

    Args:
        net: that the exit is for.
        features: shape of one example's: (channels,), (channels, length), (channels, height, width), or (tokens,
            channels).
        outputs: how many numbers the exit puts out.
        track: whether a BatchNorm keeps running statistics; one that never predicts needs none.
    """
    if channel_axis(net, len(features)) == 1:
        body = nn.Sequential(nn.LayerNorm(features[1]), net.own_pool)
        return Exit(body, nn.Linear(features[1], outputs))
    norm = nn.BatchNorm2d if len(features) == 3 else nn.BatchNorm1d
    norms = [norm(features[0], track_running_stats=track)] if batch_norms(net) else []
    return Exit(nn.Sequential(*norms, GlobalPool()), nn.Linear(features[0], outputs))


def channel_axis(net: StagedNet, axes: int) -> int:
    """Which axis of one example's features has the channels: the first, or in transformers the second of two.

    A net is taken for a transformer, whose features are (tokens, channels), if they have two axes and it has a pooling
    of its own.
    """
    return 1 if axes == 2 and not isinstance(net.own_pool, GlobalPool) else 0


def blocks(net: StagedNet) -> list[str]:
    """The places behind a net's blocks, which its depth counts: all but its stem, the first stage, and last norms.

    A first stage made of `Blocks` is no stem.
    """
    stages = list(net.named_stages().items())
    while len(stages) > 1 and is_norm(stages[-1][1]):
        stages.pop()
    stem = 0 if isinstance(stages[0][1], Blocks) else 1
    return [place for name, stage in stages[stem:] for place, _ in _walk(name, stage)]


def of_depth(
    net: StagedNet,
    depth: int | None,
    outputs: int,
    input_shape: InputShape,
    build: Callable[[StagedNet, Size, int], Exit] = linear_exit,
) -> StagedNet:
    """The leading blocks of a net, with an exit behind the last of them; the net itself if that is all of them.

    Its tensors have the names and values that they have in the net. The exit is named by its place, so that it is one
    and the same layer for all nets that have an exit there. Exits that the net has are kept, also for the last place.

    Args:
        net: the full net.
        depth: how many blocks are left, see `blocks`; None for all.
        outputs: how many numbers the net puts out.
        input_shape: of one example.
        build: makes the exit of the net, the shape of its features, and `outputs`.

    Raises:
        ConfigError: the net has fewer blocks.
    """
    found = blocks(net)
    if depth is None or depth == len(found):
        return net
    if depth > len(found):
        raise ConfigError(f"depth {depth}; expected at most {len(found)}, the number of the full net's blocks")
    ending, stages = found[depth - 1], dict[str, nn.Module]()
    for name, stage in net.named_stages().items():
        behind = [place for place, _ in _walk(name, stage)]
        kept = behind.index(ending) + 1 if ending in behind else len(behind)
        stages[name] = _shortened(stage, kept) if isinstance(stage, Blocks) and kept < len(behind) else stage
        if ending in behind:
            break
    before = places(net)[: places(net).index(ending) + 1]
    exits = {place: known for place, known in net.exits.items() if place in before}
    if ending not in exits:
        exits[ending] = build(net, place_shapes(net, input_shape)[ending], outputs)
    shallow = StagedNet(stages, pool=net.own_pool, extractor_stages=net.extractor_stages, exits=exits)
    return shallow if net.training else shallow.eval()  # else its layers would seem to be held in that mode


def _shortened(stage: Blocks, count: int) -> Blocks:
    left = Blocks(*list(stage)[:count])
    left.shortened, left.training = True, stage.training
    return left


def is_norm(stage: nn.Module) -> bool:
    """Whether all parameters of a stage, if it has any, belong to norms."""
    norms = {id(p) for norm in norms_of(stage) for p in norm.parameters()}
    return all(id(parameter) in norms for parameter in stage.parameters())


def features(net: StagedNet, x: Tensor, upto: int) -> Tensor:
    """The output of the first `upto` stages on inputs (batch, ...)."""
    return net.stages[:upto](x)


def resume(net: StagedNet, h: Tensor, start: int) -> Tensor:
    """Logits (batch, classes) from the output `h` of the first `start` stages."""
    return net.head(net.pool(net.stages[start:](h)))


def staged(net: nn.Module) -> StagedNet:
    """The net as a staged one that can be split.

    Raises:
        TypeError: `net` is not a StagedNet, or has no stage between extractor and classifier.
    """
    if not isinstance(net, StagedNet):
        raise TypeError(f"{type(net).__name__} has no stages; {STAGES.advice}")
    if (problem := net.split_problem()) is not None:
        raise TypeError(f"{problem}; {STAGES.advice}")
    return net


def classifier_names(net: nn.Module) -> frozenset[str]:
    """Names of the parameters whose first dimension counts classes: those of the head's last layer.

    That is the layer which was registered last, as in an `nn.Sequential`. Parameters with another first dimension than
    its matrix, such as a cosine head's temperature, are left out.
    """
    whole = staged(net)
    layers = [list(layer.parameters(recurse=False)) for layer in whole.head.modules()]
    *_, last = [list[nn.Parameter](), *filter(None, layers)]
    rows = next((len(parameter) for parameter in last if parameter.dim() > 1), None)
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    return frozenset(names[id(p)] for p in last if p.dim() and len(p) == rows)


def classifier_of(net: nn.Module, input_shape: InputShape) -> frozenset[str]:
    """`classifier_names` of a staged net that can be split; of any other, parameters whose rows are its outputs.

    Raises:
        ConfigError: the net cannot be followed to its outputs.
    """
    if isinstance(net, StagedNet) and net.split_problem() is None:
        return classifier_names(net)
    cut = cut_by(net)
    try:
        return (trace(net, input_shape) if cut is None else cut.trace).classifier
    except Unfollowed as found:
        raise ConfigError(
            f"the classifier of {type(net).__name__} is not known: {found}; give its parts to"
            " potluck.models.contract.StagedNet"
        ) from found


def _no_stages(offer: Offer) -> Problem | None:
    for name, net in offer.nets.items():
        apart = f"{name}: it trains stages of a network apart, and"
        if not isinstance(net, StagedNet):
            if split_problem(net) is None and (problem := plan_of(net).stages_problem):  # else it is another need
                return f"{apart} {type(net).__name__} {problem}"
        elif net.feature_fit is not None:
            return f"{apart} federation.feature_width adds a layer behind them", "leave out federation.feature_width"
    return None


STAGES = Need(
    "networks in stages",
    _no_stages,
    "give its parts to potluck.models.contract.StagedNet; to see the stages of a network: potluck inspect FILE.py:NAME",
    covers=(Need.DEPTH_PREFIXES,),
)
