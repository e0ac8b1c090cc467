"""What tests of nodes without PyTorch share: the files of examples/foreign, and clients' own data as they take them."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from potluck.cli.public import write_public
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.settings.resolve import resolve

EXAMPLES = Path(__file__).parents[3] / "examples/foreign"
sys.path.insert(0, str(EXAMPLES))


@pytest.fixture
def examples():
    """The folder of the reference node."""
    return EXAMPLES


@pytest.fixture
def tree_of():
    """An experiment on digits, a tenth of which are public; clients have a convolutional network or a transformer."""
    models = ["cnn2", {"name": "vit", "patch": 4, "width": 32, "depth": 2, "heads": 2}]

    def tree(method, clients, rounds=2, **options):
        return {
            "federation": {
                "dataset": "digits",
                "public": "holdout",
                "clients": clients,
                "models": models,
                "partition": "iid",
            },
            "method": {"name": method, **options},
            "run": {"rounds": rounds, "tolerate_failures": True},
        }

    return tree


@pytest.fixture
def own_of():
    """By client, a share of the experiment's data, prepared, as a node without PyTorch has it."""

    def arrays(tree, *clients):
        federation = assemble(resolve(tree)).federation
        return {client: _arrays(federation.sites[client]) for client in clients}

    return arrays


def _arrays(site):
    found = {}
    for part, some in (("train", site.train), ("test", site.test)):
        batch = some.unaugmented().batch(torch.arange(len(some)))
        found |= {f"x_{part}": batch.inputs.numpy(), f"y_{part}": batch.targets.numpy()}
    return found


@pytest.fixture
def public_of(tmp_path):
    """The file that `potluck public` writes for an experiment."""

    def written(tree):
        place, table = tmp_path / "public.npz", tmp_path / "experiment.toml"
        table.write_text(resolve(tree).toml())
        write_public(str(table), [], place)
        return place

    return written


@pytest.fixture
def common_of(public_of):
    """Its arrays."""

    def read(tree):
        with np.load(public_of(tree)) as file:
            return dict(file)

    return read
