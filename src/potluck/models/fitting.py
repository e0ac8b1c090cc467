"""Features of one width: a layer between a network's features and a new head, so that unlike networks can be compared.

It changes the model. A network of any make gets a feature fit, from as many features as it has to the federation's
number, and a linear head on these: what reads its features is gone, and so are the head's weights. All other tensors
keep their names and values.

HtFLlib does so by `nn.AdaptiveAvgPool1d` ("pool"), https://github.com/TsingZ0/HtFLlib, `BaseHeadSplit`; there, too, the
head is new.
"""

from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Size, Tensor, nn

from potluck.core.federation import Builder
from potluck.core.ground.errors import ConfigError
from potluck.core.ground.inputs import InputShape
from potluck.core.ground.machine import check_fits
from potluck.core.ground.rng import Key, isolated
from potluck.core.nets.entrance import blank_inputs, with_entrance
from potluck.core.nets.modes import mode
from potluck.core.nets.scale import FULL, Cuts, Scale, built, cut_marked, cutting_at, takes_scale
from potluck.core.nets.slicing import NoSlices
from potluck.core.nets.splitting import CannotSplit, SplitPlan, Splits, plan_of, split_problem
from potluck.models.contract import StagedNet
from potluck.models.split import split

FitKind = Literal["linear", "pool"]

_FIT, _HEAD = "feature_fit", "head"  # the names of the new layers
_BYTES = 8  # of a weight and its gradient
_REAL = (None, True)  # a net that embeds is taken to read tokens, and may read real numbers: it may embed positions


@dataclass(frozen=True)
class FeatureFit:
    """How features are brought to one width.

    Attributes:
        width: how many there are afterwards.
        kind: "linear" learns a matrix and a bias; "pool" has no weights, and takes the mean of neighbouring features,
            or repeats them where there are fewer.
    """

    width: int
    kind: FitKind = "linear"


def fitted(builder: Builder, fit: FeatureFit, num_classes: int, input_shape: InputShape, where: str) -> Builder:
    """A builder of the same networks with this feature fit and a linear head, which is tried once.

    A narrower network's features are brought to as large a share of the width.

    Args:
        builder: is called without arguments, and with `scale` if it takes that.
        fit: the width, and how features are brought to it.
        num_classes: the width of an output.
        input_shape: of one example, or of each of the named inputs.
        where: opens messages, such as "federation.models: mlp2".

    Raises:
        ConfigError: the head cannot be replaced, or the new layers do not fit in this machine's memory.
    """
    fitting = _Fitting(builder, fit, num_classes, input_shape, where)
    make = partial(_at_scale if takes_scale(builder) else _full, fitting)
    with isolated(Key((where,))):
        own, head = fitting.replaced(with_entrance(builder(), input_shape), FULL)
        needed = _BYTES * (own + num_classes + 1) * fit.width
        check_fits(needed, f"{where}: its feature fit and head", "make federation.feature_width smaller", ConfigError)
        if cut := cut_marked(builder):
            cutting_at(make, (*cut[:-1], f"{head}.{_HEAD}"))
        problems = [fitting.problem(make, f"{head}.{_HEAD}", real) for real in _REAL]
    if None not in problems:
        raise fitting.refused(f"its head, {head}, cannot be replaced: {problems[0]}")
    return make


def takes_fit(builder: Builder, input_shape: InputShape) -> bool:
    """Whether features of a builder's networks can be brought to any width."""
    try:
        fitted(builder, FeatureFit(1), 2, input_shape, "models")
    except ConfigError:
        return False
    return True


def _full(fitting: "_Fitting") -> nn.Module:
    """A network with fitted features, of a builder that takes no `scale`."""
    return fitting.applied(fitting.builder(), FULL)


def _at_scale(fitting: "_Fitting", *, scale: Scale = FULL) -> nn.Module:
    """The same of one that takes it."""
    if scale.depth is not None:
        raise NoSlices("a shallower net has a head of its own; leave out federation.feature_width")
    if scale != FULL and fitting.fit.kind == "pool":
        raise NoSlices("federation.feature_fit pool mixes other features in a narrower net; take linear")
    return fitting.applied(fitting.builder() if scale == FULL else fitting.builder(scale=scale), scale)


@dataclass(frozen=True, eq=False)
class _Fitting:
    """What is done to every network of a builder; see `fitted`."""

    builder: Builder
    fit: FeatureFit
    outputs: int
    input_shape: InputShape
    where: str

    def applied(self, net: nn.Module, scale: Scale) -> nn.Module:
        """A network of the builder, at this scale, with the new layers in it."""
        own, path = self.replaced(with_entrance(net, self.input_shape), scale)
        head = net.get_submodule(path)
        feature_fit, new = self._layers(own, head, scale)
        feature_fit.train(net.training)
        new.train(net.training)
        if isinstance(net, StagedNet):
            return net.fit_features(feature_fit, new)
        joined = nn.Sequential(OrderedDict({_FIT: feature_fit, _HEAD: new})).train(net.training)
        for name in [name for name, module in net.named_modules(remove_duplicate=False) if module is head]:
            net.set_submodule(name, joined)
        return net

    def replaced(self, net: nn.Module, scale: Scale) -> tuple[int, str]:
        """How many features a network of the builder has, and the name of its head.

        Raises:
            ConfigError: the head cannot be replaced.
        """
        if isinstance(net, StagedNet):
            if problem := _staged_problem(net, self.input_shape):
                raise self.refused(problem)
            return net.num_features, net.head_name
        plan = self._plan(net, scale)
        if plan.head is None:
            raise self.refused(
                f"its head cannot be replaced: what is computed from {plan.features} is no module's output"
            )
        if problem := plan.head_problem():
            raise self.refused(f"its head cannot be replaced: {problem}")
        return plan.width, plan.head

    def problem(self, make: Builder, head: str, real: bool | None) -> str | None:
        """Why methods would not find the new head and features of its width; None if they do."""
        net = built(make, FULL, self.where, Cuts(self.input_shape), Splits(self.input_shape, real))
        if isinstance(net, StagedNet):
            return None
        if problem := split_problem(net):
            return problem
        parts = split(net)
        if problem := parts.head_problem():
            return problem
        found = (parts.head_name, parts.num_features)
        return None if found == (head, self.fit.width) else f"{found[0]} reads {found[1]} features"

    def refused(self, problem: str) -> ConfigError:
        """The refusal of the architecture."""
        return ConfigError(
            f"{self.where}: its features cannot be brought to federation.feature_width: {problem}; choose another"
            " model, or leave feature_width out"
        )

    def _plan(self, net: nn.Module, scale: Scale) -> SplitPlan:
        """The plan of a network as the builder has made it; it is made once for each scale."""
        found = list[CannotSplit]()
        for real in _REAL:
            Splits(self.input_shape, real).remember(net, (scale,), cut_marked(self.builder), self.builder)
            try:
                return plan_of(net)
            except CannotSplit as problem:
                found.append(problem)
        raise self.refused(f"its head is not known: {found[0]}")

    def _layers(self, own: int, like: nn.Module, scale: Scale) -> tuple[nn.Module, nn.Linear]:
        """The feature fit and the head, on the device and of the type of another module's weights."""
        width, weight = scale.of(self.fit.width), next(like.parameters(), torch.empty(0))
        linear = partial(nn.Linear, device=weight.device, dtype=weight.dtype)
        feature_fit = linear(own, width) if self.fit.kind == "linear" else nn.AdaptiveAvgPool1d(width)
        return feature_fit, linear(width, self.outputs)


def _staged_problem(net: StagedNet, input_shape: InputShape) -> str | None:
    """Why a staged network's features cannot be fitted; None if they can."""
    if len(net.exits):
        return f"it has exits, which have features of their own: {', '.join(net.exits)}"
    if type(net).forward is not StagedNet.forward:
        return f"its class, {type(net).__name__}, has a forward of its own"
    shape = _shape_of_features(net, input_shape)
    if shape is not None and (len(shape) > 2 or shape[-1] != net.num_features):
        return f"features of shape {tuple(shape)}; expected {net.num_features} in a row"
    return None


def _shape_of_features(net: StagedNet, input_shape: InputShape) -> Size | None:
    """Of one example; None of a network that does not run on zeros."""
    try:
        with mode(net, training=False), torch.no_grad():
            found: Tensor = net.pool(net.stages(blank_inputs(net, input_shape, 1)))
    except Exception:  # it reads other inputs, or has an error, which the rehearsal tells
        return None
    return found.shape[1:]
