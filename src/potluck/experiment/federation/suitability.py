"""Which methods can run on a federation, and why the others cannot."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from potluck.core.federation import Federation
from potluck.core.ground.errors import PotluckError, PotluckWarning
from potluck.core.needs import Offer
from potluck.engine.rounds.engine import Engine
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.federation.needs import cautions, check_needs, needs_of
from potluck.experiment.federation.rehearsal import rehearse
from potluck.experiment.settings.schema import Experiment
from potluck.methods import get_method, list_methods


@dataclass(frozen=True)
class Verdict:
    """Whether a method, with its default hyper-parameters, can run on a federation.

    Attributes:
        method: its name.
        problem: why it cannot, in one line; None if it can.
        notes: warnings that a run would begin with.
    """

    method: str
    problem: str | None = None
    notes: tuple[str, ...] = ()


def federation_of(experiment: Experiment) -> Federation:
    """An experiment's federation, whether its own method can run on it or not.

    Raises:
        ConfigError: a model cannot be trained on its data.
        DataError: the data are missing, or cannot be divided as configured.
    """
    federation = assemble(experiment, checked=True).federation
    rehearse(federation)
    return federation


def verdicts(federation: Federation, seed: int = 0) -> Iterator[Verdict]:
    """One for each method: what a run would be refused for before its first round."""
    offer = Offer.of(federation)
    for name in list_methods():
        method = get_method(name)()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", PotluckWarning)
            try:
                check_needs(needs_of(method), name, offer)
                method.init(Engine(method, federation, seed=seed).server(0))
            except PotluckError as error:
                yield Verdict(name, str(error).removeprefix(f"{name} cannot run here: "))
                continue
        warned = [str(w.message) for w in caught if issubclass(w.category, PotluckWarning)]
        yield Verdict(name, notes=(*cautions(needs_of(method), name, offer), *warned))
