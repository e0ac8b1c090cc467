from functools import partial

import pytest
import torch
from torch import nn

from potluck.core.ground.errors import ConfigError
from potluck.core.nets.modes import mode
from potluck.core.nets.scale import FULL, Scale
from potluck.core.nets.slicing import Block, Channels
from potluck.models import get_model
from potluck.models.contract import StagedNet
from potluck.parts.channels import Narrowing
from potluck.parts.submodels import leading, put, select

IMAGE = (3, 8, 8)
QUICK = {
    "mlp3": {"width": 6},
    "mlp2_norm": {"width": 6},
    "cnn3": {"width": 6},
    "heterofl_cnn": {"width": 6},
    "resnet14": {"width": 6},
    "resnet14_cifar": {"width": 6},  # shortcuts that fill up with zeros
    "preresnet18": {"width": 6},
    "preresnet20": {"widths": (6, 12, 24)},
    "wrn16_2": {"width": 6},
}
FAMILIES = [*(pytest.param(name, options, id=name) for name, options in QUICK.items())]
FAMILIES += [pytest.param("resnet20", {"width": 6, "shortcut": "B"}, id="resnet20-B")]
FAMILIES += [pytest.param("preresnet20", {"widths": (6, 12, 24), "variant": "fedepth"}, id="preresnet20-fedepth")]
FAMILIES += [pytest.param("mobilenetv2", {}, id="mobilenetv2", marks=pytest.mark.slow)]  # it has one width alone


class Flattened(nn.Module):
    """Two convolutions and two linear layers, the first of which reads a flattened image."""

    def __init__(self, scale=FULL, groups=1):
        super().__init__()
        width = scale.of(8)
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.second = nn.Conv2d(width, 2 * width, 3, stride=4, padding=1, groups=groups)
        self.third = nn.Linear(2 * width * 4, width)
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        h = self.second(self.first(x).relu()).relu()
        return self.head(self.third(h.flatten(1)).relu())


def grouped_norms(scale=FULL):
    """Norms whose statistics no slice shares, but whose channels roll like others."""
    width = scale.of(8)
    stages = {"stem": nn.Sequential(nn.Conv2d(3, width, 3), nn.GroupNorm(2, width), nn.ReLU())}
    return StagedNet(stages, nn.Linear(width, 5))


def shapes_of(net):
    return {name: tensor.shape for name, tensor in net.state_dict().items()}


def untouched(net):
    """The net with every tensor drawn at random, in double precision."""
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in net.double().state_dict().items():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=draws, dtype=torch.float64)
                tensor.copy_(noise.abs() + 0.5 if name.endswith("running_var") else noise)
    return net


def channels(build, rate):
    return Narrowing.to(build(scale=Scale(rate)))(build(), IMAGE)


def gap(build, rate, submodel, training):
    """How far a narrow net's outputs are from those of the full net whose other weights are 0, as a share."""
    full, narrow = untouched(build()), build(scale=Scale(rate)).double()
    state = dict(full.state_dict())
    narrow.load_state_dict(select(state, submodel))
    empty = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    full.load_state_dict(put(select(state, submodel), submodel, empty))
    inputs = torch.randn(3, *IMAGE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with mode(full, training=training), mode(narrow, training=training), torch.no_grad():
        expected, found = full(inputs), narrow(inputs)
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), FAMILIES)
@pytest.mark.parametrize("rate", [0.5, 0.3])
def test_rolling__a_window_computes_what_the_full_net_does_without_the_other_channels(name, options, rate):
    build = partial(get_model(name), 5, IMAGE, **options)
    found = channels(build, rate)
    for offset in (0, 1, 5, 9, 23):  # 5 goes around in the narrowest layer, 9 has left its width behind
        for training in (False, True):
            assert gap(build, rate, found.rolling(offset), training) < 1e-9


@pytest.mark.parametrize("build", [Flattened, partial(get_model("resnet14_cifar"), 5, IMAGE, width=6)])
def test_drawn__channels_agree_wherever_they_are(build):
    found, draws, taken = channels(build, 0.5), torch.Generator().manual_seed(0), set()
    for _ in range(3):
        submodel = found.drawn(draws)
        taken.add(tuple(submodel["head.weight"][1].tolist()))
        assert gap(build, 0.5, submodel, training=False) < 1e-9
    assert len(taken) == 3
    assert gap(build, 0.5, found.rolling(3), training=False) < 1e-9


def test_channels_that_are_not_tied_as_they_should_be_are_noticed():
    # Of nets whose shortcuts fill up with zeros every width would roll by itself, and a flattened image position by
    # position: what `channels_of` looks for is what `gap` sees.
    build = partial(get_model("resnet14_cifar"), 5, IMAGE, width=6)
    full, narrow = shapes_of(build()), shapes_of(build(scale=Scale(0.5)))
    widths = {(size, narrow[name][i]) for name, shape in full.items() for i, size in enumerate(shape)}
    cut = {size: (tuple(range(1000 * size, 1001 * size)), kept) for size, kept in widths if kept < size}
    axes = {
        name: tuple(cut[size][0] if size in cut and narrow[name][i] < size else None for i, size in enumerate(shape))
        for name, shape in full.items()
    }
    blocks = tuple(Block(row, kept, 1, 1, number) for number, (row, kept) in enumerate(cut.values()))
    assert gap(build, 0.5, Channels(full, axes, blocks).rolling(0), training=False) < 1e-9
    assert gap(build, 0.5, Channels(full, axes, blocks).rolling(5), training=False) > 1e-3
    found = {(len(block.channels), block.kept) for block in channels(build, 0.5).blocks}
    assert found == {(6, 3), (12, 6), (24, 12)}  # past a shortcut 6 more of 12, and 12 more of 24


@pytest.mark.parametrize("name", ["heterofl_cnn", "preresnet18", "mlp3"])
def test_rolling__every_layer_has_one_window_of_its_own_width_from_the_offset_on(name):
    build = partial(get_model(name), 5, IMAGE, width=6)
    full, narrow = shapes_of(build()), shapes_of(build(scale=Scale(0.3)))
    for offset in (0, 4, 11):
        for name, place in channels(build, 0.3).rolling(offset).items():
            for index, size, kept in zip(place, full[name], narrow[name], strict=True):
                if kept == size:  # inputs, classes, kernels
                    assert index == slice(0, size)
                else:
                    assert index.tolist() == [(offset + i) % size for i in range(kept)]


@pytest.mark.parametrize("name", ["heterofl_cnn", "resnet14_cifar"])
def test_rolling__in_as_many_rounds_as_there_are_channels_each_is_taken_equally_often(name):
    build = partial(get_model(name), 5, IMAGE, width=4)
    found = channels(build, 0.5)
    taken = {key: torch.zeros(shape[:1]) for key, shape in shapes_of(build()).items()}
    rounds = max(len(counts) for counts in taken.values() if counts.dim() and counts.numel())
    for offset in range(rounds):
        for key, place in found.rolling(offset).items():
            if place:
                taken[key][place[0]] += 1
    for key, place in found.rolling(0).items():
        if place:
            share = 0.5 if isinstance(place[0], torch.Tensor) else 1.0
            assert (taken[key] == rounds * share).all()


@pytest.mark.parametrize("name", ["heterofl_cnn", "resnet14_cifar", "preresnet18"])
def test_leading__slices_agree_from_layer_to_layer_by_themselves(name):
    build = partial(get_model(name), 5, IMAGE, width=6)
    assert gap(build, 0.3, leading(shapes_of(build(scale=Scale(0.3)))), training=True) < 1e-9


def test_channels_of__norms_by_groups_do_not_keep_channels_from_rolling():
    found = channels(grouped_norms, 0.5).rolling(3)
    assert found["stages.stem.1.weight"][0].tolist() == found["head.weight"][1].tolist() == [3, 4, 5, 6]


class Shuffled(Flattened):
    """Its last layer reads channels in an order of its own."""

    def forward(self, x):
        h = self.second(self.first(x).unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2).relu()).relu()
        return self.head(self.third(h.flatten(1)).relu())


@pytest.mark.parametrize("build", [Shuffled, partial(Flattened, groups=2)])
def test_channels_of__refuses_a_net_whose_channels_cannot_change_places(build):
    with pytest.raises(ConfigError, match=r": the channels of its layers cannot change places: .*(third|second)"):
        channels(build, 0.5)


@pytest.mark.parametrize("width", [1 / 16, 1 / 8, 1 / 4])
def test_a_layer_whose_narrow_net_has_only_the_channels_that_a_shortcut_carries(width):
    """Widths 4, 8 and 16 become 1, 1 and 1: nothing is left of the channels behind those that are carried."""
    build = partial(get_model("preresnet20"), 5, IMAGE, widths=(4, 8, 16))
    narrow = build(scale=Scale(width))
    rolled = Narrowing.to(narrow)(build(), IMAGE).rolling(3)
    found = select(build().state_dict(), rolled)
    assert {name: tensor.shape for name, tensor in found.items()} == shapes_of(narrow)
