"""What a client could train: one of the federation's models, at a capacity that the method knows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from potluck.core.federation import Federation
from potluck.core.ground.rng import Key
from potluck.experiment.settings.schema import Experiment, ModelSpec


@dataclass(frozen=True)
class Candidate:
    """A model, and how much of it is trained.

    Attributes:
        model: one of the federation's.
        capacity: the share of it, as the method counts it.
        parameters: of the whole model.
    """

    model: ModelSpec
    capacity: float
    parameters: int

    def __str__(self) -> str:
        return f"{self.model}" if self.capacity == 1 else f"{self.model} at {self.capacity:.4g}"

    def __hash__(self) -> int:
        return hash((str(self.model), self.capacity))


def candidates_of(experiment: Experiment, federation: Federation) -> list[Candidate]:
    """The candidates, the largest first: by capacity, then by parameters."""
    models = {str(spec): spec for spec in experiment.models}.values()
    sizes = {str(spec): _parameters(federation, spec) for spec in models}
    found = [
        Candidate(spec, capacity, sizes[str(spec)]) for spec in models for capacity in capacities_known(experiment)
    ]
    return sorted(found, key=lambda one: (one.capacity, one.parameters), reverse=True)


def capacities_known(experiment: Experiment) -> tuple[float, ...]:
    """The capacities that make a difference: the method's levels, or else those of the federation, ascending."""
    given = experiment.federation.capacities or (1.0,)
    if set(given) == {1.0} == set(experiment.method.default_capacities):
        return (1.0,)  # the method has levels for other ends, or none
    return tuple(sorted(set(getattr(experiment.method, "levels", None) or given)))


def with_candidates(experiment: Experiment, federation: Federation, chosen: Sequence[Candidate]) -> Experiment:
    """The experiment with these candidates in turn, and its own common or global model."""
    server = next(spec for spec in experiment.named_models if spec.architecture == federation.server_architecture)
    models, stated = tuple(one.model for one in chosen), experiment.server_model
    # The smallest of the clients' models is the server's, and it may be among these too.
    common = stated or (None if _smallest(chosen) == server.architecture else server)
    config = replace(
        experiment.federation,
        models=tuple(spec.entry() for spec in models),
        capacities=tuple(one.capacity for one in chosen),
        dealing="turn",
        server_model=None if common is None else common.entry(),
    )
    return replace(experiment, federation=config, models=models, server_model=common)


def _smallest(chosen: Sequence[Candidate]) -> str:
    """The architecture that a federation of these would have at its server."""
    return min(chosen, key=lambda one: one.parameters).model.architecture


def _parameters(federation: Federation, spec: ModelSpec) -> int:
    net = federation.build(spec.architecture, Key((spec.architecture,)))
    return sum(parameter.numel() for parameter in net.parameters())
