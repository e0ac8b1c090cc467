"""Second computations of methods, one file each: a reference from the paper, and how far the method is from it."""

from pathlib import Path
from types import ModuleType

from evidence.ground import double_precision


def subjects() -> list[str]:
    """The methods that have a file here."""
    files = Path(__file__).parent.glob("*.py")
    return sorted(path.stem for path in files if path.stem not in ("__init__", "__main__", "ground"))


def compared(module: ModuleType) -> list[tuple[str, float]]:
    """What a file compares, and the largest differences, in double precision."""
    with double_precision():
        return list(module.evidence())
