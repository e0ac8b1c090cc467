"""Secure sums over nodes: the server passes on what they say to one another, and learns the sums.

What it has of an exchange's sums is on disk before it asks for more, so that it may be restarted within a round. It
holds no secret: all of it is what nodes have sent.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

from potluck.core.federation import ClientId
from potluck.core.ground.errors import CheckpointError, ConfigError, WireError
from potluck.core.roles import Failure
from potluck.engine.client.session import Answer
from potluck.engine.disk.files import make_folder, remove, write_atomically
from potluck.engine.rounds.sums import SECURE_SUMS
from potluck.experiment.running.secure_sums import Addition
from potluck.flower.server.grid import GridExecutor, NodeTask
from potluck.flower.wire.schemas import SumsStep, sums_number
from potluck.secure import ANSWERS
from potluck.secure.agreement import Agreement, SecureRefusal
from potluck.secure.server import SecureServer
from potluck.secure.together import SecureCourse

log = logging.getLogger(__name__)
SUMS = "sums"
"""The folder for the sums of the round that is under way, in a run's folder."""


class AddingOverNodes:
    """Carries out sums with nodes; see `potluck.experiment.running.secure_sums.Adding`.

    Whoever has failed to reply is not asked to take part.

    Args:
        executor: reaches the nodes.
        run: the run's name at them.
        keys: by client, the public key with which its node signs.
        folder: of the run.
    """

    includes_failed = False
    warning = (
        "run.secure_sums: at nodes that joined without --peers they hold against a server that is curious and honest,"
        " and against no other"
    )

    def __init__(self, executor: GridExecutor, run: str, keys: Mapping[ClientId, bytes], folder: Path) -> None:
        self._executor, self._run, self._keys, self._folder = executor, run, keys, folder / SUMS

    def __call__(self, addition: Addition) -> SecureCourse:
        """See `Adding`.

        Raises:
            CheckpointError: what is left of these sums from before a restart is damaged.
        """
        course = SecureCourse()
        place = self._folder / f"{addition.round}-{addition.exchange}"
        try:
            server = self._begun(place, addition)
            while not server.done:
                self._ask(server, addition, course)
                server.close()
                write_atomically(place, server.save())
            course.sums = server.sums()
        except (SecureRefusal, ConfigError) as refusal:
            why = [str(refusal), *(str(failure) for failure in course.failures.values())][:2]
            course.refusal = "; ".join(why)
        return course

    def _begun(self, place: Path, addition: Addition) -> SecureServer:
        """The server's half, at its beginning or as it was when the server was stopped.

        Raises:
            ConfigError: there are too few clients for sums.
            CheckpointError: what is left is damaged.
        """
        if place.is_file() and (before := _restored(place)).agreement.run == self._run:
            return before
        make_folder(self._folder)
        for old in self._folder.iterdir():
            if not old.name.startswith(f"{addition.round}-"):
                remove(old)
        keys = {client: self._keys[client] for client in addition.coverage.kinds}
        number = sums_number(addition.round, addition.exchange)
        server = SecureServer(Agreement(self._run, number, keys, addition.coverage, addition.numbers, addition.least))
        write_atomically(place, server.save())
        return server

    def _ask(self, server: SecureServer, addition: Addition, course: SecureCourse) -> None:
        """Ask all who are still there at a step, and take what they answer."""
        step, needed = server.step, server.agreement.needed
        tasks: list[NodeTask] = []
        for client in server.asked:
            request = server.request(client)
            course.bytes_down[client] += len(request)
            job = SumsStep(client, request, addition.round, addition.exchange, step)
            tasks.append(NodeTask(job, server.most_bytes(client)))
        for outcome in self._executor.steps(tasks, needed):
            client, failed = outcome.client, None
            if isinstance(outcome, Answer):
                course.bytes_up[client] += len(outcome.payload)
                try:
                    server.take(client, outcome.payload)
                except SecureRefusal as refusal:
                    failed = Failure(client, SECURE_SUMS, str(refusal), kind="misfit")
            else:
                assert isinstance(outcome, Failure)
                failed = outcome
            if failed is not None:
                course.failures[client] = failed
                log.info("round %d, %s: %s", addition.round, ANSWERS[step], failed)


def _restored(place: Path) -> SecureServer:
    try:
        return SecureServer.restored(place.read_bytes())
    except (WireError, OSError) as error:
        raise CheckpointError(f"{place} is damaged: {error}; without this file the round begins anew") from error
