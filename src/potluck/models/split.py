"""A network as extractor, intermediate layers and classifier: a staged one by its stages, any other by its dataflow.

Methods cut networks through `split` alone, so that they need not know which of the two they have.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, cast

import torch
from torch import Size, Tensor, nn

from potluck.core.ground.errors import ConfigError
from potluck.core.ground.inputs import Inputs, InputShape
from potluck.core.nets.classes import spread_outputs
from potluck.core.nets.entrance import blank_inputs
from potluck.core.nets.modes import mode
from potluck.core.nets.splitting import CannotSplit, plan_of
from potluck.models.contract import StagedNet, channel_axis, staged
from potluck.models.cutnet import CutNet


class Passed(NamedTuple):
    """What the parts of a network give in one pass.

    Attributes:
        s_in: what the extractor gives, (batch, ...).
        s_out: what the classifier reads, (batch, ...).
        outputs: of the network.
    """

    s_in: Tensor
    s_out: Tensor
    outputs: Tensor


class Split(ABC):
    """A network as three functions whose composition is the network (FedIN, eq. 7).

    Attributes:
        num_features: how many numbers of an example the classifier reads.
    """

    num_features: int

    @abstractmethod
    def extractor(self, x: Inputs) -> Tensor:
        """Inputs to s_in."""

    @abstractmethod
    def intermediate(self, s_in: Tensor) -> Tensor:
        """Of s_in what the classifier reads; the pooling is part of it."""

    @abstractmethod
    def classifier(self, s_out: Tensor) -> Tensor:
        """Of s_out the network's outputs."""

    @abstractmethod
    def features(self, x: Inputs) -> Tensor:
        """Of inputs what the classifier reads."""

    @abstractmethod
    def passed(self, x: Inputs) -> Passed:
        """What all three give of inputs, in one pass; quicker than one after the other."""

    @abstractmethod
    def levels(self, x: Inputs) -> tuple[list[Tensor], Tensor]:
        """Of inputs what each stage puts out, in order, and the outputs."""

    @abstractmethod
    def resumed(self, h: Tensor, stages: int) -> Tensor:
        """The outputs, of what so many leading stages put out, at least one."""

    @abstractmethod
    def head_problem(self) -> str | None:
        """Why there is no `head`; None if there is one."""

    @abstractmethod
    def middle_problem(self) -> str | None:
        """Why `intermediate` cannot be given features that were computed elsewhere; None if it can."""

    @property
    @abstractmethod
    def head(self) -> nn.Module:
        """The last module, features (batch, num_features) to outputs; its tensors are the network's.

        They have names of their own where it is a module of the network. Of a network that ends in functions it is what
        comes behind the features, with tensors under the network's names. Of a network with own classes it puts out
        those alone, unlike `classifier`.

        Raises:
            ConfigError: it does not stand alone.
        """

    @property
    @abstractmethod
    def head_name(self) -> str:
        """The name of the module that is the head; empty if what comes behind the features is none.

        Raises:
            ConfigError: as `head`.
        """

    @property
    def head_prefix(self) -> str:
        """What the names of the head's tensors begin with in the network, with the dot.

        Raises:
            ConfigError: as `head`.
        """
        return self.head_name and f"{self.head_name}."

    @property
    @abstractmethod
    def intermediate_names(self) -> frozenset[str]:
        """Names of the parameters that lie between extractor and classifier."""

    @abstractmethod
    def last_names(self, stages: int = 0) -> frozenset[str]:
        """Names of the parameters and buffers of the classifier, and of so many stages before it."""

    @abstractmethod
    def feature_shapes(self, input_shape: InputShape) -> tuple[Size, Size]:
        """Shapes of one example's s_in and s_out."""

    @abstractmethod
    def channel_axis(self, axes: int) -> int:
        """Which axis of one example's features, of so many, has the channels."""


class _OfStages(Split):
    """By the stages of a staged network."""

    def __init__(self, net: StagedNet) -> None:
        self._net = net
        self._extractor, self._behind = net.stages[: net.extractor_stages], net.stages[net.extractor_stages :]
        self.num_features = net.num_features

    def extractor(self, x: Inputs) -> Tensor:
        return self._extractor(x)

    def intermediate(self, s_in: Tensor) -> Tensor:
        return self._net.pool(self._behind(s_in))

    def classifier(self, s_out: Tensor) -> Tensor:
        return spread_outputs(self._net, self._net.head(s_out))

    def features(self, x: Inputs) -> Tensor:
        return self.intermediate(self.extractor(x))

    def passed(self, x: Inputs) -> Passed:
        s_in = self.extractor(x)
        s_out = self.intermediate(s_in)
        return Passed(s_in, s_out, self.classifier(s_out))

    def levels(self, x: Inputs) -> tuple[list[Tensor], Tensor]:
        found, reached = list[Tensor](), cast(Any, x)
        for stage in self._net.stages:
            reached = stage(reached)
            found.append(reached)
        return found, self.resumed(reached, len(found))

    def resumed(self, h: Tensor, stages: int) -> Tensor:
        return self.classifier(self._net.pool(self._net.stages[stages:](h)))

    def head_problem(self) -> str | None:
        return None

    def middle_problem(self) -> str | None:
        return None

    @property
    def head(self) -> nn.Module:
        return self._net.head

    @property
    def head_name(self) -> str:
        return self._net.head_name

    @property
    def intermediate_names(self) -> frozenset[str]:
        return _names_in(self._net, self._behind, self._net.pool, buffers=False)

    def last_names(self, stages: int = 0) -> frozenset[str]:
        last = list(self._net.stages)[len(self._net.stages) - stages :]
        return _names_in(self._net, self._net.head, *last, buffers=True)

    def feature_shapes(self, input_shape: InputShape) -> tuple[Size, Size]:
        with mode(self._net, training=False), torch.no_grad():
            s_in = self.extractor(blank_inputs(self._net, input_shape, 1))
            found, stated = self.intermediate(s_in).shape[1:], self.num_features
        if len(found) == 1 and found[0] != stated:
            raise ConfigError(f"num_features {stated}: the head is given {found[0]} features by the pooling before it")
        return s_in.shape[1:], found

    def channel_axis(self, axes: int) -> int:
        return channel_axis(self._net, axes)


class _OfPlan(Split):
    """By the plan of an architecture, see `potluck.core.nets.splitting`."""

    def __init__(self, net: nn.Module) -> None:
        self._net = net
        self._plan = plan_of(net)
        self.num_features = self._plan.width

    def extractor(self, x: Inputs) -> Tensor:
        return self._plan.course.run(self._net, x, stop=self._plan.extractor)

    def intermediate(self, s_in: Tensor) -> Tensor:
        if problem := self._plan.middle_problem:
            raise CannotSplit(f"{type(self._net).__name__} {problem}")
        return self._plan.features_of(self._net, s_in, self._plan.extractor)

    def classifier(self, s_out: Tensor) -> Tensor:
        whole = s_out.reshape(len(s_out), *self._plan.feature_shape) if self._plan.flat else s_out
        if self._plan.head is not None:
            return spread_outputs(self._net, self._net.get_submodule(self._plan.head)(whole))
        return self._plan.course.run(self._net, whole, self._plan.features)

    def features(self, x: Inputs) -> Tensor:
        return self._plan.features_of(self._net, x)

    def passed(self, x: Inputs) -> Passed:
        return Passed(*self._plan.passed(self._net, x))

    def levels(self, x: Inputs) -> tuple[list[Tensor], Tensor]:
        *found, outputs = self._plan.course.at(self._net, x, *self._plan.levels)
        return found, outputs

    def resumed(self, h: Tensor, stages: int) -> Tensor:
        return self._plan.course.run(self._net, h, self._plan.levels[stages - 1])

    def head_problem(self) -> str | None:
        return self._plan.head_problem()

    def middle_problem(self) -> str | None:
        return self._plan.middle_problem

    @property
    def head(self) -> nn.Module:
        if name := self.head_name:
            return self._net.get_submodule(name)
        return CutNet(self._net, start=self._plan.features)

    @property
    def head_name(self) -> str:
        if problem := self._plan.head_problem():
            raise CannotSplit(f"the head of {type(self._net).__name__} cannot be taken out: {problem}")
        return self._plan.head or ""

    @property
    def intermediate_names(self) -> frozenset[str]:
        names = dict(self._net.named_parameters())
        return frozenset(name for name in self._plan.names(self._plan.extractor, self._plan.features) if name in names)

    def last_names(self, stages: int = 0) -> frozenset[str]:
        return self._plan.names([None, *self._plan.levels][-1 - stages], None)

    def feature_shapes(self, input_shape: InputShape) -> tuple[Size, Size]:
        s_out = (self.num_features,) if self._plan.flat else self._plan.feature_shape
        return Size(self._plan.extractor.shape), Size(s_out)

    def channel_axis(self, axes: int) -> int:
        return self._plan.channel_axis(axes)


def split(net: nn.Module) -> Split:
    """Extractor, intermediate layers and classifier of a network.

    Raises:
        TypeError: `net` is a staged network without a stage between extractor and classifier.
        ConfigError: no place was found where it can be cut.
    """
    if isinstance(net, StagedNet):
        staged(net)
        return _OfStages(net)
    return _OfPlan(net)


def feature_shapes(net: nn.Module, input_shape: InputShape) -> tuple[Size, Size]:
    """Shapes of one example's features before and after the intermediate layers; staged nets that embed read tokens.

    Raises:
        ConfigError: flat features are not as many as a staged net states that its head reads.
    """
    return split(net).feature_shapes(input_shape)


def _names_in(net: nn.Module, *parts: nn.Module, buffers: bool) -> frozenset[str]:
    """The names in a net of the parameters, and of the buffers if asked for, of some of its modules."""
    tensors = {id(x) for part in parts for x in (*part.parameters(), *(part.buffers() if buffers else ()))}
    named = (*net.named_parameters(), *(net.named_buffers() if buffers else ()))
    return frozenset(name for name, tensor in named if id(tensor) in tensors)
