"""What the conformance suite does not ask of networks that are cut by their dataflow: see `cuts_any_network_alike`."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError
from potluck.core.needs import Need, Offer
from potluck.core.nets.splitting import Splits
from potluck.models import list_models
from potluck.models.contract import STAGES, StagedNet
from potluck.models.split import feature_shapes, split
from potluck.parts.heads import COMMON_HEAD, COMMON_WIDTH, SERVERS_HEAD, WHOLE_HEAD

EXACTLY = {"rtol": 0, "atol": 0}


class Plain(nn.Module):
    """A net of a user's, whose head is a convolution or a layer, or followed by another function."""

    def __init__(self, head="linear", width=6):
        super().__init__()
        self.conv1, self.norm, self.conv2 = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, width, 3)
        self.classes = nn.Conv2d(width, 3, 1) if head == "convolution" else nn.Linear(width, 3)
        self.kind = head

    def forward(self, x):
        x = F.relu(self.norm(self.conv1(x)))
        x = F.adaptive_avg_pool2d(F.relu(self.conv2(x)), 1)
        if self.kind == "convolution":
            return self.classes(x).flatten(1)
        return self.classes(x.flatten(1)) * (0.5 if self.kind == "scaled" else 1.0)


def made(*given, **options):
    torch.manual_seed(0)
    return Splits((2, 8, 8), real_inputs=True).remember(Plain(*given, **options), ("plain", *given))


def images():
    return torch.randn(5, 2, 8, 8, generator=torch.Generator().manual_seed(1))


def offer(**architectures):
    return Offer(architectures, dict(enumerate(architectures)), next(iter(architectures)), False, (), None, (2, 8, 8))


@pytest.mark.parametrize("head", ["linear", "convolution", "scaled"])
def test_split__all_parts_and_ways_through_them_agree(head):
    net = made(head).eval()
    parts = split(net)
    s_in, s_out, outputs = parts.passed(images())
    assert_close(outputs, net(images()), **EXACTLY)
    assert_close(parts.extractor(images()), s_in, **EXACTLY)
    assert_close(parts.intermediate(s_in), s_out, **EXACTLY)
    assert_close(parts.features(images()), s_out, **EXACTLY)
    assert_close(parts.classifier(s_out), outputs, **EXACTLY)
    assert feature_shapes(net, (2, 8, 8)) == (s_in.shape[1:], s_out.shape[1:]) == ((4, 6, 6), (6,))
    assert (parts.num_features, parts.channel_axis(3), parts.channel_axis(1)) == (6, 0, 0)


def test_split__every_tensor_is_of_one_part():
    parts = split(made())
    assert parts.intermediate_names == {"conv2.weight", "conv2.bias"}
    assert parts.last_names() == {"classes.weight", "classes.bias"}
    assert parts.last_names(1) == {"classes.weight", "classes.bias", "conv2.weight", "conv2.bias"}
    assert parts.last_names(2) == set(made().state_dict())


def test_split__levels_are_what_stages_put_out_and_go_on_from_each():
    net = made().eval()
    levels, outputs = split(net).levels(images())
    assert [tuple(h.shape[1:]) for h in levels] == [(4, 6, 6), (6,)]
    for number, h in enumerate(levels, start=1):
        assert_close(split(net).resumed(h, number), outputs, **EXACTLY)


@pytest.mark.parametrize(
    ("head", "problem"),
    [
        ("linear", None),
        ("convolution", r"what comes behind <classes reads features of shape \(6, 1, 1\)"),
        ("scaled", None),
    ],
)
def test_split__a_head_is_taken_out_where_it_reads_a_row(head, problem):
    net = made(head)
    parts = split(net)
    if problem is None:
        assert parts.head_problem() is None
        assert parts.head_name == ("" if head == "scaled" else "classes")
        assert set(map(id, parts.head.parameters())) == set(map(id, net.classes.parameters()))
        return
    with pytest.raises(ConfigError, match=f"^the head of Plain cannot be taken out: {problem}$"):
        parts.head  # noqa: B018


def test_needs__of_networks_without_stages():
    assert all(need.problem(offer(a=Plain, b=Plain)) is None for need in (Need.SPLIT_MODEL, COMMON_WIDTH, COMMON_HEAD))
    assert STAGES.problem(offer(a=Plain)) is None
    maps = offer(a=Plain, b=lambda: Plain("convolution"))
    assert (WHOLE_HEAD.problem(maps) or "").startswith("the head of b cannot be taken out: what comes behind")
    assert "widths differ: a 6, b 7" in (COMMON_WIDTH.problem(offer(a=Plain, b=lambda: Plain(width=7))) or "")
    line = offer(a=lambda: nn.Sequential(nn.Flatten(), nn.Linear(128, 3)))
    assert (Need.SPLIT_MODEL.problem(line) or "").startswith("a: Sequential cannot be split into extractor, interm")
    other = Offer(
        {"a": Plain, "s": partial(Plain, "convolution")}, {0: "a"}, server_architecture="s", public=False,
        unvalidated=(), input_shape=(2, 8, 8),
    )  # fmt: skip
    assert "and that of s cannot be taken out" in (SERVERS_HEAD.problem(other) or "")


def test_split__is_no_model_of_the_zoo():
    assert not [name for name in list_models() if "split" in name]


def test_split__a_staged_network_is_cut_by_its_stages_whatever_its_dataflow():
    net = StagedNet(
        {"one": nn.Linear(4, 4), "two": nn.ReLU(), "three": nn.Linear(4, 4)}, nn.Linear(4, 3), extractor_stages=2
    )
    Splits((4,), real_inputs=True).remember(net, ("staged",))
    x = torch.randn(3, 4)
    assert_close(split(net).extractor(x), net.stages[1](net.stages[0](x)), **EXACTLY)


def test_split__a_users_class_with_a_cut_of_its_own_is_cut_by_its_dataflow():
    class Cutting(Plain):
        def cut(self):
            """Nothing that Potluck asks for."""

    assert Need.SPLIT_MODEL.problem(offer(a=Cutting)) is None
