"""Observers of a served run: who may read from other machines how it stands, and what of it they see.

An observer is neither operator nor node: a Prometheus elsewhere, or a site's own staff. So it is shown nothing that
tells of a node's data: no words of a node's, which may name classes, files or values; no loss and no score, which are
a single node's after a round with one reply; not how much was sent, which may count classes; and not where a node calls
from.
"""

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from potluck.cli.status.overview import NodeStanding, Overview
from potluck.core.ground.errors import PotluckError
from potluck.flower.deploy.checks import ends_of_observers
from potluck.flower.deploy.limits import Reports
from potluck.flower.deploy.members import Members
from potluck.flower.deploy.requests import Inadmissible
from potluck.flower.deploy.roles import OBSERVER
from potluck.flower.deploy.tls import Security

_LOOK_EVERY = 2.0  # seconds until it is looked whether there are other keys
_TURN = 60.0  # seconds until the same refusal is said again


def for_observers(seen: Overview) -> Overview:
    """What observers see of an overview."""
    return replace(
        seen,
        is_whole=False,
        progress=seen.progress.changed(loss=None, score=None, bytes=0),
        bytes_down=0,
        bytes_up=0,
        bytes_evaluation=0,
        nodes=tuple(map(_for_observers, seen.nodes)),
        failures=(),
        finished=(),
        said=(),
    )


class Observers:
    """Those whose keys `potluck keys --observer` has made, known by the certificates that they show.

    Args:
        keys: the folder of the keys.
        say: called with who may read, and with who was refused, a bounded number of times a minute.

    Attributes:
        security: the server's side of TLS.
    """

    def __init__(self, keys: Path, say: Callable[[str], None]) -> None:
        self.security = Security(keys, mutual=True)
        self._members = Members(keys, OBSERVER)
        self._keys = keys
        self._say, self._refused = say, Reports(say, "callers who are no observers")
        self._reading: set[str] = set()

    def why_not(self, certificate: bytes | None) -> str | None:
        """Why who shows this certificate, in DER, is no observer; None if it is one."""
        try:
            self._members.meet(certificate)
        except Inadmissible as error:
            return error.why
        return None

    def refused(self, host: str, why: str) -> None:
        """Report a caller that was sent away."""
        self._refused(f"refused {host} at the observers' page: {why}")

    def hung_up(self, error: ssl.SSLError) -> None:
        """Report a caller whose handshake failed."""
        self._refused(f"refused a caller at the observers' page: {self.security.fault(error)}")

    async def watch(self) -> None:
        """Look after the keys and the reports."""
        looks = 0
        while True:
            self.look()
            await asyncio.sleep(_LOOK_EVERY)
            looks += 1
            if looks * _LOOK_EVERY % _TURN == 0:
                self._refused.turn()

    def look(self) -> None:
        """Take up other keys, and say who may read, and who no more."""
        self.security.look()  # of a new certificate the gate speaks
        try:
            ends = ends_of_observers(self._keys)
        except (PotluckError, OSError):  # a file is damaged, or is just being exchanged: of that the gate speaks, too
            return
        reading = {name for name, end in ends.items() if datetime.now(UTC) < end}
        for name in sorted(reading - self._reading):
            self._say(f"observer {name} may read")
        for name in sorted(self._reading - reading):
            self._say(f"observer {name} may read no more")
        self._reading = reading


def _for_observers(node: NodeStanding) -> NodeStanding:
    sighting = node.sighting
    return replace(
        node,
        doing="" if node.state == "takes no part" else node.doing,  # the reason may name what the node has
        sighting=None if sighting is None else replace(sighting, host="", why=None, bytes_down=0, bytes_up=0),
        why=None,
    )
