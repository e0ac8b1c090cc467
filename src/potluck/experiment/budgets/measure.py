"""What a client's round takes with a candidate: measured, not estimated.

The method's own rounds are run with this client in a process of its own. Clients beside it in the cohort have a few
examples each, so that what they send has its form and takes little time.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from potluck.core.federation import ClientId, Federation, Site
from potluck.core.ground.errors import ConfigError, PotluckError, PotluckWarning
from potluck.engine.executors.metered import Meter
from potluck.engine.numerics.device import CPU
from potluck.engine.rounds.engine import Engine
from potluck.experiment.budgets.apart import Apart, Belongings, KilledError, Origin, stored_bytes
from potluck.experiment.budgets.candidates import Candidate, candidates_of, with_candidates
from potluck.experiment.budgets.limits import Taken
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.settings.schema import Experiment

_BESIDE = 8  # examples of a client that is not measured


class Bench:
    """Measures candidates at the clients of an experiment's federation.

    Args:
        experiment: the experiment.
        rounds: how many are run; memory is the most of any, the rest is the last one's.

    Attributes:
        experiment: without budgets.

    Raises:
        ConfigError: it is computed on an accelerator, or capacities do not decide what its clients train.
    """

    def __init__(self, experiment: Experiment, rounds: int = 2) -> None:
        device = experiment.run.computing.device
        if experiment.run.computing.place != CPU:
            raise ConfigError(f"run.computing.device: found {device!r}; expected 'cpu', where memory is measured")
        if getattr(experiment.method, "assignment", "capacity") != "capacity":
            raise ConfigError(
                "method.assignment: found 'dynamic', by which no capacity decides what a client trains; expected"
                " 'capacity'"
            )
        self.experiment = replace(experiment, run=replace(experiment.run, budgets=None))
        self._rounds, self._origin = rounds, Origin()
        self._trials: dict[Candidate, Trial | str] = {}

    @cached_property
    def federation(self) -> Federation:
        """As the experiment has it; whether the method can run in it is asked once models are assigned."""
        return assemble(self.experiment, checked=True).federation

    @cached_property
    def candidates(self) -> list[Candidate]:
        """The largest first."""
        return candidates_of(self.experiment, self.federation)

    def take(self, candidate: Candidate, client: ClientId) -> Taken | str:
        """What the client's round takes with the candidate, or why it cannot train it.

        Raises:
            ConfigError: this system does not tell how much memory a process holds.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PotluckWarning)  # of trials, in which every client has the same
            if candidate not in self._trials:
                self._trials[candidate] = self._trial(candidate)
            trial = self._trials[candidate]
            return trial if isinstance(trial, str) else trial.take(self._origin, client, self._rounds)

    def close(self) -> None:
        """End the processes."""
        self._origin.close()

    def _trial(self, candidate: Candidate) -> "Trial | str":
        made = with_candidates(self.experiment, self.federation, [candidate])
        try:
            trial = Trial(made, assemble(made, checked=True).federation)
            trial.check()
        except PotluckError as error:
            return str(error)
        return trial


@dataclass(frozen=True)
class Trial:
    """A federation in which every client has the same candidate, and the server what it has."""

    experiment: Experiment
    federation: Federation

    def check(self) -> None:
        """Have the method begin.

        Raises:
            PotluckError: it refuses to.
        """
        run = self.experiment.run
        Engine(self.experiment.method, self.federation, seed=run.seed, computing=run.computing).start()

    def take(self, origin: Origin, client: ClientId, rounds: int) -> Taken | str:
        """What this client's round takes, or why it cannot train.

        Raises:
            ConfigError: this system does not tell how much memory a process holds.
        """
        try:
            with origin.client(self.experiment, self.federation, client) as apart:
                done = self._rounds_done(apart, client, rounds)
        except KilledError as error:
            return str(error)
        except PotluckError as error:
            return f"it cannot train: {error}"
        if apart.floor is None:
            raise ConfigError("budgets: this system does not tell how much memory a process holds; expected Linux")
        last, all_rounds = done[-1], [meter for meters in done for meter in meters]
        own = Belongings.of(self.federation, client).nbytes + stored_bytes(self.federation.sites[client].test)
        return Taken(
            memory=max(meter.memory or 0 for meter in all_rounds),
            seconds=sum(meter.seconds for meter in last),
            gflops=apart.gflops,
            down=sum(meter.down for meter in last),
            up=sum(meter.up for meter in last),
            disk=own + max(meter.down + meter.kept for meter in all_rounds),
            floor=apart.floor,
        )

    def _rounds_done(self, apart: Apart, client: ClientId, rounds: int) -> Sequence[Sequence[Meter]]:
        """The meters of the client's calls, round by round."""
        run = self.experiment.run
        sites = {id: site if id == client else _few(site) for id, site in self.federation.sites.items()}
        others = [id for id in sorted(sites) if id != client]
        cohort = sorted([client, *others[: run.cohort_size(len(sites)) - 1]])
        federation = replace(self.federation, sites=sites)
        method = self.experiment.method
        engine = Engine(method, federation, seed=run.seed, executor=apart, computing=run.computing)
        state, done = engine.start(), list[list[Meter]]()
        for number in range(1, rounds + 1):
            apart.meters = []
            state, _ = engine.round(number, state, cohort)
            done.append(apart.meters)
        return done


def _few(site: Site) -> Site:
    """The client with the first of its training examples."""
    return replace(site, train=site.train.take(torch.arange(min(_BESIDE, len(site.train)))))
