"""Every client holds only a few classes, dealt like cards (SplitMix; FeDepth's `pat`).

A shuffled deck of the classes is dealt to the clients, `classes` cards each, and reshuffled when it is used up; then
each class is split evenly among its holders. Each client thus holds exactly `classes` classes, and the numbers of
holders of any two classes differ by at most one. Examples of a class that no client was dealt (fewer cards than
classes) are left out; otherwise all are used.

Departure: if `classes` does not divide the number of classes, a client's hand can straddle two decks, and
the papers' code may deal it the same class twice. Here the new deck is ordered so that it does not.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from torch import Tensor

from potluck.core.ground.errors import DataError
from potluck.core.ground.fields import Checked, at_least
from potluck.core.ground.rng import Key
from potluck.data.partition._division import check_enough, deal, members_by_class


@dataclass(frozen=True)
class Pathological(Checked):
    """Label skew by a fixed number of classes for each client.

    Attributes:
        classes: how many classes each client holds.
    """

    classes: Annotated[int, at_least(1)] = 2

    def __call__(self, targets: Tensor, clients: int, key: Key) -> list[Tensor]:
        """One part for each client, covering all examples of the classes that were dealt."""
        check_enough(len(targets), clients)
        rng = np.random.default_rng(key.seed)
        members = members_by_class(targets)
        if self.classes > len(members):
            raise DataError(f"classes: {self.classes} a client, but the data have {len(members)}; ask for no more")
        sizes = _split_evenly(members, self._deal_classes(len(members), clients, rng))
        if (sizes.sum(axis=0) == 0).any():
            client = int(np.flatnonzero(sizes.sum(axis=0) == 0)[0])
            raise DataError(
                f"client {client} would get no example: its classes have fewer examples than holders; "
                "ask for fewer clients or more classes a client"
            )
        return deal(members, sizes, rng)

    def _deal_classes(self, num_classes: int, clients: int, rng: np.random.Generator) -> np.ndarray:
        """Which client holds which class, bool (classes, clients)."""
        held = np.zeros((num_classes, clients), dtype=bool)
        deck: list[int] = []
        for client in range(clients):
            hand, deck = deck[: self.classes], deck[self.classes :]
            missing = self.classes - len(hand)
            if missing:
                fresh = [int(label) for label in rng.permutation(num_classes)]
                # Stable sort: classes already in the hand go to the back of the new deck, in its shuffled order.
                fresh.sort(key=hand.__contains__)
                hand, deck = hand + fresh[:missing], fresh[missing:]
            held[hand, client] = True
        return held


def _split_evenly(members: list[np.ndarray], held: np.ndarray) -> np.ndarray:
    """The number of each class for each holder, (classes, clients); the first holders take the remainder."""
    sizes = np.zeros(held.shape, dtype=np.int64)
    for row, indices in enumerate(members):
        holders = np.flatnonzero(held[row])
        if len(holders):
            share, remainder = divmod(len(indices), len(holders))
            sizes[row, holders] = share + (np.arange(len(holders)) < remainder)
    return sizes
