"""`potluck inspect MODEL`, and `cut` in a model's table."""

import pytest

NETS = """
import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self, num_classes, input_shape):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(input_shape[0], 4, 3), nn.Conv2d(4, 6, 3)
        self.middle, self.last = nn.Linear(24, 8), nn.Linear(8, num_classes)

    def forward(self, x):
        x = F.adaptive_avg_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        return self.last(F.relu(self.middle(x.flatten(1))))


class Bag(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.embed, self.hidden, self.out = nn.Embedding(9, 4), nn.Linear(5, 6), nn.Linear(6, num_classes)

    def forward(self, ids, mask, age):
        mask = mask.unsqueeze(-1)
        mean = (self.embed(ids) * mask).sum(1) / mask.sum(1)
        return self.out(self.hidden(torch.cat([mean, age], 1)).relu())


def line(num_classes, input_shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
"""


@pytest.fixture
def nets(tmp_path):
    (tmp_path / "nets.py").write_text(NETS)
    return tmp_path / "nets.py"


def rows(shown):
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.startswith("│")]


def test_it_draws_a_network_of_inputs_with_names(potluck, nets):
    shown = potluck(f"inspect {nets}:Bag --shape ids=7,mask=7,age=1:float32 --tokens --classes 3")
    assert "inputs of ids (7), mask (7), age (1)" in shown.out
    assert rows(shown.out)[:3] == [
        ["extractor", "embed", "5", "36"],
        ["intermediate", "hidden", "6", "36"],
        ["classifier", "out", "outputs", "21"],
    ]


@pytest.mark.parametrize("shape", ["ids=", "=7", "ids=7:text", "ids=7;mask=7"])
def test_it_refuses_shapes_of_inputs_with_names_that_are_none(potluck, nets, shape):
    shown = potluck(f"inspect {nets}:Bag --shape '{shape}'")
    assert shown.code == 2
    assert "shape" in shown.err


def test_it_draws_the_parts_of_any_network_and_the_places_where_it_can_be_cut(potluck, nets):
    shown = potluck(f"inspect {nets}:Net --shape 1x8x8 --classes 3")
    assert shown.code == 0
    assert "Net, inputs of 1 x 8 x 8, 489 weights" in shown.out
    assert rows(shown.out) == [
        ["extractor", "conv1", "4 x 6 x 6 = 144", "40"],
        ["intermediate", "conv2, middle", "8", "422"],
        ["classifier", "last", "outputs", "27"],
        ["conv1", "4 x 6 x 6 = 144", ""],
        ["<conv2", "4 x 6 x 6 = 144", "the extractor ends"],
        ["conv2", "6 x 4 x 4 = 96", ""],
        ["<middle", "24", "stage conv2 ends"],
        ["middle", "8", ""],
        ["<last", "8", "the head reads it"],
    ]
    assert f"to choose: {{name = '{nets}:Net', cut = ['<conv2', 'last']}}" in shown.out
    assert "stages: conv1, conv2, middle\n" in shown.out


def test_it_draws_the_parts_that_the_user_chooses(potluck, nets):
    shown = potluck(f"inspect {nets}:Net --shape 1x8x8 --classes 3 --cut conv2 --cut middle")
    assert [row[:2] for row in rows(shown.out)[:3]] == [
        ["extractor", "conv1, conv2"],
        ["intermediate", ""],
        ["classifier", "middle, last"],
    ]
    shown = potluck(f"inspect {nets}:Net --shape 1x8x8 --classes 3 --cut conv1 --cut '>conv2'")
    assert [row[:2] for row in rows(shown.out)[:3]] == [
        ["extractor", "conv1"],
        ["intermediate", "conv2"],
        ["classifier", "middle, last"],
    ]
    assert "the head cannot be taken out: what comes behind conv2 reads features of shape (6, 4, 4)" in shown.out
    assert "cut = ['conv1', '>conv2']" in shown.out


def test_it_draws_the_stages_that_the_user_chooses_and_says_where_there_is_but_one(potluck, nets):
    shown = potluck(f"inspect {nets}:Net --shape 1x8x8 --classes 3 --cut conv1 --cut '<middle' --cut last")
    assert [row[2] for row in rows(shown.out)[3:]] == [
        "the extractor ends",
        "",
        "",
        "stage conv2 ends",
        "",
        "the head reads it",
    ]
    shown = potluck(f"inspect {nets}:Net --shape 1x8x8 --classes 3 --cut '<middle' --cut last")
    assert "stages: conv1, middle\n" in shown.out
    shown = potluck(f"inspect {nets}:Net --shape 1x8x8 --classes 3 --cut conv2 --cut middle")
    said = "its stages cannot be trained apart: it has one stage, conv1: no layer with weights lies between that and"
    assert said in shown.out


def test_it_draws_a_staged_net_by_its_stages(potluck):
    shown = potluck("inspect mlp2 --shape 8 --classes 3")
    assert [row[0] for row in rows(shown.out)] == ["extractor", "intermediate", "classifier"]
    assert "stages: stem, hidden1" in shown.out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "{nets}:line --shape 1x8x8",
            "Sequential cannot be split into extractor, intermediate layers and classifier: no",
        ),
        ("{nets}:Net --shape 1x8x8 --cut conv2", "--cut: found 1 of them; expected two or more"),
        (
            "{nets}:Net --shape 1x8x8 --cut conv3 --cut last",
            "not everything flows through what 'conv3' puts out; expected",
        ),
        ("{nets}:Net --shape 1x8x8 --cut last --cut conv1", "not everything flows through what 'last' puts out"),
        ("mlp2 --shape 8 --cut a --cut b", "StagedNet is in stages, which say where it is cut; leave out `cut`"),
        ("{nets}:Net fedavg", "fedavg: a model is inspected as it is"),
        ("nonet", "unknown model 'nonet'"),
    ],
)
def test_it_says_in_one_line_what_cannot_be(potluck, nets, words, expected):
    shown = potluck(f"inspect {words.format(nets=nets)}")
    assert shown.code == 2
    assert expected in " ".join(shown.err.split())


@pytest.mark.slow
def test_a_run_cuts_where_the_models_table_says(potluck, nets):
    model = f"{{name='{nets}:Net', cut=['<middle', 'last']}}"
    shown = potluck(f'inspect federation fedproto "federation.models=[{model}]" federation.dataset=digits')
    assert shown.code == 0
    shown = potluck(f'run fedproto "federation.models=[{model}]" run.rounds=1 federation.clients=2 --to runs')
    assert shown.code == 0
    assert "cut=['<middle', 'last']" in shown.out


@pytest.mark.parametrize("cut", ["'conv1'", "['conv1']", "['conv1', 3]", "['a', 'b', 3]"])
def test_a_cut_in_a_models_table_is_two_names_or_more(potluck, nets, cut):
    shown = potluck(f"run fedproto \"federation.models=[{{name='{nets}:Net', cut={cut}}}]\"")
    assert shown.code == 2
    assert "cut: found" in shown.err
    assert "expected two names or more" in " ".join(shown.err.split())
