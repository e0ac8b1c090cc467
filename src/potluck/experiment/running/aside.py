"""Who is set aside, since it was late again and again: by the records alone, so that a resumed run knows it too."""

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from functools import partial

from potluck.core.federation import ClientId
from potluck.experiment.settings.schema import RunConfig
from potluck.records import RoundRecord
from potluck.twin.simulate import Timed


class SetAside:
    """Remembers who was late, and who is set aside until when; nobody is, if the configuration has no rule for it.

    Args:
        config: the run's.
        clients: how many there are.
    """

    def __init__(self, config: RunConfig, clients: int) -> None:
        self._rule = config.rounds_close.set_aside
        self._room = clients - config.needed(config.cohort_size(clients))
        self._until: dict[ClientId, int] = {}
        kept = self._rule.of if self._rule else 0
        self._late: defaultdict[ClientId, deque[bool]] = defaultdict(partial(deque[bool], maxlen=kept))

    def at(self, number: int) -> set[ClientId]:
        """Those who are set aside in a round."""
        return {client for client, until in self._until.items() if until >= number}

    def remember(self, records: Iterable[RoundRecord]) -> None:
        """Take earlier rounds into account, with what was decided then, whatever the rule was."""
        for record in records if self._rule else ():
            self._count(record.cohort, record.late or ())
            self._rest({int(client): until for client, until in (record.set_aside or {}).items()})

    def after(self, number: int, cohort: Collection[ClientId], late: Collection[ClientId]) -> dict[ClientId, int]:
        """Whom a round sets aside, each with the last round of its rest; those who were late most often come first.

        Args:
            number: of the round that has ended.
            cohort: the clients that were drawn for it.
            late: those of them that were late.
        """
        if self._rule is None:
            return {}
        self._count(cohort, late)
        often = {client: sum(self._late[client]) for client in cohort}
        too_late = sorted((-count, client) for client, count in often.items() if count >= self._rule.late)
        room = max(0, self._room - len(self.at(number + 1)))
        found = {client: number + self._rule.rest for _, client in too_late[:room]}
        self._rest(found)
        return found

    def following(self, rounds: Iterable[Timed]) -> Iterator[Timed]:
        """The rounds of a simulation, of which each sets clients aside before the next one begins."""
        busy: dict[ClientId, float] = {}
        for timed in rounds:
            turns = [turn for _, turn in timed.turns]
            late = {turn.client for turn in turns if turn.fate == "absent" and turn.start < busy.get(turn.client, 0.0)}
            busy |= (found := {turn.client: turn.finish for turn in turns if turn.fate == "late"})
            self.after(timed.number, {turn.client for turn in turns}, late | found.keys())
            yield timed

    def _count(self, cohort: Collection[ClientId], late: Collection[ClientId]) -> None:
        for client in cohort:
            self._late[client].append(client in late)

    def _rest(self, until: dict[ClientId, int]) -> None:
        """Set clients aside; what they were before is forgotten."""
        self._until |= until
        for client in until:
            self._late.pop(client, None)
