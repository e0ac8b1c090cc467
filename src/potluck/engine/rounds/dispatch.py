"""Clients' jobs as executors take them: built when their turn comes, with an estimate of what they cost."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial

from potluck.core.federation import ClientId, Federation
from potluck.core.message import Message
from potluck.engine.answers.events import Attendance
from potluck.engine.client.runtime import ClientRuntime, Job
from potluck.engine.executors import Pending
from potluck.engine.numerics.costs import forward_flops


@dataclass(frozen=True)
class Dispatch:
    """Makes jobs of a federation's clients ready for an executor."""

    federation: Federation
    runtime: ClientRuntime

    def pending(
        self,
        make: Callable[[], Job],
        client: ClientId,
        parts: tuple[str, ...],
        most_bytes: int,
        attendance: Attendance,
    ) -> Pending:
        """A client's job, which is about these parts of its examples."""
        architecture = self.federation.outline(client).architecture
        return Pending(make, partial(self.cost, client, parts), architecture, most_bytes, attendance.note)

    def cost(self, client: ClientId, parts: tuple[str, ...]) -> int:
        """Floating-point operations of the client's network on these parts of its examples."""
        sizes = self.sizes(client)
        flops = self._flops_by_architecture[self.federation.outline(client).architecture]
        return flops * (1 + sum(sizes[part] for part in parts))

    def sizes(self, client: ClientId) -> dict[str, int]:
        """The number of examples of each part."""
        known, test = self.federation.outline(client), self.federation.common_test(client)
        sizes = {"train": known.train, "validation": known.validation, "own": known.test}
        return {**sizes, "common": 0 if test is None else len(test)}

    @cached_property
    def _flops_by_architecture(self) -> dict[str, int]:
        named = {self.federation.outline(client).architecture for client in self.federation.sites}
        return {name: forward_flops(self.runtime.build(name), self.federation.input_shape) for name in sorted(named)}


class Encoded:
    """Encodes messages on demand, those of equal content once, and keeps no more than is needed."""

    def __init__(self, messages: Iterable[Message]) -> None:
        self._left = Counter(message.identity for message in messages)
        self._payloads: dict[object, bytes] = {}

    def payload(self, message: Message) -> bytes:
        """The message as bytes."""
        name = message.identity
        payload = self._payloads.pop(name, None) or message.encode()
        self._left[name] -= 1
        if self._left[name] > 0:
            self._payloads[name] = payload
        return payload
