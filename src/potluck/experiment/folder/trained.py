"""The models that a run has trained, as they are evaluated: each client's, and the server's."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from potluck.core.federation import ClientId, Federation
from potluck.core.ground.errors import CheckpointError, ConfigError
from potluck.core.nets.modes import threads
from potluck.core.requests.examples import Examples
from potluck.engine.disk.store import ClientStore
from potluck.engine.rounds.engine import Engine
from potluck.experiment.federation.assemble import Assembly, assemble
from potluck.experiment.federation.groups import Groups, groups_by
from potluck.experiment.folder.checkpoint import Checkpoints
from potluck.experiment.folder.code import as_started
from potluck.experiment.folder.folder import check_data, open_folder
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.settings.schema import Experiment
from potluck.experiment.settings.tables import read_toml
from potluck.records import BEST, CHECKPOINT, CONFIG, LAST, Checkpoint, kept_rounds
from potluck.seals import read_sealed


@dataclass(frozen=True, eq=False)
class Trained:
    """The models after a round of a run.

    Attributes:
        engine: the run's.
        state: the method's, after that round.
        round: its number.
        threads: torch's threads while a model is made.
        classes: names of the classes in the order of outputs; empty if they have none or it is not known.
    """

    engine: Engine
    state: Any
    round: int
    threads: int = 1
    classes: tuple[str, ...] = ()

    @property
    def federation(self) -> Federation:
        """The run's federation."""
        return self.engine.federation

    def model(self, client: ClientId) -> nn.Module:
        """The network that a client predicts with, in evaluation mode, on the processor; a new one each time.

        It is the one that is evaluated: of methods whose clients predict with more than their own network, or with
        another, it is that one. It reads prepared inputs, see `potluck.Examples`.

        Raises:
            ConfigError: there is no such client.
        """
        if client not in self.federation.sites:
            ids = sorted(self.federation.sites)
            raise ConfigError(f"client {client!r}: expected one of the {len(ids)} from {ids[0]} to {ids[-1]}")
        with threads(self.threads):
            return self.engine.inference_model(self.state, client).eval()

    def global_model(self) -> nn.Module:
        """The server's model, in evaluation mode.

        Raises:
            ConfigError: the method has none.
        """
        net = self.engine.global_model(self.state)
        if net is None:
            name = type(self.engine.method).__name__
            raise ConfigError(
                f"{name} has no single global model with these settings; ask for a client's, such as client 0"
            )
        return net.eval()

    def examples(self, client: ClientId | None) -> Examples:
        """Examples that a client's model, or with None the server's, can be tried on: test examples where it has any.

        Raises:
            ConfigError: there is no such client.
        """
        if client is None:
            sites = self.federation.looked_at.values()
            found = [self.federation.test, *(site.test for site in sites), *(site.train for site in sites)]
        else:
            site = self.federation.sites[client]
            found = [site.test, self.federation.test, site.validation, site.train]
        return next(examples for examples in found if examples is not None and len(examples))


@dataclass(frozen=True, eq=False)
class RunModels:
    """The checkpoints of a run, and the federation and the method that make models of them.

    Attributes:
        folder: of the run.
        experiment: its settings.
        assembly: its federation.
    """

    folder: Path
    experiment: Experiment
    assembly: Assembly

    def trained(self, *, chosen: bool = False) -> Trained:
        """The models after the last round, or after the one that is best on validation parts.

        Raises:
            CheckpointError: there is no such round, or its checkpoint is damaged.
        """
        checkpoint = Checkpoint.read(self._home / (BEST if chosen else LAST))
        if checkpoint is None:
            missing = "no round that is best on validation parts" if chosen else "no finished round yet"
            raise CheckpointError(f"{self.folder} has {missing}, so there are no models")
        return self._of(checkpoint)

    def kept(self) -> Iterator[Trained]:
        """The models after each round that the run was told to keep, in order; see `run.keep_every`.

        Raises:
            CheckpointError: one of the checkpoints is damaged.
        """
        last = Checkpoint.read(self._home / LAST)
        for number, path in kept_rounds(self._home).items():
            if last and number <= last.round and (checkpoint := Checkpoint.read(path)):
                yield self._of(checkpoint)

    def groups(self, column: str) -> Groups:
        """The groups of test examples by a column of the run's tables, whether or not models read it.

        Raises:
            ConfigError: the column has too many different values.
            DataError: the data are no tables, or lack the column.
        """
        with as_started(self.folder, open_folder(self.folder)):
            return groups_by(column, self.experiment)

    @property
    def _home(self) -> Path:
        return self.folder.resolve() / CHECKPOINT

    def _of(self, checkpoint: Checkpoint) -> Trained:
        store, run = ClientStore(self._home), self.experiment.run
        engine = Engine(
            self.experiment.method,
            self.assembly.federation,
            seed=run.seed,
            store=store,
            computing=run.computing,
            clipping=run.clipping,  # for who goes on with it, and listens
        )
        with threads(run.threads):
            initial = self.experiment.method.init(engine.server(0))
        state = Checkpoints(self._home, store).restore(checkpoint, initial)
        engine.rounds_done = checkpoint.round
        return Trained(engine, state, checkpoint.round, run.threads, self.assembly.classes)


def trained_in(folder: Path, *, chosen: bool = False) -> Trained:
    """The models of the run in a folder, which is only read. Its data are loaded, with the code that it started with.

    Args:
        folder: of the run.
        chosen: whether after the round that is best on validation parts instead of the last.

    Raises:
        CheckpointError: the folder is not a run, has no finished round or is damaged, or data or code have changed.
        DataError: its data are missing.
    """
    return models_in(folder).trained(chosen=chosen)


def models_in(folder: Path) -> RunModels:
    """The checkpoints of the run in a folder; raises as `trained_in`."""
    manifest, home = open_folder(folder), folder.resolve()
    read_sealed(folder)  # or models of another configuration would be made
    if (manifest.get("computing") or {}).get("executor") == "flower":
        raise CheckpointError(
            f"{folder}: its clients were on other machines, which keep their data and models; there are only records"
        )
    if Checkpoint.read(home / CHECKPOINT / LAST) is None:
        raise CheckpointError(f"{folder} has no finished round yet, so there are no models")
    with as_started(folder, manifest):
        experiment = resolve(read_toml(home / CONFIG), str(folder / CONFIG))
        assembly = assemble(experiment)
    check_data(folder, manifest, assembly)
    return RunModels(folder, experiment, assembly)
