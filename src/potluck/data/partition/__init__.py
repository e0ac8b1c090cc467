"""Ways to divide a training set among clients: one file for each scheme, found by file name.

Give the scheme's parameters to its class, then the labels, the number of clients and a key to the object:
`get_partition("dirichlet")(alpha=0.3)(targets, 20, key)`. Other distributions add schemes through the
entry-point group `potluck.partitions`.
"""

import importlib
from typing import Protocol

from torch import Tensor

from potluck.core.ground.discovery import matching, module_names, named_file, own_part, plugins, unknown
from potluck.core.ground.rng import Key
from potluck.data.partition._own import of_class, of_function

_GROUP = "potluck.partitions"


class Partition(Protocol):
    """A frozen dataclass of a scheme's parameters that divides examples when called.

    One that ignores labels has `by_label: ClassVar[bool] = False`; only these work for tasks without labels. One with
    `by_owner: ClassVar[bool] = True` is given, in place of targets, whose each example is.
    """

    def __call__(self, targets: Tensor, clients: int, key: Key) -> list[Tensor]:
        """Disjoint, sorted, non-empty int64 indices into `targets`, one tensor for each client.

        Raises:
            DataError: the examples cannot be divided among this many clients in this way.
        """
        ...


def list_partitions(pattern: str = "*") -> list[str]:
    """Names of the schemes that a shell-style pattern selects, without importing them."""
    return matching(sorted({*module_names(__name__), *plugins(_GROUP)}), pattern)


def get_partition(name: str) -> type[Partition]:
    """The class of a scheme, or of what a Python file divides by: `FILE.py:FUNCTION` or `FILE.py:CLASS`.

    A function takes targets (n,), the number of clients and a `Key`, and has its options as arguments by keyword alone.

    Raises:
        ConfigError: no scheme has this name, or the file no such function.
    """
    if named_file(name):
        found = own_part(name, "a function that divides examples")
        return of_class(found, name) if isinstance(found, type) else of_function(found, name)
    if name in module_names(__name__):
        return _only_class(f"{__name__}.{name}")
    offered = plugins(_GROUP)
    if name in offered:
        return offered[name].load()
    raise unknown("partition", name, list_partitions(), "potluck list partitions")


def _only_class(module_name: str) -> type[Partition]:
    """The single class that is defined, not merely imported, in a module."""
    module = importlib.import_module(module_name)
    defined = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module_name]
    if len(defined) != 1:
        names = ", ".join(value.__name__ for value in defined) or "none"
        raise TypeError(f"{module_name}: expected one class, the partition, found {names}")
    return defined[0]
