"""One net: where it is cut, and whether its parts give what the whole gives."""

import copy
import math
import random
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from potluck.core.ground.errors import explained
from potluck.core.nets.splitting import CannotSplit, SplitPlan, Splits, plan_of
from potluck.models.split import Split, split

BATCH = 5  # other than the batches on which a net is looked at


@dataclass(frozen=True)
class Case:
    """A net to try.

    Attributes:
        group: which part of the table it is in.
        name: its own.
        build: makes it.
        shape: of one example.
        tokens: inputs are whole numbers below this; real ones if None.
    """

    group: str
    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    tokens: int | None = None

    def inputs(self) -> Tensor:
        """A batch that is drawn anew, and the same each time."""
        draws = torch.Generator().manual_seed(1)
        shape = (BATCH, *self.shape)
        if self.tokens is None:
            return torch.randn(shape, generator=draws)
        return torch.randint(self.tokens, shape, generator=draws)


@dataclass
class Row:
    """What became of a net.

    Attributes:
        outcome: it was "split" or "refused", or something "failed" that should not.
        reason: for the latter two.
        seconds: to make the plan, or to find that there is none.
        parameters: how many numbers.
        places: where it can be cut.
        stages: those with a layer on both sides.
        ends: where the extractor ends, and the shape of one example there.
        reads: what the head reads, and its shape.
        head: why the head cannot be taken out; empty if it can.
        gaps: the largest differences of the parts from the whole; "unlike" where there is no number.
        draws: whether the parts draw as many random numbers in training as the whole.
    """

    group: str
    name: str
    outcome: Literal["split", "refused", "failed"] = "failed"
    reason: str = ""
    seconds: float = 0.0
    parameters: int = 0
    places: int = 0
    stages: int = 0
    ends: tuple[str, list[int]] = ("", [])
    reads: tuple[str, list[int]] = ("", [])
    head: str = ""
    gaps: dict[str, float | str] = field(default_factory=dict[str, float | str])
    draws: bool = True


def tried(case: Case) -> Row:
    """Split a net, and compare. Nothing that goes wrong is raised."""
    row = Row(case.group, case.name)
    try:
        torch.manual_seed(0)
        net = case.build()
        row.parameters = sum(weight.numel() for weight in net.parameters())
        Splits(case.shape, case.tokens is None).remember(net, (case.name,))
        _describe(row, net)
        _move(net)
        trained, row.draws = _trained(case, copy.deepcopy(net))
        gaps = {"evaluation": _evaluated(case, net), **trained}
        row.gaps = {name: gap if math.isfinite(gap) else "unlike" for name, gap in gaps.items()}
        row.outcome = "split"
    except CannotSplit as problem:
        row.outcome, row.reason = "refused", short(str(problem))
    except Exception as error:  # whatever it is, it is this net's row
        row.reason = short(explained(error))
    return row


def short(reason: str) -> str:
    """A reason without the folders of the file that it names."""
    return re.sub(r"\S*/([\w.-]+\.py), line", r"\1, line", reason)


def _describe(row: Row, net: nn.Module) -> None:
    started = time.perf_counter()
    try:
        plan: SplitPlan = plan_of(net)
    finally:
        row.seconds = round(time.perf_counter() - started, 2)
    row.places, row.stages = len(plan.places), len(plan.stages)
    row.ends = str(plan.extractor), list(plan.extractor.shape)
    row.reads = str(plan.features), list(plan.features.shape)
    row.head = plan.head_problem() or ""


def _move(net: nn.Module) -> None:
    """Change all weights, as training would: a branch that begins at zero counts, and a plan holds for any weights."""
    draws = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in net.parameters():
            spread = float(weight.std()) if weight.numel() > 1 else 0.0
            noise = torch.randn(weight.shape, generator=draws, dtype=weight.dtype)
            weight.add_(noise, alpha=0.3 * spread if spread > 1e-3 else 0.1)


def _evaluated(case: Case, net: nn.Module) -> float:
    """In evaluation mode: the parts, all in one pass, and the outputs from the end of each stage on."""
    net, x = net.eval(), case.inputs()
    cut = split(net)
    with torch.no_grad():
        expected, drawn = _seeded(lambda: net(x))
        found = [_seeded(lambda: _in_parts(cut, x))[0]]
        found.append(_seeded(lambda: cut.passed(x).outputs)[0])
        if not drawn and not cut.middle_problem():
            ends, outputs = cut.levels(x)
            found += [outputs, *(cut.resumed(end, stages) for stages, end in enumerate(ends, 1))]
    return max(_gap([one], [expected]) for one in found)


def _trained(case: Case, net: nn.Module) -> tuple[dict[str, float], bool]:
    """In training mode, of one step without an optimiser: outputs, gradients, buffers; and if draws are as many."""
    whole, parts = net.train(), copy.deepcopy(net).train()
    x, cut = case.inputs(), split(parts)
    (expected, _), draws = _seeded(lambda: whole(x)), torch.rand(1)
    (found, _), others = _seeded(lambda: _in_parts(cut, x)), torch.rand(1)
    for outputs in (expected, found):
        outputs.square().mean().backward()
    gaps = {
        "training": _gap([found], [expected]),
        "gradients": _gap(*([weight.grad for weight in one.parameters()] for one in (parts, whole))),
        "buffers": _gap(parts.buffers(), whole.buffers()),
    }
    return gaps, torch.equal(draws, others)


def _in_parts(cut: Split, x: Tensor) -> Tensor:
    """The outputs by one part after the other; from the features on, if no part goes on from those before."""
    features = cut.features(x) if cut.middle_problem() else cut.intermediate(cut.extractor(x))
    return cut.classifier(features)


def _seeded(act: Callable[[], Tensor]) -> tuple[Tensor, bool]:
    """What comes of it after the seed is set, and whether it drew anything."""
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    before = torch.get_rng_state()
    return act(), not torch.equal(before, torch.get_rng_state())


def _gap(found: Iterable[Tensor | None], expected: Iterable[Tensor | None]) -> float:
    """The largest absolute difference; infinite where one is missing, of another shape or no number alone."""
    return max((_difference(a, b) for a, b in zip(found, expected, strict=True)), default=0.0)


def _difference(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    if a.shape != b.shape:
        return float("inf")
    a, b = a.detach().double(), b.detach().double()
    same = (a == b) | (a.isnan() & b.isnan())
    gaps: Any = torch.where(same, 0.0, (a - b).abs()).nan_to_num(float("inf"))
    return float(gaps.max()) if gaps.numel() else 0.0
