"""Lets torchvision be imported beside a torch for the CPU.

Its usual wheel is built for CUDA, so that its operators do not load. timm imports torchvision and calls none of them.
When torchvision is imported it registers what they give on tensors without numbers, which needs no more than that
operators of these names exist.
"""

import re
from importlib.util import find_spec
from pathlib import Path

import torch

_REGISTERED = re.compile(r"""register_fake\(["']torchvision::(\w+)["']""")


_held: list[torch.library.Library] = []  # operators are there as long as it is


def stand_in() -> None:
    """Define the operators that torchvision names, unless they load or it is not installed."""
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None or _loads(Path(spec.origin).parent):
        return
    names = _REGISTERED.findall((Path(spec.origin).parent / "_meta_registrations.py").read_text())
    library = torch.library.Library("torchvision", "DEF")
    for name in sorted(set(names)):
        library.define(f"{name}(Tensor x) -> Tensor")
    _held.append(library)


def _loads(folder: Path) -> bool:
    """Whether the operators are there, or can be."""
    for path in folder.glob("_C*.so"):
        try:
            torch.ops.load_library(str(path))
        except OSError:
            return False
    return True
