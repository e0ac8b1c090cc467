"""Natural: every client has the examples of one owner, such as a hospital, a school or a writer."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor

from potluck.core.ground.errors import DataError
from potluck.core.ground.fields import Checked, at_least
from potluck.core.ground.rng import Key
from potluck.data.partition._division import check_enough


@dataclass(frozen=True)
class Natural(Checked):
    """By owner: the clients are the owners with the most training examples, in the order of the owners' numbers.

    Those of equally many come in that order, too. What the data set has of further owners is left out. A client is
    tested on its owner's test examples.

    Attributes:
        min_examples: the fewest training examples of a client.
    """

    by_label: ClassVar[bool] = False
    by_owner: ClassVar[bool] = True

    min_examples: Annotated[int, at_least(1)] = 1

    def __call__(self, targets: Tensor, clients: int, key: Key) -> list[Tensor]:
        """See `Partition`; `targets` are the owners' numbers, int64 (n,)."""
        check_enough(len(targets), clients, self.min_examples)
        counts = targets.bincount()
        if (found := int((counts >= self.min_examples).sum())) < clients:
            raise DataError(
                f"{clients} clients, but {found} owners with at least {self.min_examples} examples each; ask for fewer"
                " clients or lower min_examples"
            )
        largest = counts.argsort(descending=True, stable=True)[:clients].sort().values
        return [(targets == owner).nonzero().flatten() for owner in largest]
