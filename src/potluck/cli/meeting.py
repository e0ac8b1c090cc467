"""`potluck inspect federation`: which layers of clients' networks meet those of other clients."""

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from potluck.core.meeting import Meeting, TrainedTensor, meetings
from potluck.core.needs import Need, Offer
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.settings.presets import experiment_for
from potluck.experiment.settings.schema import Experiment
from potluck.parts.sharing import SharesWeights

Owners = tuple[str, ...]
"""Names of the architectures that have a tensor."""


def print_meeting(target: str | None, assignments: Sequence[str]) -> None:
    """Print which layers meet in an experiment's federation.

    Raises:
        ConfigError: the configuration cannot be resolved.
        DataError: the data are missing, or cannot be divided as configured.
    """
    experiment = experiment_for(target, assignments)
    offer = Offer.of(assemble(experiment, checked=True).federation)
    scope = _scope(experiment)
    found = meetings(offer.nets, offer.assigned.values(), across=scope != "architecture")
    console = Console(highlight=False)
    console.print(f"{len(offer.assigned)} clients; {experiment.method_name} {_EXCHANGES[scope]}", soft_wrap=True)
    console.print(_table(found))
    for one in found:
        clients = f"{one.clients} client{'s' * (one.clients > 1)}"
        said = f"{one.weights_met:,} of {one.weights:,} weights meet another client's"
        alone = "" if one.weights_met else ": it shares nothing"
        console.print(escape(f"{one.architecture} ({clients}): {said}{alone}"), soft_wrap=True)


_EXCHANGES = {
    "layer": "averages layers of one name and shape, so these meet",
    "architecture": "averages layers among clients of one architecture, so these meet",
    "none": "exchanges other things; under a method that averages layers by name, such as fedavg, these meet",
}


def _scope(experiment: Experiment) -> str:
    """Across what the experiment's method averages layers by name."""
    method = experiment.method
    if Need.SHARED_LAYERS in method.needs():
        return "layer"
    if Need.SHARED_ARCHITECTURES in method.needs():
        return "architecture"
    if isinstance(method, SharesWeights):
        return "layer" if method.sharing.scope == "model" else method.sharing.scope
    return "none"


def _table(found: Sequence[Meeting]) -> Table:
    """A row for each group of layers, as coarse as all its layers have the same owners."""
    clients = {one.architecture: one.clients for one in found}
    meeting = {(one.architecture, tensor) for one in found for tensor, others in one.partners.items() if others}
    owners: dict[TrainedTensor, Owners] = {}
    for one in found:
        for tensor in one.partners:
            owners[tensor] = (*owners.get(tensor, ()), one.architecture)
    table = Table("layers", "models that have them, and their clients", "")
    table.add_column("weights", justify="right")
    for name, tensors in _groups(owners, ""):
        whose, weights = owners[tensors[0]], sum(shape.numel() for _, shape in tensors)
        meet = any((architecture, tensors[0]) in meeting for architecture in whose)
        word = "[green]meet[/green]" if meet else "[red]alone[/red]"
        named = ", ".join(f"{architecture} ×{clients[architecture]}" for architecture in whose)
        table.add_row(escape(name), escape(named), word, f"{weights:,}")
    return table


def _groups(owners: Mapping[TrainedTensor, Owners], prefix: str) -> Iterable[tuple[str, list[TrainedTensor]]]:
    """The tensors whose names begin with `prefix`, by the shortest name under which all have the same owners."""
    inside = [tensor for tensor in owners if tensor[0].startswith(prefix)]
    if len({owners[tensor] for tensor in inside}) == 1:
        yield prefix.rstrip(".") or "all", inside
        return
    parts = dict.fromkeys(name[len(prefix) :].partition(".")[0] for name, _ in inside)
    for part in parts:
        leaves = [tensor for tensor in inside if tensor[0] == prefix + part]
        for name, shape in leaves:  # one name may have several shapes
            yield f"{name} {tuple(shape)}" if len(leaves) > 1 else name, [(name, shape)]
        if any(name.startswith(f"{prefix}{part}.") for name, _ in inside):
            yield from _groups(owners, f"{prefix}{part}.")
