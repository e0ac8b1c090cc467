"""What the programs have in common that measure finished runs."""

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "any_module"))
from torchvision_ops import stand_in


def print_each(about: str, lines_of: Callable[[Path], Iterable[str]]) -> None:
    """Print of each folder that is named on the command line what was measured there, as soon as it is known."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of finished runs")
    torch.set_num_threads(1)
    stand_in()
    for folder in parser.parse_args().runs:
        print(folder.name)
        for line in lines_of(folder):
            print(f"    {line}", flush=True)
