"""Stages of networks without stages; that they give what staged ones do the conformance suite asks of each method."""

import copy

import pytest
import torch
from torch import Size, nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError
from potluck.core.needs import Need, Offer
from potluck.core.nets.batchnorm import batch_norms
from potluck.core.nets.scale import Scale
from potluck.core.nets.slicing import cut_of, lies_in
from potluck.core.nets.splitting import Splits, plan_of
from potluck.models.cnn import cnn4
from potluck.models.contract import STAGES, StagedNet, linear_exit
from potluck.models.cutnet import CutNet
from potluck.models.stages import behind_extractor, exit_outputs, stages_of, with_extractor_of
from potluck.models.vit import vit
from potluck.parts.exits import leading_names, slices_with_exits

from ..own_networks import Encoder

EXACTLY = {"rtol": 0, "atol": 0}
SHAPE = (1, 8, 8)


class Tutorial(nn.Module):
    """As tutorials have it: functions between layers, a parameter of its own, and a dropout that asks for the mode."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.fc1, self.fc2, self.scale = nn.Linear(24, 10), nn.Linear(10, 3), nn.Parameter(torch.ones(6, 1, 1))

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2) * self.scale
        x = F.dropout(x.flatten(1), 0.5, self.training)
        return self.fc2(F.relu(self.fc1(x)))


class Patches(nn.Module):
    """A small transformer, whose modules have names that a network in stages uses."""

    def __init__(self, depth=3):
        super().__init__()
        self.stages, self.places = nn.Conv2d(1, 8, 4, stride=4), nn.Parameter(torch.randn(4, 8))
        self.blocks = nn.ModuleList(Encoder() for _ in range(depth))
        self.pool, self.between = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.stages(x).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return self.between(self.pool(x.mean(1)))


def made(build, *given, cut=()):
    torch.manual_seed(0)
    return Splits(SHAPE, real_inputs=True).remember(build(*given), (build, *given), cut)


def images():
    return torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(1))


def offer(build):
    return Offer({"net": build}, {0: "net"}, "net", public=False, unvalidated=(), input_shape=SHAPE)


def exits_of(whole, *places):
    torch.manual_seed(3)
    return {place: whole.small_exit(whole.shapes(SHAPE)[place], 3) for place in places}


@pytest.mark.parametrize(
    ("build", "stages", "blocks"),
    [
        (Tutorial, {"conv1": "<conv2", "conv2": "<fc1", "fc1": "<fc2"}, ["conv2", "fc1"]),
        (
            Patches,
            {"stages": "<blocks.0", "blocks-0": "blocks.0", "blocks-1": "blocks.1", "blocks-2": "blocks.2"},
            ["blocks-0", "blocks-1", "blocks-2"],
        ),
    ],
)
def test_stages__lie_between_layers_and_no_block_is_cut_inside(build, stages, blocks):
    net = made(build)
    assert {stage.name: str(stage.end) for stage in plan_of(net).stages} == stages
    whole = stages_of(net)
    assert (whole.stages, whole.blocks, list(whole.names())) == ([*stages], blocks, [*stages])
    named = [name for names in whole.names().values() for name in names]
    assert len(named) == len(set(named))
    assert net.state_dict().keys() - set(named) == {
        name for name in net.state_dict() if name.split(".")[0] in ("fc2", "pool", "between")
    }


def test_stages__end_where_the_user_says():
    net = made(Tutorial, cut=("norm1", "<conv2", "conv2", "fc2"))
    assert [str(stage.end) for stage in plan_of(net).stages] == ["norm1", "<conv2", "conv2", "<fc2"]
    with pytest.raises(ConfigError, match="cut: fc1 does not come before conv2"):
        plan_of(made(Tutorial, cut=("conv1", "fc1", "conv2", "fc2")))


def test_stages__rows_have_blocks_of_one_list_and_others_by_the_layers_that_read():
    assert {row: len(blocks) for row, blocks in stages_of(made(Patches)).rows.items()} == {"blocks": 3}
    first, second, _ = stages_of(made(Patches)).rows["blocks"]
    assert first.keys() == second.keys()
    assert (first["wide.bias"], second["wide.bias"]) == ("blocks.0.wide.bias", "blocks.1.wide.bias")
    (conv2, fc1) = stages_of(made(Tutorial)).rows[""]
    assert conv2["0.weight"] == "conv2.weight"
    assert conv2["1.running_mean"] == "norm2.running_mean"
    assert conv2["2.scale"] == "scale"
    assert fc1 == {"0.weight": "fc1.weight", "0.bias": "fc1.bias"}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("build", [Tutorial, Patches])
def test_leading__is_the_networks_own_way_with_the_networks_own_tensors(build, training):
    net = made(build).train(training)
    whole, reference = stages_of(net), copy.deepcopy(net)
    place = whole.blocks[0]
    part = whole.leading(1, exits := exits_of(whole, place))
    end = next(stage.end for stage in plan_of(net).stages if stage.name == place)
    torch.manual_seed(5)
    h, _ = plan_of(net).course.at(reference, images(), end)
    expected = copy.deepcopy(exits[place]).train(training)(h)
    torch.manual_seed(5)
    assert_close(part(images()), expected, **EXACTLY)
    own = {name: tensor for name, tensor in part.state_dict(keep_vars=True).items() if not name.startswith("exits.")}
    names = set().union(*(whole.names()[each] for each in whole.stages[:2]))
    assert own.keys() == names
    assert all(tensor is net.state_dict(keep_vars=True)[name] for name, tensor in own.items())
    assert {name for name in net.state_dict() if name in leading_names(net, 1 / len(whole.blocks))} == names
    for name, buffer in reference.named_buffers():
        if name in names:
            assert_close(net.get_buffer(name), buffer, **EXACTLY)


@pytest.mark.parametrize("build", [Tutorial, Patches])
def test_exit_outputs__are_of_one_pass_and_end_with_the_networks_own(build):
    net = made(build).eval()
    whole = stages_of(net)
    exits = exits_of(whole, *whole.blocks[:-1])
    found = exit_outputs(whole.leading(len(whole.blocks), exits), images())
    assert list(found) == [*whole.blocks[:-1], "head"]
    assert_close(found["head"], net(images()), **EXACTLY)
    for depth, place in enumerate(whole.blocks[:-1], start=1):
        part = whole.leading(depth, {place: exits[place]}).eval()
        assert_close(part(images()), found[place], **EXACTLY)
        assert_close(copy.deepcopy(part)(images()), found[place], **EXACTLY)
    with pytest.raises(TypeError, match=f"{build.__name__} has no exits"):
        exit_outputs(net, images())


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("build", [Tutorial, Patches])
def test_between__stages_one_after_the_other_are_the_network_with_its_gradients_draws_and_buffers(build, training):
    net, parts = (made(build).train(training) for _ in range(2))
    whole = stages_of(parts)
    torch.manual_seed(5)
    expected = net(images())
    torch.manual_seed(5)
    h = images()
    for number in range(len(whole.stages)):
        h = whole.between(number, number + 1)(h)
    found = whole.classifier(h)
    assert_close(found, expected, **EXACTLY)
    for outputs in (found, expected):
        outputs.square().sum().backward()
    for one, other in zip(parts.parameters(), net.parameters(), strict=True):
        assert_close(one.grad, other.grad, **EXACTLY)
    for one, other in zip(parts.buffers(), net.buffers(), strict=True):
        assert_close(one, other, **EXACTLY)


def test_to_outputs__skips_stages_and_to_exit_ends_before():
    net = made(Patches).eval()
    whole, blocks = stages_of(net), net.blocks
    h = whole.between(0, 1)(images())
    skipping = whole.without(1, 3)
    assert skipping.stages == ["stages", "blocks-2"]
    assert_close(skipping.to_outputs(0, 2, 2)(images()), whole.classifier(blocks[2](h)), **EXACTLY)
    assert_close(whole.to_outputs(1, 2, 4, nn.Tanh())(h), whole.classifier(blocks[0](h).tanh()), **EXACTLY)
    (exit,) = exits_of(whole, "blocks-1").values()
    assert_close(whole.to_exit(1, 3, exit.eval()).eval()(h), exit(blocks[1](blocks[0](h))), **EXACTLY)
    assert_close(skipping.to_exit(0, 2, nn.Tanh())(images()), blocks[2](h).tanh(), **EXACTLY)


def test_a_cut_network_has_no_numbers_of_what_is_left_out():
    net = made(Tutorial)
    tail = behind_extractor(net)
    assert {name.split(".")[0] for name in tail.state_dict()} == {"conv2", "norm2", "scale", "fc1", "fc2"}
    assert tail.get_submodule("conv1").weight.is_meta
    assert not net.conv1.weight.is_meta
    assert list(batch_norms(tail)) == ["norm2"]
    assert tail.eval().to(torch.float64).fc1.weight.dtype == torch.float64


def test_with_extractor_of__two_networks_meet_behind_the_extractor():
    own, other = made(Tutorial).eval(), made(Tutorial).eval()
    nn.init.normal_(own.conv1.weight)
    both = with_extractor_of(own, behind_extractor(other))
    other.conv1.load_state_dict(own.conv1.state_dict())
    assert_close(both(images()), other(images()), **EXACTLY)
    staged = StagedNet({"stem": nn.Conv2d(1, 4, 5), "conv": nn.Conv2d(4, 4, 1)}, nn.Linear(4, 3)).eval()
    both = with_extractor_of(staged, behind_extractor(other))
    assert_close(both(images()), behind_extractor(other)(staged.stages.stem(images())), **EXACTLY)


def test_small_exit__is_that_of_a_staged_network_with_such_features():
    assert repr(stages_of(made(Tutorial)).small_exit(Size((4, 4, 4)), 3)) == repr(
        linear_exit(cnn4(3, SHAPE, width=4), Size((4, 4, 4)), 3)
    )
    tokens = stages_of(made(Patches)).small_exit(Size((4, 8)), 3)
    like = linear_exit(vit(3, SHAPE, width=8, patch=4, heads=2), Size((4, 8)), 3)
    assert tokens.body[0].normalized_shape == like.body[0].normalized_shape == (8,)
    assert_close(tokens.body(x := torch.randn(2, 4, 8)), F.layer_norm(x, (8,)).mean(1))
    assert not stages_of(made(Patches)).has_maps(Size((4, 8)))
    assert stages_of(made(Tutorial)).has_maps(Size((4, 4, 4)))


class Joined(nn.Module):
    """What its second stage puts out are two layers' channels side by side, as rows of numbers."""

    def __init__(self):
        super().__init__()
        self.conv1, self.left, self.right = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 3), nn.Conv2d(4, 4, 3)
        self.fc1, self.fc2 = nn.Linear(40, 10), nn.Linear(10, 3)

    def forward(self, x):
        x = self.conv1(x).relu()
        x = F.adaptive_avg_pool2d(torch.cat([self.left(x), self.right(x)], 1), 2)
        return self.fc2(self.fc1(x.flatten(1)).relu())


@pytest.mark.parametrize(("build", "width"), [(Tutorial, 12), (Joined, 20)])
def test_kept_at__is_what_the_next_layer_of_the_narrower_network_reads(build, width):
    net, of = made(build), Scale(width=0.5).of
    place = stages_of(net).blocks[0]
    kept = stages_of(net).kept_at(place, of, SHAPE)
    narrow = Splits(SHAPE, real_inputs=True).remember(
        cut_of(copy.deepcopy(net), of, SHAPE).of(made(build)), ("narrow",)
    )
    positions = torch.arange(2 * width)
    assert torch.equal(positions[kept], positions[lies_in(narrow)["fc1.weight"][1]])
    assert len(positions[kept]) == width
    assert (positions[kept].max() >= width) == (build is Joined)
    whole, part = (
        stages_of(one).leading(1, {place: stages_of(one).small_exit(stages_of(one).shapes(SHAPE)[place], 3)})
        for one in (net, narrow)
    )
    places = slices_with_exits(part, narrow, {place: kept})
    assert torch.equal(positions[places[f"exits.{place}.head.weight"][1]], positions[kept])
    for name, parameter in part.named_parameters():
        found = whole.get_parameter(name)
        for axis, index in enumerate(places[name]):
            found = found.index_select(axis, torch.arange(found.shape[axis])[index])
        assert found.shape == parameter.shape


class Tied(Tutorial):
    """One norm is called in two stages."""

    def __init__(self):
        super().__init__()
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1), self.norm1
        self.fc1, self.scale = nn.Linear(16, 10), nn.Parameter(torch.ones(()))


class Leaving(Tutorial):
    """It has a module called exits."""

    def __init__(self):
        super().__init__()
        self.exits = nn.ModuleList()


class Undecided(nn.Module):
    """Python looks at numbers in the middle, which the last layer needs."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(64, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.first(x.flatten(1))
        x = self.second(x) if x.abs().sum() >= 0 else x
        return self.last(x.relu())


def short():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        (short, "Sequential has one stage, 1: no layer with weights lies between that and the head"),
        (Tied, "Tied reads norm1.bias in two of its stages, conv1 and conv2"),
    ],
)
def test_stages__networks_without_stages_to_tell_apart_are_refused_in_one_line(build, problem):
    found = STAGES.problem(offer(build))
    assert found.startswith(f"net: it trains stages of a network apart, and {problem}; give its parts to")
    assert "\n" not in found
    assert Need.DEPTH_PREFIXES.problem(offer(build)) is None  # STAGES says it
    with pytest.raises(ConfigError, match=problem):
        stages_of(made(build))


def test_exits_and_starts_that_a_network_does_not_allow_are_refused():
    whole = stages_of(made(Leaving))
    with pytest.raises(ConfigError, match="Leaving has a module called exits"):
        whole.leading(1, exits_of(whole, "conv2"))
    net = made(Undecided)
    (place,) = (stage.end for stage in plan_of(net).stages if stage.end.by_value)
    with pytest.raises(ConfigError, match=f"Undecided looks at numbers before {place}, so that it cannot begin there"):
        CutNet(net, start=place)


class Depthwise(nn.Module):
    """Layers of groups, and a buffer that is not saved."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.third, self.fourth = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.fc = nn.Linear(8, 3)
        self.register_buffer("brighter", torch.full((1, 1, 8, 8), 1.5), persistent=False)

    def forward(self, x):
        x = self.second(self.first(x * self.brighter).relu()).relu()
        return self.fc(self.fourth(self.third(x).relu()).relu().mean((2, 3)))


def test_a_network_of_all_its_blocks_has_what_is_not_saved_too():
    net = made(Depthwise)
    found = stages_of(net)
    exits = {place: found.small_exit(found.shapes(SHAPE)[place], 3) for place in found.blocks[:-1]}
    whole = found.leading(len(found.blocks), exits)
    assert_close(whole(images()), net(images()), **EXACTLY)
    assert all(outputs.isfinite().all() for outputs in exit_outputs(whole, images()).values())


def test_what_a_narrower_network_keeps_is_known_where_layers_of_groups_come_later():
    found = stages_of(made(Depthwise))
    assert found.kept_at(found.blocks[0], Scale(0.5).of, SHAPE) == slice(0, 2)
