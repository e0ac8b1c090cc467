"""The model zoo: a family is a module of this package, its variants are the functions in its `VARIANTS`.

    variant(num_classes, input_shape, *, scale=FULL, <options of the family>) -> StagedNet

`input_shape` is (channels, height, width) or (features,). The width of `scale` goes to every hidden layer through
`scale.of`, so the leading slices of a full net fit the narrower one; input channels and the rows of the head keep their
number. Families whose slices are no networks of theirs refuse any width but 1. The depth of `scale` goes to
`potluck.models.contract.of_depth`, which leaves out the last blocks. Installed distributions add
families of their own through the entry-point group `potluck.models`: an entry point names a module that has a
`VARIANTS`. A class or function in your own file is named `path/to/file.py:name`; see `get_model`.
"""

import importlib
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, cast

from potluck.core.ground.discovery import matching, module_names, named_file, objects_given, own_part, plugins, unknown
from potluck.core.ground.errors import ConfigError

if TYPE_CHECKING:
    from potluck.models.contract import StagedNet

_GROUP = "potluck.models"
_NO_FAMILIES = ("contract", "cutnet", "fitting", "initial", "libraries", "split", "stages")


def list_models(pattern: str = "*") -> list[str]:
    """The names of all variants that a shell-style pattern selects, numbers in counting order."""
    return matching(sorted(_variants(), key=_natural), pattern)


def get_model(name: str) -> Callable[..., "StagedNet"]:
    """The function that builds the variant of this name, or what a Python file has: `path/to/nets.py:small`.

    Of other libraries there are `timm:NAME` and `hf:CONFIG.json`, see `potluck.models.libraries`.

    A class or function of a file is called with those of `num_classes`, `input_shape` and `scale` that it takes by
    these names; what else it takes are options.

    Raises:
        ConfigError: no family has such a variant, or the file no such function, or the library is not installed.
    """
    if name in (own := objects_given(_GROUP)):
        return own[name]
    if named_file(name):
        from potluck.core.nets.builders import called_by_name  # loads torch

        build = called_by_name(own_part(name, "a function that builds a network"), name)
        return cast("Callable[..., StagedNet]", build)  # any network, which those ask about that split it
    if ":" in name:
        from potluck.models.libraries import library_model  # loads torch

        if (found := library_model(name)) is not None:
            return cast("Callable[..., StagedNet]", found)
    variants = _variants()
    if name not in variants:
        raise unknown("model", name, variants, "potluck list models")
    return variants[name]


def image_size(input_shape: tuple[int, ...], smallest: int = 1) -> tuple[int, int]:
    """Channels and shorter side of an image of shape (channels, height, width).

    Raises:
        ConfigError: the shape is not that of an image, or a side is shorter than `smallest`.
    """
    if len(input_shape) != 3:
        advice = "; give grey images an axis for their one channel: x[:, None]" if len(input_shape) == 2 else ""
        raise ConfigError(f"input shape {input_shape}; expected an image (channels, height, width){advice}")
    channels, height, width = input_shape
    if min(height, width) < smallest:
        raise ConfigError(f"image of {height} x {width}; expected at least {smallest} x {smallest} for this model")
    return channels, min(height, width)


def _variants() -> dict[str, Callable[..., "StagedNet"]]:
    found: dict[str, Callable[..., StagedNet]] = {}
    for family in _families():
        if not hasattr(family, "VARIANTS"):
            raise ConfigError(f"model family {family.__name__} has no VARIANTS; expected a dict of functions")
        for name, variant in family.VARIANTS.items():
            if found.setdefault(name, variant) is not variant:
                first = found[name].__module__
                raise ConfigError(f"model {name!r} is in {first} and in {family.__name__}; rename one of them")
    return found


def _families() -> Iterator[ModuleType]:
    for name in module_names(__name__):
        if name not in _NO_FAMILIES:
            yield importlib.import_module(f"{__name__}.{name}")
    for point in plugins(_GROUP).values():
        yield point.load()


def _natural(name: str) -> list[str | int]:
    # The parts alternate between text and digits, so like meets like when two names are compared.
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
