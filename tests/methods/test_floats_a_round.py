"""Table 5 of FedTGP's paper: how many numbers cross the wire in a round, counted without any training to speak of.

Zhang, Liu, Hua, Cao. AAAI 2024. https://arxiv.org/abs/2401.03230. Twenty clients, CIFAR-100, features of width 512.
LG-FedAvg 2.05 M, FML 36.99 M, FD 0.29 M, FedProto and FedTGP 1.48 M.

The table's 33.04 M for FedKD cannot be counted: in HtFLlib's code it depends on the singular values of trained weights,
and is 42.3 M before any training.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from potluck.core.federation import Federation, Site, empty_like
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fd import FD
from potluck.methods.fedproto import FedProto
from potluck.methods.fedtgp import FedTGP
from potluck.methods.fml import FML
from potluck.methods.lgfedavg import LGFedAvg
from potluck.models.contract import StagedNet

CLIENTS, CLASSES, WIDTH = 20, 100, 512
PRESENT = [44 + id % 2 for id in range(CLIENTS)]  # classes by client, 890 in all
FLOAT, INTEGER, FLAG = 4, 8, 1
NONE = LocalTraining("sgd", lr=0.0, batch_size=CLASSES)


def net():
    return StagedNet({"stem": nn.Linear(2, 4), "deep": nn.Linear(4, WIDTH)}, nn.Linear(WIDTH, CLASSES))


@pytest.fixture
def federation():
    """Of each class that a client has, one example."""
    sites = {}
    for id, present in enumerate(PRESENT):
        data = Examples(torch.ones(present, 2), (torch.arange(present) + 7 * id) % CLASSES)
        sites[id] = Site(id, "net", data, data, data)
    return Federation(sites, {"net": net}, "net", num_classes=CLASSES)


def traffic(play, method, federation):
    """Of the second round, since there is nothing to send in the first."""
    return play(method, federation, rounds=2).reports[1].traffic


def test_lg_fedavg_sends_the_2_05_million_of_the_table_to_the_float(play, federation):
    found = traffic(play, LGFedAvg(NONE), federation)
    sent = found.down["shared"] + found.up["shared"]
    assert sent == 2 * CLIENTS * (WIDTH + 1) * CLASSES * FLOAT
    assert round(sent / FLOAT / 1e6, 2) == 2.05
    assert found.up["examples"] == CLIENTS * INTEGER  # not in the table: one number a client


@pytest.mark.parametrize("method", [FedProto(NONE), FedTGP(NONE, replace(NONE, batch_size=10, steps=1))])
def test_fedproto_and_fedtgp_send_the_1_48_million_of_the_table(play, federation, method):
    # Down go all prototypes, 1.024 M numbers; up those of the classes that each client has. The table's rest, 0.456 M,
    # is 881 to 900 such prototypes, 44 or 45 classes a client: the paper does not say how many its partition has.
    found = traffic(play, method, federation)
    flags, counts = CLIENTS * CLASSES * FLAG, CLIENTS * CLASSES * INTEGER  # not in the table
    down, up = found.down["prototypes"] - flags, found.up["prototypes"]
    assert down == CLIENTS * CLASSES * WIDTH * FLOAT
    assert up == sum(PRESENT) * WIDTH * FLOAT
    assert round((down + up) / FLOAT / 1e6, 2) == 1.48
    assert {round((CLIENTS * CLASSES + present) * WIDTH / 1e6, 2) for present in (881, 900)} == {1.48}
    assert {round((CLIENTS * CLASSES + present) * WIDTH / 1e6, 2) for present in (880, 901)} == {1.47, 1.49}
    assert found.up["counts"] == counts


def test_fd_sends_the_0_29_million_of_the_table(play, federation):
    # As above, of a hundred numbers a class: with 890 classes 289 000.
    found = traffic(play, FD(NONE), federation)
    down, up = found.down["averages"] - CLIENTS * CLASSES * FLAG, found.up["means"]
    assert down == CLIENTS * CLASSES * CLASSES * FLOAT
    assert up == sum(PRESENT) * CLASSES * FLOAT
    assert (down + up) // FLOAT == 289_000
    assert found.up["labels"] == sum(PRESENT) * INTEGER  # not in the table


@pytest.mark.slow
def test_fml_sends_the_36_99_million_of_the_table_to_the_float(play):
    found = traffic(play, FML(replace(NONE, steps=1)), of_images())
    floats = (found.down["common"] + found.up["common"]) // FLOAT
    assert floats == 2 * CLIENTS * 924_708 == 36_988_320


def cnn():
    """The smallest of the paper's families, the common net."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1600, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)),
    )


def tiny():
    return nn.Sequential(nn.AvgPool2d(16), nn.Flatten(), nn.Linear(12, CLASSES))


def of_images():
    data = Examples(torch.zeros(1, 3, 32, 32), torch.zeros(1, dtype=torch.int64))
    sites = {id: Site(id, "tiny", data, empty_like(data), empty_like(data)) for id in range(CLIENTS)}
    return Federation(sites, {"tiny": tiny, "cnn": cnn}, "cnn", num_classes=CLASSES)
