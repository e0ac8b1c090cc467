import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from potluck.core.nets.modes import mode
from potluck.core.nets.scale import Cuts, Scale, built
from potluck.core.nets.slicing import NoSlices, cut_of, incoherent, lies_in
from potluck.core.nets.splitting import Splits
from potluck.models import get_model
from potluck.models.contract import StagedNet
from potluck.parts.submodels import put, select

IMAGE = (3, 8, 8)
WIDTHS = [0.5, 0.25, 1 / 3]
SMALL = {"width": 6}
ZOO = {
    "mlp3": SMALL,
    "mlp2_norm": SMALL,
    "cnn4": SMALL,
    "heterofl_cnn": SMALL,
    "resnet14": SMALL,
    "preresnet18": SMALL,
    "wrn16_1": SMALL,
    "wrn16_2": SMALL,
}
FAMILIES = [pytest.param(name, options, id=name) for name, options in ZOO.items()]
FAMILIES += [
    pytest.param("resnet14_cifar", {**SMALL, "shortcut": "B"}, id="resnet14_cifar-B"),
    pytest.param("preresnet20", {"widths": (6, 12, 24), "variant": "fedepth"}, id="preresnet20-fedepth"),
    pytest.param("mobilenetv2", {}, id="mobilenetv2", marks=pytest.mark.slow),  # it has one width alone
]


class Plain(nn.Module):
    """Convolutions with a residual sum and BatchNorm, flattened and read by a linear layer."""

    def __init__(self, width=8):
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.third = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.hidden = nn.Linear(2 * width * 4, 10)
        self.out = nn.Linear(10, 5)

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        x = x + self.second(x)
        x = F.max_pool2d(F.relu(self.third(x)), 4)
        return self.out(F.dropout(self.hidden(x.view(x.size(0), -1)), 0.5, self.training).relu())


class Gated(nn.Module):
    """Squeeze and excitation, by a mean over positions; a convolution channel by channel; and a gate over halves."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.squeeze, self.excite = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.halves = nn.Conv2d(8, 12, 1)
        self.out = nn.Linear(6, 5)

    def forward(self, x):
        h = self.depthwise(self.conv(x).relu())
        h = h * self.excite(self.squeeze(h.mean((2, 3), keepdim=True)).relu()).sigmoid()
        a, b = self.halves(h).chunk(2, dim=1)
        return self.out((a * torch.sigmoid(b)).amax(dim=(2, 3)))


class Joined(nn.Module):
    """Two branches side by side, then a norm and a convolution over both."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(3, 10, 1)
        self.norm = nn.BatchNorm2d(16)
        self.reads = nn.Conv2d(16, 8, 3)
        self.out = nn.Linear(8, 5)

    def forward(self, x):
        h = self.norm(torch.cat([self.left(x), self.right(x)], 1)).relu()
        return self.out(nn.functional.adaptive_avg_pool2d(self.reads(h), 1).flatten(1))


class Grouped(nn.Module):
    """A convolution in four groups, and norms by group and by example."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.groups = nn.Conv2d(8, 16, 3, groups=4)
        self.norm = nn.GroupNorm(2, 16)
        self.last = nn.Conv2d(16, 6, 1)
        self.alone = nn.InstanceNorm2d(6)
        self.out = nn.Linear(6, 5)

    def forward(self, x):
        h = self.norm(self.groups(self.first(x).relu())).relu()
        return self.out(self.alone(self.last(h)).square().flatten(2).mean(-1))


class Encoder(nn.Module):
    """Patches as tokens behind a learnt one, positions, torch's own encoder layers, and the first token's class."""

    def __init__(self, width=16, heads=4):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 5, width))
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, 5)

    def forward(self, x):
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], dim=1) + self.positions
        return self.out(self.layers(tokens)[:, 0])


class Heads(nn.Module):
    """Tokens, embedded and read by attention that divides its channels into heads itself."""

    def __init__(self, width=12, heads=3, fused=True):
        super().__init__()
        self.heads, self.fused = heads, fused
        self.embedding = nn.Embedding(7, width)
        self.query, self.both = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, 5)

    def forward(self, x):
        h = self.embedding(x)
        batch, tokens, width = h.shape
        q = self.query(h).view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
        k, v = self.both(h).reshape(batch, tokens, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) / 2).softmax(-1)
        found = F.scaled_dot_product_attention(q, k, v) if self.fused else weights @ v
        return self.out(self.norm(h + found.transpose(1, 2).reshape(batch, tokens, width)).mean(1))


SEQUENTIAL = partial(
    nn.Sequential,
    nn.Conv2d(3, 9, 3),
    nn.BatchNorm2d(9),
    nn.ReLU(inplace=True),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(81, 7),
    nn.Tanh(),
    nn.Linear(7, 5),
)
TOKENS = (6,)
COHERENT = {  # slices of these compute what the full net does without the other channels
    "sequential": (lambda: copy.deepcopy(SEQUENTIAL()), IMAGE),
    "residual": (Plain, IMAGE),
    "gated": (Gated, IMAGE),
    "joined": (Joined, IMAGE),
}
NORMED = {  # of these not, since a norm's statistics, or attention's temperature, are of other channels
    "grouped": (Grouped, IMAGE),
    "encoder": (Encoder, IMAGE),
    "heads": (Heads, TOKENS),
    "heads by hand": (partial(Heads, fused=False), TOKENS),
}
OWN = {**COHERENT, **NORMED}


def shapes(net):
    return {name: tuple(tensor.shape) for name, tensor in net.state_dict().items()}


def narrow(build, shape, width):
    return built(build, Scale(width), "own", Cuts(shape), Splits(shape, True))


def inputs(shape, count=3):
    if shape == TOKENS:
        return torch.randint(7, (count, *shape))
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(0)).double()


def untouched(net):
    """The net with every tensor drawn at random, in double precision."""
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in net.double().state_dict().items():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=draws, dtype=torch.float64)
                tensor.copy_(noise.abs() + 0.5 if name.endswith("running_var") else noise)
    return net


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), FAMILIES)
@pytest.mark.parametrize("width", WIDTHS)
def test_cut_of__a_family_of_the_zoo_gives_the_familys_own_narrow_net(name, options, width):
    build = partial(get_model(name), 5, IMAGE, **options)
    found = narrow(lambda: build(), IMAGE, width)
    own = build(scale=Scale(width))
    assert shapes(found) == shapes(own)
    assert all(isinstance(index, slice) for place in lies_in(found).values() for index in place)
    assert found.num_features == own.num_features
    own.load_state_dict(found.state_dict())
    with mode(own, training=False), mode(found, training=False):
        assert torch.equal(found(inputs(IMAGE).float()), own(inputs(IMAGE).float()))


@pytest.mark.parametrize("name", ["resnet20", "preresnet20"])
def test_cut_of__refuses_shortcuts_that_fill_up_by_a_number_of_channels(name):
    build = partial(get_model(name), 5, IMAGE)
    with pytest.raises(NoSlices, match=r"counts on the full number of channels: narrower, layer stages\.\w+.* fails"):
        cut_of(build(), Scale(0.5).of, IMAGE)


@pytest.mark.parametrize("kind", COHERENT)
@pytest.mark.parametrize("width", [0.5, 0.3])
def test_cut_of__a_slice_computes_what_the_full_net_does_without_the_other_channels(kind, width):
    build, shape = COHERENT[kind]
    full, slim = untouched(build()), narrow(build, shape, width).double()
    state, places = dict(full.state_dict()), lies_in(slim)
    assert sum(t.numel() for t in slim.parameters()) < width * 1.5 * sum(t.numel() for t in full.parameters())
    slim.load_state_dict(select(state, places))
    empty = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    full.load_state_dict(put(select(state, places), places, empty))
    with torch.no_grad(), mode(full, training=False), mode(slim, training=False):
        torch.testing.assert_close(slim(inputs(shape)), full(inputs(shape)))


@pytest.mark.parametrize("kind", OWN)
def test_built__a_narrower_net_has_the_full_nets_names_and_values_and_trains(kind):
    build, shape = OWN[kind]
    full = build()
    slim = narrow(lambda: copy.deepcopy(full), shape, 0.5)
    assert list(slim.state_dict()) == list(full.state_dict())
    found, expected = slim.state_dict(), select(full.state_dict(), lies_in(slim))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not {p.data_ptr() for p in slim.parameters()} & {p.data_ptr() for p in full.parameters()}
    batch = inputs(shape)
    slim.train()(batch if shape == TOKENS else batch.float()).square().sum().backward()
    assert all(parameter.grad is not None for parameter in slim.parameters())
    assert str(slim) != str(full)


def test_cut_of__says_in_a_layers_attributes_how_large_it_is():
    slim = narrow(Grouped, IMAGE, 0.5)
    assert (slim.groups.in_channels, slim.groups.out_channels, slim.groups.groups) == (4, 8, 2)
    assert (slim.norm.num_channels, slim.norm.num_groups, slim.alone.num_features) == (8, 2, 3)
    heads = narrow(Encoder, IMAGE, 0.5).layers.layers[0].self_attn
    assert (heads.embed_dim, heads.num_heads, heads.head_dim) == (8, 2, 4)
    assert narrow(Heads, TOKENS, 0.5).norm.normalized_shape == (6,)
    assert narrow(Heads, TOKENS, 0.5).embedding.embedding_dim == 6


def test_cut_of__keeps_whole_groups_of_convolutions_and_whole_heads():
    assert lies_in(narrow(Grouped, IMAGE, 0.3))["groups.weight"][:2] == (slice(0, 8), slice(0, 2))
    place = lies_in(narrow(Encoder, IMAGE, 0.3))["layers.layers.0.self_attn.in_proj_weight"]
    assert place[0].tolist() == [*range(8), *range(16, 24), *range(32, 40)]  # two of four heads of q, k and v
    assert place[1] == slice(0, 8)


def test_cut_of__heads_that_a_net_makes_itself_keep_their_leading_channels():
    places = lies_in(narrow(Heads, TOKENS, 0.5))
    for name, dim in (("query.weight", 0), ("out.weight", 1), ("norm.weight", 0), ("embedding.weight", 1)):
        assert places[name][dim].tolist() == [0, 1, 4, 5, 8, 9]
    assert places["both.weight"][0].tolist() == [0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21]


def test_cut_of__channels_that_an_operation_ties_in_another_order_are_kept_together():
    places = lies_in(narrow(partial(Refused, Do(lambda x: x + x.flip(1))), (4,), 0.5))
    assert places["first.weight"][0].tolist() == places["out.weight"][1].tolist() == [0, 1, 6, 7]


def test_cut_of__of_layers_side_by_side_the_leading_channels_of_each():
    places = lies_in(narrow(Joined, IMAGE, 0.5))
    assert places["norm.weight"][0].tolist() == places["reads.weight"][1].tolist() == [0, 1, 2, 6, 7, 8, 9, 10]


def test_cut_of__tied_weights_stay_tied_and_frozen_ones_frozen():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            self.enter, self.out = nn.Linear(4, 8).requires_grad_(False), nn.Linear(8, 3)
            self.second.weight = self.first.weight

        def forward(self, x):
            h = self.enter(x)
            return self.out(h + self.second(self.first(h).relu()))

    slim = narrow(Tied, (4,), 0.5)
    assert slim.first.weight is slim.second.weight
    assert slim.first.weight.shape == (4, 4)
    assert not slim.enter.weight.requires_grad


def test_cut_of__a_staged_net_of_the_users_own_knows_how_many_features_its_head_reads():
    def build():
        return StagedNet({"a": nn.Linear(4, 8), "b": nn.Sequential(nn.Linear(8, 6), nn.ReLU())}, nn.Linear(6, 3))

    assert narrow(build, (4,), 0.5).num_features == 3


def test_cut_of__every_layer_keeps_a_channel_at_the_smallest_width():
    assert min(min(shape, default=1) for shape in shapes(narrow(Plain, IMAGE, 1e-6)).values()) == 1


class Refused(nn.Module):
    """Two layers, between which something happens."""

    def __init__(self, between, width=8):
        super().__init__()
        self.first, self.between, self.out = nn.Linear(4, width), between, nn.Linear(width, 3)

    def forward(self, x):
        return self.out(self.between(self.first(x)))


class Do(nn.Module):
    """A function as a layer."""

    def __init__(self, do):
        super().__init__()
        self.do = do

    def forward(self, x):
        return self.do(x)


class Own(nn.Module):
    """A matrix of its own."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return x @ self.matrix


class Scaled(Own):
    """A weight that is computed."""

    def forward(self, x):
        return F.linear(x, self.matrix * 2)


class Recurrent(nn.Module):
    """Reads the channels one after the other."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(8, 8, batch_first=True)

    def forward(self, x):
        return self.cell(x[:, None])[0][:, 0]


def overwritten(x):
    y = x.clone()
    y[:, :4] = 0
    return y


@pytest.mark.parametrize(
    ("between", "complaint"),
    [
        (Own(), r"layer between \(Own\) multiplies by a matrix of its own; expected an nn.Linear"),
        (Recurrent(), r"layer between\.cell \(GRU\) calls gru, through which channels are not followed"),
        (Do(lambda x: torch.cumsum(x, 1)), r"layer between \(Do\) calls cumsum, through which channels are not"),
        (Do(overwritten), r"layer between \(Do\) writes into a part of a tensor"),
        (
            Do(lambda x: x.view(len(x), 8)),
            r"counts on the full number of channels: narrower, layer between \(Do\) fails",
        ),
        (Do(lambda x: x + torch.cat([x[:, 4:], x[:, :4]], 1)), r"layer first\.\w+ has other channels in a narrower"),
        (Scaled(), r"layer between \(Scaled\) has a weight that is computed and not a parameter of its own"),
        (Do(lambda x: x * torch.arange(x.shape[1])), "tells channels apart by position"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), r"\(_WeightNorm\) calls weight_norm, through which"),
        (nn.Linear(7, 8), r"layer between \(Linear\) fails on inputs of shape \(2, 4\): RuntimeError: .*mat1 and mat2"),
    ],
)
def test_cut_of__says_which_layer_cannot_be_followed_and_why(between, complaint):
    with pytest.raises(NoSlices, match=complaint):
        cut_of(Refused(between), Scale(0.5).of, (4,))


class Late(nn.Module):
    """A layer that is made in the first call, though nothing that can be followed depends on it."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        self.more = nn.Linear(1, 1)
        return self.head(self.hidden(x).relu())


def test_cut_of__refuses_a_net_that_makes_a_layer_when_it_is_called():
    with pytest.raises(NoSlices, match=r"^Late\.forward makes more\.weight; make it in __init__$"):
        cut_of(Late(), lambda width: width // 2, (6,))


def test_cut_of__refuses_a_net_without_hidden_layers():
    with pytest.raises(NoSlices, match=r"^Linear has no hidden layer whose channels could be left out$"):
        cut_of(nn.Linear(4, 3), Scale(0.5).of, (4,))


def test_built__names_the_architecture_the_layer_and_the_way_out():
    with pytest.raises(NoSlices) as caught:
        built(partial(Refused, Own()), Scale(0.5), "mine", Cuts((4,)), Splits((4,), True))
    assert str(caught.value) == (
        "mine: cannot be built at width 0.5: layer between (Own) multiplies by a matrix of its own; expected an"
        " nn.Linear or an nn.Conv; choose another model, or give its builder a `scale`"
    )


def test_cuts__are_worked_out_once_and_change_no_draw():
    calls = []

    def build():
        calls.append(1)
        return Plain()

    cuts, found = Cuts(IMAGE), []
    for seed in (0, 1, 0):
        torch.manual_seed(seed)
        found.append(built(build, Scale(0.5), "own", cuts, Splits(IMAGE, True)).first.weight)
    assert len(calls) == 3 + 1
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])


def test_incoherent__a_convolution_that_keeps_its_number_of_groups_has_no_leading_slices():
    def build(groups, width=8):
        return nn.Sequential(
            nn.Conv2d(3, width, 3), nn.Conv2d(width, width, 3, groups=groups), nn.Flatten(), nn.Linear(width * 16, 5)
        )

    assert incoherent(build(1), build(1, 4), IMAGE) is None
    assert incoherent(build(8), build(4, 4), IMAGE) is None
    assert incoherent(build(2), build(2, 4), IMAGE) == "1.weight"
