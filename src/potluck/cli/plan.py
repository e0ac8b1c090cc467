"""`potluck plan`: the pieces into which FeDepth would cut a model for a memory budget, and what each piece takes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from potluck.core.ground.errors import ConfigError
from potluck.experiment.budgets.quantities import BYTE_UNITS, quantity
from potluck.methods.fedepth import linked
from potluck.models import get_model
from potluck.models.contract import StagedNet
from potluck.parts.memory import BATCH_SIZE, SCENARIOS, SLACK, MemoryModel, Piece, saved_bytes, size_text

COPIES = {"none": 1, "sgd": 2, "momentum": 3, "adam": 4}
"""Copies of each parameter in memory: itself; its gradient; the state of SGD with momentum and of Adam."""


@dataclass(frozen=True)
class MemoryBudget:
    """A budget as the user gave it, and in bytes."""

    text: str
    bytes: float


def print_plan(
    model: str,
    budgets: list[str],
    *,
    num_classes: int = 10,
    input_shape: tuple[int, ...] = (3, 32, 32),
    batch_size: int = BATCH_SIZE,
    optimizer: str = "none",
) -> None:
    """A table of the pieces for each budget, with the paper's estimate and the memory that autograd really saves.

    The caption lists what neither counts.

    Args:
        model: the name of a model.
        budgets: "32MiB" and the like; "1/6" for a share of what the whole net takes, by FeDepth's tolerance; or the
            name of one of the paper's scenarios, which has four shares.
        num_classes: the number of rows of the head.
        input_shape: the shape of one example.
        batch_size: the number of examples in a step.
        optimizer: a name in `COPIES`; "none" counts parameters once, as the paper's table does.

    Raises:
        ConfigError: a budget cannot be read, or holds no piece; there is no such optimiser.
    """
    if optimizer not in COPIES:
        raise ConfigError(f"--optimizer {optimizer}: expected one of {', '.join(COPIES)}")
    net = get_model(model)(num_classes, input_shape)
    memory = MemoryModel.of(net, input_shape, batch_size, COPIES[optimizer])
    title = f"{model} on inputs {'x'.join(map(str, input_shape))}, batches of {batch_size}"
    table = Table(title=f"{title}{_optimizer_text(optimizer)}", caption=_caption(net))
    for column in ("budget", "piece", "stages"):
        table.add_column(column)
    for column in ("estimated", "measured"):
        table.add_column(column, justify="right")
    whole = Piece(0, len(net.stages) - memory.after, memory.whole)
    table.add_row("", "whole net", _names(memory, whole), *_sizes(net, whole, memory, input_shape, batch_size))
    for budget in _budgets(budgets, memory):
        table.add_section()
        for number, piece in enumerate(_pieces(memory, budget, model), start=1):
            label = f"{budget.text} = {size_text(budget.bytes)}" if number == 1 else ""
            if number == 1 and piece.start > 0:
                table.add_row(label, "-", f"{_names(memory, Piece(0, piece.start, 0))}: not trained", "", "")
                label = ""
            sizes = _sizes(net, piece, memory, input_shape, batch_size)
            table.add_row(label, str(number), _names(memory, piece), *sizes)
    Console().print(table)


def parsed_shape(text: str) -> tuple[int, ...]:
    """The shape in text such as "3x32x32".

    Raises:
        ConfigError: the text is not a list of sizes.
    """
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text):
        raise ConfigError(f"shape {text!r}; expected sizes joined by x, such as 3x32x32 or 784")
    return tuple(map(int, text.split("x")))


def bytes_of(text: str) -> int:
    """The bytes in text such as "32MiB" or "1.5GB".

    Raises:
        ConfigError: the text is not a positive number with a known unit.
    """
    count = int(quantity(text, BYTE_UNITS) or 0)
    if count < 1:
        raise ConfigError(
            f"budget {text!r}; expected a number and a unit, such as 32MiB or 1.5GB (units: {', '.join(BYTE_UNITS)}),"
            f" a share such as 1/6, or a scenario: {', '.join(SCENARIOS)}"
        )
    return count


def _budgets(texts: Sequence[str], memory: MemoryModel) -> list[MemoryBudget]:
    """The budgets in order, scenarios spelt out as shares."""
    shares = {name: [str(Fraction(share).limit_denominator(100)) for share in SCENARIOS[name]] for name in SCENARIOS}
    found: list[MemoryBudget] = []
    for text in texts:
        for item in shares.get(text, [text]):
            share = text in shares or re.fullmatch(r"[1-9]\d*/[1-9]\d*", item)
            found.append(MemoryBudget(item, float(Fraction(item)) * SLACK * memory.whole if share else bytes_of(item)))
    return found


def _pieces(memory: MemoryModel, budget: MemoryBudget, model: str) -> list[Piece]:
    try:
        return memory.pieces(budget.bytes)
    except ValueError as error:
        raise ConfigError(f"{model} with {budget.text}: {error}") from error


def _sizes(
    net: StagedNet, piece: Piece, memory: MemoryModel, input_shape: tuple[int, ...], batch_size: int
) -> tuple[str, str]:
    """Estimated and measured bytes of a piece, as text."""
    shape = input_shape if piece.start == 0 else memory.parts[piece.start - 1].output
    sub_problem = linked(net, piece, memory)
    copies = memory.parts[0].copies
    measured = saved_bytes(sub_problem, torch.zeros(batch_size, *shape)) + copies * _held(sub_problem)
    return size_text(piece.cost), size_text(measured)


def _optimizer_text(optimizer: str) -> str:
    return "" if optimizer == "none" else f", with gradients and what {optimizer} keeps"


def _caption(net: nn.Module) -> str:
    """What the columns show, and what they leave out."""
    return (
        "both with the parameters; estimated: FeDepth's, in which a piece counts its blocks, the whole net also stem,"
        " last norms and head; measured: what is saved for the backward pass; left out: the data, the whole"
        f" network's weights ({size_text(_held(net))} a copy: as received, in the network, as sent), what torch's"
        " kernels use while they run, and what the allocator holds back"
    )


def _held(net: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in net.parameters())


def _names(memory: MemoryModel, piece: Piece) -> str:
    """The stages of a piece: one name, or the first and the last."""
    names = [part.name for part in memory.parts[piece.start : piece.stop]]
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
