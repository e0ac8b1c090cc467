"""Groups of test examples, by a column of a table: models do not see them, and nobody is sent them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck.core.federation import ClientId
from potluck.core.ground.errors import ConfigError
from potluck.core.requests.examples import Examples
from potluck.data.datasets import column_of_tests
from potluck.experiment.federation.assemble import columns_of
from potluck.experiment.settings.schema import Experiment

MOST_GROUPS = 20
"""Of more, hardly any has the examples that its numbers would need."""


@dataclass(frozen=True)
class Groups:
    """The values of a column for test examples.

    Attributes:
        column: its name.
        common: of the common test set.
        own: by client, of its own data; none if clients have shares of the common ones.
    """

    column: str
    common: NDArray[Any]
    own: Sequence[NDArray[Any]] = ()

    def of(self, client: ClientId, examples: Examples, *, common: bool) -> NDArray[Any]:
        """The values of a client's test examples, or of those of the common test set that it is tested on."""
        values = self.common if common or not self.own else self.own[client]
        return values if examples.rows is None else values[examples.rows.numpy()]


def groups_by(column: str, experiment: Experiment) -> Groups:
    """The groups of the test examples of an experiment.

    Raises:
        ConfigError: the column has too many different values.
        DataError: the data are no tables, or lack the column.
    """
    config = experiment.federation

    def values(place: str) -> NDArray[Any]:
        return column_of_tests(place, columns_of(experiment, place), column)

    found = Groups(column, values(config.dataset), [values(place) for place in config.data or ()])
    several = np.unique(np.concatenate([found.common, *found.own]))
    if len(several) > MOST_GROUPS:
        raise ConfigError(
            f"{config.dataset}: {column}: found {len(several)} different values, such as {str(several[0])!r}; expected"
            f" at most {MOST_GROUPS} groups: add a column of a few, such as ranges"
        )
    return found
