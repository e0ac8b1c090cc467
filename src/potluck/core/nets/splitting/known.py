"""The plans of a federation's architectures, each made when it is first asked for, and known to every net of it."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from potluck.core.ground.rng import Key
from potluck.core.nets.splitting.look import CannotSplit
from potluck.core.nets.splitting.plan import EXAMPLES, SplitPlan, make_plan

N = TypeVar("N", bound=nn.Module)

_RECORD = "_potluck_plan"
"""The one attribute of a user's net that is ours. It is no module, parameter or buffer, so that no name changes."""


class Splits:
    """How the nets of a federation are split that do not say so themselves.

    Args:
        input_shape: of one example.
        real_inputs: whether inputs are real numbers, and not whole ones such as tokens; None where nobody knows, and
            nets that embed are taken to read tokens.
    """

    def __init__(self, input_shape: tuple[int, ...], real_inputs: bool | None) -> None:
        self._input_shape = input_shape
        self._real_inputs = real_inputs
        self._known = dict[tuple[Any, ...], _Architecture]()

    def remember(self, net: N, architecture: tuple[Any, ...], cut: Sequence[str] = ()) -> N:
        """Let a net know its architecture's plan, which is made when it is first needed.

        Args:
            net: of the architecture.
            architecture: all that its nets have in common, such as the name and the scale.
            cut: see `make_plan`.
        """
        if not hasattr(net, "split_problem"):
            known = self._known.setdefault(architecture, _Architecture(self._input_shape, self._real_inputs, cut))
            setattr(net, _RECORD, known)
        return net


class _Architecture:
    """The plan of one architecture, or why there is none."""

    def __init__(self, input_shape: tuple[int, ...], real_inputs: bool | None, cut: Sequence[str]) -> None:
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

    def _examples(self, net: nn.Module) -> Tensor:
        """Made-up inputs (batch, ...): real numbers, or whole ones that every embedding has a row for."""
        shape, draws = (EXAMPLES, *self._input_shape), Key(("splitting",)).generator()
        rows = [module.num_embeddings for module in net.modules() if isinstance(module, nn.Embedding)]
        if self._real_inputs or (self._real_inputs is None and not rows):
            return torch.randn(shape, generator=draws)
        return torch.randint(min(rows, default=2), shape, generator=draws)


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
