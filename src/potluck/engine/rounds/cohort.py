"""The cohort of a round, as a method sees it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from potluck.core.federation import ClientId
from potluck.core.message import Message
from potluck.core.method import Method, runs_on_client
from potluck.core.roles import Arriving, Replies
from potluck.engine.client.session import ContractError
from potluck.engine.rounds.report import ExchangePlace

Send = Callable[[Callable[..., Any], Mapping[ClientId, Message], ExchangePlace], Arriving]
"""Sends messages to a handler, from a place in the run."""


class RoundCohort:
    """The engine's cohort: sends messages to this round's clients."""

    def __init__(self, ids: Sequence[ClientId], method: Method[Any], exchange: Send, place: ExchangePlace) -> None:
        self._ids = tuple(ids)
        self._method = method
        self._exchange = exchange
        self._place = place

    @property
    def ids(self) -> Sequence[ClientId]:
        """See `potluck.core.roles.Cohort`."""
        return self._ids

    def ask(self, handler: Callable[..., Any], messages: Message | Mapping[ClientId, Message]) -> Replies:
        """See `potluck.core.roles.Cohort.ask`."""
        return self.stream(handler, messages).all()

    def stream(self, handler: Callable[..., Any], messages: Message | Mapping[ClientId, Message]) -> Arriving:
        """See `potluck.core.roles.Cohort.stream`."""
        if not runs_on_client(handler):
            raise ContractError(f"{handler.__qualname__} is not marked @on_client, so it cannot be sent to clients")
        if getattr(handler, "__self__", None) is not self._method:
            raise ContractError(f"{handler.__qualname__} is not a handler of the running method; pass self.<handler>")
        addressed = dict.fromkeys(self._ids, messages) if isinstance(messages, Message) else messages
        strangers = sorted(set(addressed) - set(self._ids))
        if strangers:
            raise ContractError(f"{handler.__qualname__} was sent to {strangers}, who are not in this round's cohort")
        self.finish()
        self._place.exchange += 1
        self._place.unread = handler.__qualname__
        return self._exchange(handler, addressed, self._place)

    def finish(self) -> None:
        """Check that no replies are left unread.

        Raises:
            ContractError: some are.
        """
        if (unread := self._place.unread) is not None:
            raise ContractError(f"not all replies of {unread} were read; read what cohort.stream gives to its end")
