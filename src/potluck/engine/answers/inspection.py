"""Checks of clients' data and of a method's state for numbers that would silently spoil a run."""

import math
import warnings
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from potluck.core.federation import Federation
from potluck.core.ground.errors import PotluckWarning
from potluck.core.schema import extremes
from potluck.engine.client.sound import check_finite, data_of


def check_inputs(federation: Federation) -> None:
    """Check before training that all inputs are finite; a tensor that clients share is checked once.

    Raises:
        DataError: some are not; names the client and the first such input.
    """
    clean: dict[int, bool] = {}
    for id, site in sorted(federation.looked_at.items()):
        for part, examples in data_of(site):
            check_finite(examples, f"client {id}: its {part} examples", clean)
    for part, examples in (("public examples", federation.public), ("common test set", federation.test)):
        if examples is not None:
            check_finite(examples, f"the {part}", clean)


def check_targets(federation: Federation, *, whole: bool = True) -> None:
    """Check that all targets suit the federation's task; a tensor that clients share is checked once.

    Warns of classes that no example can have, since outputs for them are never trained.

    Args:
        federation: the federation.
        whole: whether all its clients are here; the others may have the classes that these lack.

    Raises:
        DataError: some do not; says whose, what was found and what was expected.
    """
    task, width = federation.task, federation.num_classes
    checked: dict[int, Tensor] = {}
    for client, site in sorted(federation.looked_at.items()):
        for part, examples in data_of(site):
            if id(examples.targets) not in checked:
                task.check_targets(examples.targets, width, f"client {client}: the targets of its {part} part")
                checked[id(examples.targets)] = examples.targets
    if federation.test is not None:
        task.check_targets(federation.test.targets, width, "the common test set: its targets")
        checked[id(federation.test.targets)] = federation.test.targets
    if whole and len(federation.looked_at) == len(federation.sites) and task.has_classes:
        largest = max((int(targets.max()) for targets in checked.values() if targets.numel()), default=width - 1)
        if largest < width - 1:
            warnings.warn(
                f"num_classes is {width}, and no example has a class above {largest}: outputs for others are never"
                " trained; check num_classes",
                PotluckWarning,
                stacklevel=3,
            )


def not_finite(state: Any, before: Any, *, lacking: bool = False) -> str | None:
    """Where a state holds NaN or infinity that the previous one did not, and which; None if nowhere.

    Args:
        state: of a method's server.
        before: the previous one.
        lacking: whether minus infinity may stand for what nobody says of a class, since not all clients have all.
    """
    known = {id(leaf) for _, leaf in _leaves(before, "") if isinstance(leaf, Tensor)}
    found = {
        where: what for where, leaf in _leaves(state, "") if id(leaf) not in known and (what := _broken(leaf, lacking))
    }
    if not found:
        return None
    had = {where for where, leaf in _leaves(before, "") if where in found and _broken(leaf, lacking)}
    return next((f"{where} holds {what}" for where, what in found.items() if where not in had), None)


def _leaves(node: Any, where: str) -> Iterator[tuple[str, Any]]:
    """The tensors and numbers of a state, with the path to each."""
    if is_dataclass(node):
        node = {spec.name: getattr(node, spec.name) for spec in fields(node)}
    if isinstance(node, dict):
        for name, child in node.items():
            yield from _leaves(child, f"{where}.{name}" if where else str(name))
    elif isinstance(node, (list, tuple)):
        for index, child in enumerate(node):
            yield from _leaves(child, f"{where}[{index}]")
    else:
        yield where, node


def _broken(leaf: Any, lacking: bool = False) -> str | None:
    """What a leaf holds that is not finite, "NaN" or "infinity"; None if nothing."""
    if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel():
        if lacking:
            leaf = leaf.masked_fill(leaf == -math.inf, 0.0)
        return next((str(end) for end in extremes(leaf) if not math.isfinite(end)), None)
    return str(leaf) if isinstance(leaf, float) and not math.isfinite(leaf) else None
