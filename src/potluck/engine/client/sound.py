"""Checks of one client's data for what would silently spoil a run."""

import math
from collections.abc import Iterator

from potluck.core.federation import Federation, Site
from potluck.core.ground.errors import DataError
from potluck.core.ground.inputs import by_name
from potluck.core.requests.examples import Examples
from potluck.core.schema import extremes


def check_site(federation: Federation, site: Site) -> None:
    """Check that a client's inputs are finite and its targets suit the federation's task.

    Raises:
        DataError: they are not or do not.
    """
    for part, examples in data_of(site):
        check_finite(examples, f"client {site.id}: its {part} examples", {})
        whose = f"client {site.id}: the targets of its {part} part"
        federation.task.check_targets(examples.targets, federation.num_classes, whose)


def data_of(site: Site) -> Iterator[tuple[str, Examples]]:
    """A client's examples, each part with what it is called."""
    yield from (("training", site.train), ("validation", site.validation), ("test", site.test))


def check_finite(examples: Examples, whose: str, clean: dict[int, bool]) -> None:
    """Check that inputs are finite.

    Args:
        examples: whose inputs are checked.
        whose: what they are called.
        clean: by id, whether all of a tensor is finite; what was found is added, so that each is read once.

    Raises:
        DataError: some are not.
    """
    for name, inputs in by_name(examples.inputs).items():
        if not inputs.is_floating_point():
            continue
        if id(inputs) not in clean:
            clean[id(inputs)] = not inputs.numel() or all(map(math.isfinite, extremes(inputs)))
        if clean[id(inputs)]:
            continue
        mine = inputs if examples.rows is None else inputs[examples.rows]
        broken = ~mine.flatten(1).isfinite().all(1)
        if bool(broken.any()):
            first, of = int(broken.nonzero()[0]), f" {name!r}" if name else ""
            raise DataError(
                f"{whose} hold NaN or infinity in {int(broken.sum())} of {len(mine)} inputs{of}, first in number"
                f" {first}; expected finite numbers: correct these inputs or leave them out"
            )
