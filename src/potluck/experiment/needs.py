"""Whether a federation offers what a method needs; all problems are told together."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from potluck.core.errors import ConfigError
from potluck.core.federation import Builder, ClientId, Federation
from potluck.core.method import Need
from potluck.core.modes import to_training
from potluck.core.rng import Key, isolated
from potluck.core.task import CLASSIFICATION, Task
from potluck.core.weights import learnt_of
from potluck.models.contract import split

_NAMED = 5  # clients in an error, before the rest are counted


@dataclass(frozen=True)
class Offer:
    """What a federation has, as far as it can be known without its data.

    Attributes:
        architectures: builders by name.
        assigned: the architecture of each client.
        server_architecture: of the common or global model.
        public: whether there are public examples.
        unvalidated: clients without a validation part.
        task: what outputs mean.
    """

    architectures: Mapping[str, Builder]
    assigned: Mapping[ClientId, str]
    server_architecture: str
    public: bool
    unvalidated: tuple[ClientId, ...]
    task: Task = CLASSIFICATION

    @classmethod
    def of(cls, federation: Federation) -> "Offer":
        """What an assembled federation has."""
        return cls(
            architectures=federation.architectures,
            assigned={id: site.architecture for id, site in federation.sites.items()},
            server_architecture=federation.server_architecture,
            public=federation.public is not None,
            unvalidated=tuple(id for id, site in sorted(federation.sites.items()) if not len(site.validation)),
            task=federation.task,
        )

    @cached_property
    def nets(self) -> dict[str, nn.Module]:
        """One network of each architecture that a client has."""
        return {name: self.build(name) for name in sorted(set(self.assigned.values()))}

    def build(self, architecture: str, **options: float) -> nn.Module:
        """A network for looking at, made without drawing from the global generator."""
        with isolated(Key((architecture,))):
            return to_training(self.architectures[architecture](**options))


def check_needs(needs: frozenset[Need], method_name: str, offer: Offer) -> None:
    """Refuse a federation in which the method cannot run.

    Raises:
        ConfigError: one line with every need that is not met and what to do about it.
    """
    problems = [problem for need in sorted(needs, key=lambda n: n.name) if (problem := _CHECKS[need](offer))]
    if problems:
        raise ConfigError(f"{method_name} cannot run here: {'; '.join(problems)}")


def _one_architecture(offer: Offer) -> str | None:
    first, name = next(iter(offer.assigned.items()))
    for client, other in offer.assigned.items():
        if other != name:
            return (
                f"it needs one architecture, but client {first} has {name} and client {client} has {other};"
                " give federation.models one name, or use a method (or a sharing.scope) for several architectures"
            )
    return None


def _nested_layers(offer: Offer) -> str | None:
    seen: dict[str, tuple[str, tuple[int, ...]]] = {}
    for architecture, net in offer.nets.items():
        for name, tensor in learnt_of(net).items():
            owner, shape = seen.setdefault(name, (architecture, tuple(tensor.shape)))
            if shape != tuple(tensor.shape):
                return (
                    f"it averages layers by name, but {name} has shape {shape} in {owner} and"
                    f" {tuple(tensor.shape)} in {architecture}; use one nested family of models, or"
                    " method.sharing.scope = 'architecture'"
                )
    return None


def _split_model(offer: Offer) -> str | None:
    for architecture, net in offer.nets.items():
        try:
            split(net)
        except TypeError as error:
            return f"{architecture}: {error}"
    return None


def _width_slices(offer: Offer) -> str | None:
    try:
        full, narrow = offer.build(offer.server_architecture), offer.build(offer.server_architecture, rate=0.5)
    except (TypeError, ConfigError):
        return f"it cuts the width of {offer.server_architecture}, which has no slices; choose another model"
    return None if _fits(narrow, full) else f"{offer.server_architecture} at rate 0.5 is no slice of itself"


def _fits(narrow: nn.Module, full: nn.Module) -> bool:
    whole = full.state_dict()
    return all(
        name in whole and all(small <= large for small, large in zip(tensor.shape, whole[name].shape, strict=True))
        for name, tensor in narrow.state_dict().items()
    )


def _public_data(offer: Offer) -> str | None:
    if offer.public:
        return None
    return "it needs public data and federation.public is 'none'; give it 'holdout' or the name of a data set"


def _validation(offer: Offer) -> str | None:
    if not offer.unvalidated:
        return None
    named = ", ".join(map(str, offer.unvalidated[:_NAMED]))
    more = f" and {len(offer.unvalidated) - _NAMED} more" if len(offer.unvalidated) > _NAMED else ""
    return (
        f"it needs validation data at every client, and there are none at {named}{more}; raise"
        " federation.validation_fraction, or deal these clients more examples"
    )


def _classes(offer: Offer) -> str | None:
    if offer.task.has_classes:
        return None
    return (
        f"it works class by class, and {offer.task.name} has no single class for each example; use a method that takes"
        " any task, such as fedavg, scaffold or fedin"
    )


def _one_output(offer: Offer) -> str | None:
    if not offer.task.by_position:
        return None
    return (
        f"it exchanges one output for each example, and {offer.task.name} has one for each position; use a method that"
        " takes any task, such as fedavg, scaffold or fedin"
    )


_CHECKS: dict[Need, Callable[[Offer], str | None]] = {
    Need.ONE_ARCHITECTURE: _one_architecture,
    Need.NESTED_LAYERS: _nested_layers,
    Need.SPLIT_MODEL: _split_model,
    Need.WIDTH_SLICES: _width_slices,
    Need.PUBLIC_DATA: _public_data,
    Need.VALIDATION: _validation,
    Need.CLASSES: _classes,
    Need.ONE_OUTPUT: _one_output,
}
