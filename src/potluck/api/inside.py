"""The trained models of a run on examples: what they see at each stage, how sure they are, how far apart they are."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from potluck.analysis.groups import enumerated
from potluck.analysis.inside import (
    ClassLabels,
    Inside,
    Moment,
    StageOf,
    feature_map,
    last_stages,
    moment_of,
    similarities,
)
from potluck.analysis.numbers.calibration import BINS
from potluck.analysis.numbers.drift import drift
from potluck.analysis.numbers.similarity import Matrix, gram
from potluck.api.predictions import calibrated, predicted_by
from potluck.core.federation import ClientId, Federation
from potluck.core.ground.errors import CheckpointError, ConfigError
from potluck.core.nets.modes import threads
from potluck.core.nets.splitting import CannotSplit, split_problem
from potluck.core.nets.weights import parameters_of
from potluck.core.requests.examples import Examples
from potluck.core.requests.inference import forward
from potluck.experiment.federation.groups import Groups
from potluck.experiment.folder.trained import Trained
from potluck.models.split import Split, split
from potluck.models.stages import stages_of

_FEWEST = 8  # examples, below which no similarity means anything
_MOST = 4096  # of which a stage's inner products take 128 MiB


class NoSuchClass(ConfigError):
    """A class is asked for of which there are no examples."""


@dataclass(frozen=True)
class Sampling:
    """How closely models are looked at.

    Attributes:
        clients: of how many at most the networks are compared, of each architecture in turn.
        examples: of the common test set at most, on which they are compared.
        common: whether predictions are on the common test set instead of each client's own test part.
        map_class: whose examples alone the map of features shows, a number from 0; None for those of all.
        bins: of confidence.
    """

    clients: int = 10
    examples: int = 512
    common: bool = False
    bins: int = BINS
    map_class: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("clients", 2), ("examples", _FEWEST), ("bins", 2)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name}: expected a whole number of at least {least}, found {value!r}")
        if self.examples > _MOST:
            raise ConfigError(
                f"examples: expected at most {_MOST}, found {self.examples}; every stage of every client keeps as many"
                " numbers as their square"
            )


def look_inside(
    trained: Trained,
    empty: Inside,
    sampling: Sampling,
    *,
    kept: Iterable[Trained] = (),
    groups: Groups | None = None,
    drawn: bool = True,
) -> Inside:
    """What a run's models show; what cannot be computed is left out with a remark that says why.

    Args:
        trained: the models.
        empty: of which run they are, and nothing else.
        sampling: how closely they are looked at.
        kept: the models of further rounds, for curves.
        groups: of test examples, whose predictions are looked at by themselves too.
        drawn: whether its features are placed in two dimensions.

    Raises:
        NoSuchClass: there are no examples of the class that the map shall show.
    """
    federation, remarks = trained.federation, list[str]()
    examples = _shown(federation, sampling.examples)
    if examples is None:
        remarks.append(f"no similarity: there is no common test set of at least {_FEWEST} examples")
    labels = examples.labels.tolist() if examples is not None and federation.task.has_classes else None
    _check_class(sampling.map_class, labels)
    seen = _seen(trained, sampling, examples)
    with threads(trained.threads):
        predicted = predicted_by(trained, groups, remarks, common=sampling.common)
    for problem, who in seen.uncut.items():
        whose = enumerated([empty.client_name(client) for client in who])
        remarks.append(f"no similarity with {whose}: {problem}")
    found = replace(
        empty,
        examples=0 if examples is None else len(examples),
        similarity=tuple(similarities(seen.stages)) if seen.stages else (),
        drift=tuple(drift(seen.weights)),
        calibration=tuple(calibrated(predicted, federation, empty, sampling.bins)),
        counted=tuple(row for client, of in predicted.items() for row in of.counted(client)),
        map=feature_map(last_stages(seen.stages), labels, drawn=drawn, only=sampling.map_class),
    )
    moments = {found.round: found.moment}
    try:
        for other in kept:
            if other.round not in moments:
                moments[other.round] = _moment(other, sampling, examples, labels)
    except CheckpointError as problem:
        remarks.append(f"no further rounds: {problem}")
    return replace(found, moments=tuple(one for _, one in sorted(moments.items())), remarks=tuple(remarks))


def _moment(trained: Trained, sampling: Sampling, examples: Examples | None, labels: ClassLabels) -> Moment:
    seen = _seen(trained, sampling, examples)
    return moment_of(trained.round, seen.stages, seen.weights, labels, sampling.map_class)


def _check_class(number: int | None, labels: ClassLabels) -> None:
    """Check that there are examples of the class that a map shows.

    Raises:
        NoSuchClass: there are not two.
    """
    if number is None or labels is None:
        return
    if labels.count(number) < 2:
        known = sorted({label for label in labels if labels.count(label) > 1})
        raise NoSuchClass(
            f"map_class: expected a class with two of the {len(labels)} common test examples, one of"
            f" {', '.join(map(str, known))}, found {number}"
        )


@dataclass(frozen=True)
class _Seen:
    """What the clients' networks are and put out after a round: stages, weights, and who has no stages, by why."""

    stages: list[StageOf] = field(default_factory=list[StageOf])
    weights: dict[ClientId, dict[str, Matrix]] = field(default_factory=dict[ClientId, dict[str, Matrix]])
    uncut: dict[str, list[ClientId]] = field(default_factory=dict[str, list[ClientId]])


def _seen(trained: Trained, sampling: Sampling, examples: Examples | None) -> _Seen:
    found = _Seen()
    with threads(trained.threads):
        for client in _chosen(trained.federation, sampling.clients):
            net = trained.model(client)
            try:
                net = _cut(net)
                found.stages.extend([] if examples is None else _stages(net, client, examples))
            except CannotSplit as problem:
                why = f"{type(net).__name__} has no stages to compare: {problem}"
                found.uncut.setdefault(why, []).append(client)
            found.weights[client] = {key: tensor.double().numpy() for key, tensor in parameters_of(net).items()}
    return found


def _chosen(federation: Federation, count: int) -> list[ClientId]:
    """Clients of each architecture in turn, so that few of many stand for all."""
    by_architecture: dict[str, list[ClientId]] = {}
    for client in sorted(federation.sites):
        by_architecture.setdefault(federation.base_of(federation.sites[client].architecture), []).append(client)
    ranks = sorted((rank, client) for members in by_architecture.values() for rank, client in enumerate(members))
    return sorted(client for _, client in ranks[:count])


def _shown(federation: Federation, count: int) -> Examples | None:
    """Examples spread evenly over the common test set; None if it has too few."""
    test = federation.test
    if test is None or not test.are_here or len(test) < _FEWEST:
        return None
    return test.take(torch.linspace(0, len(test) - 1, min(count, len(test))).round().long())


def _stages(net: nn.Module, client: ClientId, examples: Examples) -> list[StageOf]:
    """What a network has behind each of its stages.

    Raises:
        CannotSplit: no place was found where it can be cut.
    """
    parts, names = split(net), stages_of(net).stages
    found = forward(net, examples, lambda inputs: tuple(parts.levels(inputs)[0]), 100)
    if not all(activations.isfinite().all() for activations in found):
        raise CannotSplit("they put out numbers that are NaN or infinite")
    return [
        StageOf(client, number, place, gram(activations.numpy()), _means(parts, activations))
        for number, (place, activations) in enumerate(zip(names, found, strict=True))
    ]


def _cut(net: nn.Module) -> nn.Module:
    """The network, or the only one inside it that has stages, where a method predicts with more than a network.

    Raises:
        CannotSplit: there is none, or there are several.
    """
    if (problem := split_problem(net)) is None:
        return net
    inside = [module for module in net.children() if split_problem(module) is None]
    if len(inside) == 1:
        return inside[0]
    raise CannotSplit(f"{len(inside)} networks in it have" if inside else problem)


def _means(parts: Split, activations: Tensor) -> Matrix:
    """Activations (n, ...) as means over positions (n, channels)."""
    axes = activations.dim() - 1
    channels = parts.channel_axis(axes) % axes + 1
    positions = [axis for axis in range(1, axes + 1) if axis != channels]
    return (activations.double().mean(positions) if positions else activations.double()).numpy()
