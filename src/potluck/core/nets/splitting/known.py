"""The plans of a federation's architectures, each made when it is first asked for, and known to every net of it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from potluck.core.ground.inputs import Form, Inputs, InputShape, sized
from potluck.core.ground.rng import Key
from potluck.core.nets.entrance import embeds
from potluck.core.nets.splitting.look import CannotSplit
from potluck.core.nets.splitting.plan import EXAMPLES, SplitPlan, make_plan

N = TypeVar("N", bound=nn.Module)

_RECORD = "_potluck_plan"
"""The one attribute of a user's net that is ours. It is no module, parameter or buffer, so that no name changes."""


class Splits:
    """How the nets of a federation are split that do not say so themselves.

    Args:
        input_shape: of one example, or of each of the named inputs.
        real_inputs: whether inputs are real numbers, and not whole ones such as tokens; None where nobody knows, and
            nets that embed are taken to read tokens. Named inputs say so themselves.
    """

    def __init__(self, input_shape: InputShape, real_inputs: bool | None) -> None:
        self.input_shape = input_shape
        self._real_inputs = real_inputs
        self._known = dict[tuple[Any, ...], _Architecture]()

    def remember(
        self,
        net: N,
        architecture: tuple[Any, ...],
        cut: Sequence[str] = (),
        builder: Callable[..., nn.Module] | None = None,
    ) -> N:
        """Let a net know its architecture's plan, which is made when it is first needed.

        Args:
            net: of the architecture.
            architecture: all that its nets have in common, such as the name and the scale.
            cut: see `make_plan`.
            builder: what has made it; other federations with this builder and these inputs have the same plan.
        """
        if not hasattr(net, "split_problem"):
            real = not embeds(net) if self._real_inputs is None else self._real_inputs
            kind = (*architecture, _hashable(self.input_shape), real, tuple(cut))
            shared = _known_of(builder) if builder else {}
            record = shared.setdefault(kind, _Architecture(self.input_shape, real, cut))
            setattr(net, _RECORD, self._known.setdefault(architecture, record))
        return net


_plans: WeakKeyDictionary[Callable[..., nn.Module], dict[tuple[Any, ...], "_Architecture"]] = WeakKeyDictionary()


def _known_of(builder: Callable[..., nn.Module]) -> dict[tuple[Any, ...], "_Architecture"]:
    """The records of a builder's nets, as long as the builder lives."""
    try:
        return _plans.setdefault(builder, {})
    except TypeError:  # an object that has no hash or cannot be referred to weakly
        return {}


def _hashable(input_shape: InputShape) -> tuple[Any, ...]:
    return tuple(sorted(input_shape.items())) if isinstance(input_shape, Mapping) else tuple(input_shape)


class _Architecture:
    """The plan of one architecture, or why there is none."""

    def __init__(self, input_shape: InputShape, real_inputs: bool, cut: Sequence[str]) -> None:
        self._input_shape = input_shape
        self._real_inputs = real_inputs
        self._cut = tuple(cut)
        self._found: SplitPlan | str | None = None  # or why there is none

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Architecture":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _Architecture, (self._input_shape, self._real_inputs, self._cut)  # another process looks for itself

    @property
    def is_known(self) -> bool:
        """Whether there is a plan, or it is known why there is none."""
        return self._found is not None

    def plan(self, net: nn.Module) -> SplitPlan:
        """The plan, by looking at this net if there is none yet.

        Raises:
            CannotSplit: there is none.
            NotPlanned: nobody has asked before, and the net's weights are now several clients'.
        """
        if self._found is None:
            if getattr(torch._C, "_functorch").peek_interpreter_stack() is not None:  # noqa: B009, has no stub
                raise NotPlanned(f"{type(net).__name__} has no plan yet, which cannot be made in torch.func.vmap")
            try:
                self._found = make_plan(net, self._examples(net), self._cut)
            except CannotSplit as problem:
                self._found = str(problem)  # an error would hold all that was computed
        if isinstance(self._found, str):
            raise CannotSplit(self._found)
        return self._found

    def _examples(self, net: nn.Module) -> Inputs:
        """Made-up inputs (batch, ...): real numbers, or whole ones that every embedding has a row for."""
        draws = Key(("splitting",)).generator()
        rows = [module.num_embeddings for module in net.modules() if isinstance(module, nn.Embedding)]

        def made_up(form: Form) -> Tensor:
            if form.dtype.is_floating_point and (isinstance(self._input_shape, Mapping) or self._real_inputs):
                return torch.randn(form.shape, generator=draws).to(form.dtype)
            if isinstance(self._input_shape, Mapping):
                return _zeros_and_ones(form, draws)
            return torch.randint(min(rows, default=2), form.shape, generator=draws)

        return sized(self._input_shape, EXAMPLES, made_up)


def _zeros_and_ones(form: Form, draws: torch.Generator) -> Tensor:
    """Whole numbers that are tokens, categories and a mask alike, a row of which is never all zero."""
    made = torch.randint(2, form.shape, generator=draws)
    if made.dim() > 1:
        made[:, 0] = 1
    return made.to(form.dtype)


class NotPlanned(RuntimeError):
    """A plan is first asked for inside a transformation of `torch.func`, where no net can be looked at."""


def unplanned(net: nn.Module) -> list[nn.Module]:
    """The nets among a module's own ones whose plan nobody has asked for yet."""
    known = ((module, getattr(module, _RECORD, None)) for module in net.modules())
    return [module for module, record in known if isinstance(record, _Architecture) and not record.is_known]


def plan_of(net: nn.Module) -> SplitPlan:
    """The plan of a net that a federation has built.

    Raises:
        CannotSplit: it cannot be split, or no federation has built it.
    """
    known = getattr(net, _RECORD, None)
    if not isinstance(known, _Architecture):
        raise CannotSplit("it is not a network that a federation has built")
    return known.plan(net)


def is_planned(net: nn.Module) -> bool:
    """Whether a net is split by its dataflow, and can be."""
    return not hasattr(net, "split_problem") and split_problem(net) is None


def split_problem(net: nn.Module) -> str | None:
    """Why a network cannot be split into extractor, intermediate layers and classifier; None if it can.

    The network's own method of this name decides, see `potluck.models.contract.StagedNet`; else its dataflow.
    """
    if (answer := getattr(net, "split_problem", None)) is not None:
        return answer()
    try:
        plan_of(net)
    except CannotSplit as problem:
        return f"{type(net).__name__} cannot be split into extractor, intermediate layers and classifier: {problem}"
    return None
