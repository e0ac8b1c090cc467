"""Nets of users that cannot be trained or cut, through the command: one line each, which says what to do."""

import pytest

NETS = """
import random

import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(16, num_classes)
        self.calls = 0

    def features(self, x):
        return F.relu(self.second(F.relu(self.first(x.flatten(1)))))

    def forward(self, x):
        return self.last(self.features(x))


class BatchWritten(Net):
    def forward(self, x):
        return super().forward(x.reshape(32, -1))


class Functions(nn.Module):
    def forward(self, x):
        return x.flatten(1)[:, :10] * 2


class Parameters(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(64, 16) / 8), nn.Parameter(torch.randn(16, num_classes))

    def forward(self, x):
        return (x.flatten(1) @ self.w1).relu() @ self.w2


class TwoHeads(Net):
    def forward(self, x):
        return super().forward(x), super().forward(x)


class Draws(Net):
    def forward(self, x):
        return self.last(self.features(x) * random.random())


class DrawsByTorch(Net):
    def forward(self, x):
        h = self.features(x)
        return self.last(h + 0.1 * torch.randn_like(h))


class Counts(Net):
    def forward(self, x):
        self.calls += 1
        return self.last(self.features(x) * min(1.0, self.calls / 100))


class CountsOnly(Net):
    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Prints(Net):
    def forward(self, x):
        print("forward of", x.shape)
        return super().forward(x)
"""
SPLIT = "cannot be split into extractor, intermediate layers and classifier: "
AGAIN = "puts out something else when it is called again with the same inputs in evaluation mode; expected outputs that"


@pytest.fixture
def nets(tmp_path):
    (tmp_path / "nets.py").write_text(NETS)
    return tmp_path / "nets.py"


def run(potluck, nets, name, method):
    model = f"federation.models=['{nets}:{name}']"
    return potluck(f'run {method} federation.dataset=digits "{model}" run.rounds=1 federation.clients=2 --to runs')


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedproto"])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("BatchWritten", ": write x.shape[0] in place of 32"),
        ("Functions", "Functions has no weights; expected layers, such as nn.Linear, that learn"),
        ("TwoHeads", "return the logits alone"),
        ("Draws", AGAIN),
        ("Counts", AGAIN),
    ],
)
def test_a_net_that_cannot_be_trained_is_refused_before_a_round(potluck, nets, tmp_path, name, method, expected):
    outcome = run(potluck, nets, name, method)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.count("\n") == 1, outcome.err
    assert expected in outcome.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("BatchWritten", f"{SPLIT}its forward cannot be followed: RuntimeError: "),
        ("Functions", "Functions has no weights"),
        ("Parameters", f"{SPLIT}it has no modules, between which it could be cut; make its layers modules"),
        ("TwoHeads", f"{SPLIT}it puts out tuple; expected a tensor: return the logits alone"),
        ("Draws", f"{SPLIT}it {AGAIN}"),
        ("Counts", f"{SPLIT}it {AGAIN}"),
    ],
)
def test_a_net_that_cannot_be_cut_is_inspected_in_one_line(potluck, nets, name, expected):
    outcome = potluck(f"inspect {nets}:{name} --shape 1x8x8")
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert expected in outcome.err


@pytest.mark.parametrize("name", ["DrawsByTorch", "CountsOnly"])
def test_what_changes_no_outputs_or_draws_by_torch_is_in_order(potluck, nets, name):
    assert potluck(f"inspect {nets}:{name} --shape 1x8x8").code == 0


def test_what_forward_prints_is_not_printed_while_it_is_looked_at(potluck, nets):
    outcome = potluck(f"inspect {nets}:Prints --shape 1x8x8")
    assert outcome.code == 0
    assert "forward of" not in outcome.out


@pytest.mark.slow
def test_a_net_of_parameters_alone_is_averaged_and_not_split(potluck, nets):
    assert run(potluck, nets, "Parameters", "fedavg").code == 0
    assert "it has no modules" in run(potluck, nets, "Parameters", "fedproto").err
