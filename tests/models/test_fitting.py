"""Features of one width: what every network's head reads once `federation.feature_width` is set."""

from functools import partial

import pytest
import torch
from torch import Size, nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError, PotluckWarning
from potluck.core.ground.inputs import Form
from potluck.core.ground.rng import Key, isolated
from potluck.core.needs import Need, Offer
from potluck.core.nets.scale import FULL, Cuts, Scale, built, cutting_at, takes_scale
from potluck.core.nets.slicing import NoSlices
from potluck.core.nets.splitting import Splits, plan_of
from potluck.core.nets.weights import weights_of
from potluck.experiment.federation.assemble import builder_of
from potluck.experiment.settings.schema import ModelSpec
from potluck.models import get_model, list_models
from potluck.models.contract import STAGES, Exit, GlobalPool, StagedNet, linear_exit, place_shapes, with_exits
from potluck.models.fitting import FeatureFit, fitted
from potluck.models.split import split

CLASSES, SHAPE, WIDTH = 3, (2, 8, 8), 10
EXACTLY = {"rtol": 0, "atol": 0}
KINDS = pytest.mark.parametrize("kind", ["linear", "pool"])


class Plain(nn.Module):
    """A network as users write it."""

    def __init__(self, head=None, reads=6):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 6, 3)
        self.classes = head or nn.Linear(reads, CLASSES)

    def forward(self, x):
        return self.classes(self.conv2(self.conv1(x).relu()).relu().mean((2, 3)))


class Asks(Plain):
    """Looks at its head."""

    def forward(self, x):
        h = self.conv2(self.conv1(x).relu()).relu().mean((2, 3))
        return self.classes(h.view(-1, self.classes.in_features))


class Tied(nn.Module):
    """Its head's matrix is also that of a layer."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.out = nn.Linear(8, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.out.weight = self.inner.weight

    def forward(self, x):
        return self.out(self.inner(self.first(x).relu()).relu())


class ByPosition(nn.Module):
    """One output for each position."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.out(self.second(self.first(x).relu()).relu())


class Positions(nn.Module):
    """Reads real numbers, and a table of positions."""

    def __init__(self):
        super().__init__()
        self.at, self.first, self.out = nn.Embedding(5, 6), nn.Linear(4, 6), nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.out((self.first(x) + self.at(torch.arange(5))).relu().mean(1))


class Own(StagedNet):
    """A staged network with a forward of its own."""

    def forward(self, x):
        return super().forward(x) * 2


def zoo(name, **options):
    return partial(get_model(name), CLASSES, SHAPE, **options)


NETS = {
    "resnet": zoo("resnet10", width=4),
    "cnn": zoo("cnn2", width=4),
    "mlp": zoo("mlp2", width=12),
    "plain": Plain,
}
every_net = pytest.mark.parametrize("name", NETS)


def fits(builder, kind="linear", shape=SHAPE, width=WIDTH):
    return fitted(builder, FeatureFit(width, kind), CLASSES, shape, "model net")


def made(builder, scale=FULL, shape=SHAPE, seed=0):
    """A net as a federation builds it."""
    with isolated(Key(("net", seed))):
        return built(builder, scale, "net", Cuts(shape), Splits(shape, None))


def images(count=5):
    return torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(0))


@every_net
@KINDS
def test_fitted__features_are_of_the_width_and_a_linear_head_reads_them(name, kind):
    net = made(fits(NETS[name], kind)).eval()
    parts, x = split(net), images()
    assert parts.features(x).shape == (5, WIDTH)
    assert (parts.num_features, parts.head_problem()) == (WIDTH, None)
    assert type(parts.head) is nn.Linear
    assert parts.head.weight.shape == (CLASSES, WIDTH)
    assert parts.feature_shapes(SHAPE)[1] == Size([WIDTH])
    assert_close(parts.head(parts.features(x)), net(x), **EXACTLY)
    assert_close(parts.classifier(parts.intermediate(parts.extractor(x))), net(x), **EXACTLY)


@every_net
@KINDS
def test_fitted__all_else_keeps_its_names_and_values(name, kind):
    before, after = made(NETS[name]), made(fits(NETS[name], kind))
    head = split(before).head_name
    rest = {key: value for key, value in weights_of(before).items() if not key.startswith(f"{head}.")}
    found = weights_of(after)
    assert all(torch.equal(found[key], value) for key, value in rest.items())
    new = {"feature_fit.weight", "feature_fit.bias"} if kind == "linear" else set[str]()
    new |= {"head.weight", "head.bias"}
    assert found.keys() - rest.keys() == {f"classes.{key}" if name == "plain" else key for key in new}


@every_net
def test_fitted__pool_is_torchs_on_the_features_as_they_were(name):
    x, before = images(), made(NETS[name]).eval()
    after = made(fits(NETS[name], "pool")).eval()
    assert_close(split(after).features(x), F.adaptive_avg_pool1d(split(before).features(x), WIDTH), **EXACTLY)


@every_net
def test_fitted__linear_learns(name):
    net = made(fits(NETS[name]))
    before = weights_of(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    F.cross_entropy(net(images()), torch.arange(5) % CLASSES).backward()
    optimizer.step()
    moved = {key for key, value in weights_of(net).items() if not torch.equal(value, before[key])}
    assert {key.rpartition("feature_fit.")[2] for key in moved if "feature_fit." in key} == {"weight", "bias"}


@every_net
def test_fitted__a_seed_gives_the_same_weights_whether_or_not_the_net_was_looked_at_before(name):
    builder = fits(NETS[name])
    first, again, new = made(builder), made(builder), made(fits(NETS[name]))
    assert all(torch.equal(value, weights_of(again)[key]) for key, value in weights_of(first).items())
    assert all(torch.equal(value, weights_of(new)[key]) for key, value in weights_of(first).items())
    assert not torch.equal(split(first).head.weight, split(made(builder, seed=1)).head.weight)


def test_fitted__the_two_parts_of_a_staged_net_stay_where_they_were():
    def staged():
        return StagedNet({n: nn.Linear(8, 8) for n in "abc"}, nn.Linear(8, CLASSES), extractor_stages=2)

    after = made(fits(staged, shape=(8,)), shape=(8,))
    assert (after.extractor_stages, type(after.own_pool)) == (2, GlobalPool)
    assert split(after).intermediate_names == {
        "stages.c.weight", "stages.c.bias", "feature_fit.weight", "feature_fit.bias"
    }  # fmt: skip
    fewer = after.with_stages({"a": nn.Linear(8, 8)})
    assert {"feature_fit.weight", "head.weight"} <= fewer.state_dict().keys()
    exits = {"a": linear_exit(after, place_shapes(after, (8,))["a"], CLASSES)}
    outputs = with_exits(after, exits).exit_outputs(torch.zeros(2, 8))
    assert_close(outputs["head"], after(torch.zeros(2, 8)), **EXACTLY)


def test_fitted__a_head_of_several_layers_that_the_user_cuts_off_goes_as_a_whole():
    def head():
        return nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, CLASSES))

    builder = cutting_at(partial(lambda: Plain(head())), ("conv1", "classes"))
    net = made(fits(builder))
    assert (split(net).head_name, split(net).num_features) == ("classes.head", WIDTH)
    assert plan_of(net).extractor.path == "conv1"
    assert net.classes.feature_fit.in_features == 6


def test_fitted__a_head_that_a_net_has_under_two_names_is_replaced_under_both():
    def twice():
        net = Plain()
        net.fc = net.classes
        return net

    net = made(fits(twice))
    assert net.fc is net.classes
    assert set(weights_of(net)) == set(weights_of(made(fits(Plain))))


def test_fitted__a_net_that_embeds_positions_reads_real_numbers_all_the_same():
    net = made(fits(Positions, shape=(5, 4)), shape=(5, 4))
    assert net(torch.randn(2, 5, 4)).shape == (2, CLASSES)
    assert net.out.feature_fit.weight.shape == (WIDTH, 6)


def test_fitted__inputs_may_have_names():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Linear(2, 6)
            self.both, self.out = nn.Linear(6, 6), nn.Linear(6, CLASSES)

        def forward(self, left, right):
            return self.out(self.both(self.a(left) + self.b(right)).relu())

    shape = {"left": Form((4,), torch.float32), "right": Form((2,), torch.float32)}
    net = made(fits(Named, shape=shape), shape=shape)
    inputs = {"left": torch.zeros(3, 4), "right": torch.zeros(3, 2)}
    assert split(net).passed(inputs).s_out.shape == (3, WIDTH)


@KINDS
def test_fitted__stages_with_an_output_for_each_position_have_features_of_the_width_at_each(kind):
    def tokens():
        stages = {"one": nn.Linear(4, 6), "two": nn.ReLU()}
        return StagedNet(stages, nn.Linear(6, CLASSES), pool=nn.Identity())

    net = made(fits(tokens, kind, shape=(5, 4)), shape=(5, 4))
    assert split(net).features(torch.zeros(2, 5, 4)).shape == (2, 5, WIDTH)
    assert net(torch.zeros(2, 5, 4)).shape == (2, 5, CLASSES)


def with_an_exit():
    return StagedNet({"a": nn.Linear(8, 8)}, exits={"a": Exit(nn.Identity(), nn.Linear(8, CLASSES))})


def of_maps():
    return StagedNet({"a": nn.Conv2d(2, 4, 3)}, nn.Conv2d(4, CLASSES, 3), nn.Identity(), num_features=4)


def own_forward():
    return Own({"a": nn.Linear(8, 8)}, nn.Linear(8, CLASSES))


@pytest.mark.parametrize(
    ("builder", "shape", "expected"),
    [
        (Asks, SHAPE, "its head, classes, cannot be replaced: .*has no attribute 'in_features'"),
        (partial(Plain, nn.Conv1d(6, CLASSES, 1)), SHAPE, "its head is not known"),
        (Tied, (8,), r"its head cannot be replaced: its inner\.weight is used before it, too"),
        (ByPosition, (5, 4), r"its head cannot be replaced: out reads features of shape \(5, 6\)"),
        (partial(nn.Linear, 8, CLASSES), (8,), "its head is not known: no layer with weights"),
        (with_an_exit, (8,), "it has exits, which have features of their own: a;"),
        (own_forward, (8,), "its class, Own, has a forward of its own"),
        (of_maps, SHAPE, r"features of shape \(4, 6, 6\); expected 4 in a row"),
    ],
)
def test_fitted__refuses_in_one_line_what_has_no_head_to_replace(builder, shape, expected):
    with pytest.raises(ConfigError, match=expected) as found:
        fits(builder, shape=shape)
    text = str(found.value)
    assert text.startswith("model net: its features cannot be brought to federation.feature_width: ")
    assert text.endswith("; choose another model, or leave feature_width out")
    assert "\n" not in text


def test_fitted__refuses_a_fit_that_memory_cannot_hold(monkeypatch):
    monkeypatch.setattr("potluck.core.ground.machine.available_bytes", lambda: 10_000)
    fits(Plain, width=50)
    with pytest.raises(ConfigError, match=r"^model net: its feature fit and head: .*; make federation\.feature_w"):
        fits(Plain, width=500)


@pytest.mark.parametrize("name", ["cnn", "plain"])
def test_fitted__a_narrower_net_has_a_share_of_the_width(name):
    builder = fits(NETS[name])
    assert takes_scale(builder) == takes_scale(NETS[name]) == (name == "cnn")
    narrow = made(builder, Scale(width=0.5))
    assert split(narrow).head.weight.shape == (CLASSES, WIDTH // 2)
    assert Need.WIDTH_SLICES.problem(offer(builder)) is None


@pytest.mark.parametrize("name", ["cnn", "plain"])
def test_fitted__pool_has_no_narrower_nets(name):
    builder = fits(NETS[name], "pool")
    with pytest.raises(NoSlices):
        made(builder, Scale(width=0.5))
    assert "it cuts the width of net, which has no slices: " in (Need.WIDTH_SLICES.problem(offer(builder)) or "")


def test_fitted__a_shallower_net_is_refused():
    problem = Need.DEPTH_PREFIXES.problem(offer(fits(zoo("cnn4", width=4))))
    expected = "it cuts the depth of net: a shallower net has a head of its own; leave out federation.feature_width"
    assert problem == expected


def test_fitted__stages_are_not_trained_apart():
    assert STAGES.problem(offer(NETS["cnn"])) is None
    found = STAGES.problem(offer(fits(NETS["cnn"]))) or ""
    assert "federation.feature_width adds a layer behind them; leave out federation.feature_width" in found


def offer(builder):
    return Offer({"net": builder}, {0: "net"}, "net", public=False, unvalidated=(), input_shape=SHAPE)


def test_fitted__keeps_layers_in_the_mode_of_the_net():
    def frozen():
        net = Plain()
        net.conv1.eval()
        return net

    net = made(fits(frozen))
    assert [name for name, module in net.named_modules() if not module.training] == ["conv1"]


def test_fitting__is_no_model_of_the_zoo():
    assert not [name for name in list_models() if "fit" in name]


@pytest.mark.parametrize("name", ["cnn2", "plain"])
def test_with_a_file_and_its_head_alone_trained_the_fit_is_trained_too(name, tmp_path):
    """The file's network is the body; what is new on it is all that is trained."""
    (tmp_path / "nets.py").write_text(
        "from torch import nn\n\n\ndef plain(num_classes):\n"
        "    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.AdaptiveAvgPool2d(1),"
        " nn.Flatten(), nn.Linear(6, num_classes))\n"
    )
    model = name if name == "cnn2" else f"{tmp_path / 'nets.py'}:plain"
    body = builder_of(ModelSpec(model, {}), 7, SHAPE)()
    torch.save(body.state_dict(), tmp_path / "body.pt")
    spec = ModelSpec(model, {}, weights=str(tmp_path / "body.pt"), train_only=("head",))
    with pytest.warns(PotluckWarning, match="begin as drawn"):
        net = builder_of(spec, CLASSES, SHAPE, FeatureFit(WIDTH))()
    trained = [key for key, weight in net.named_parameters() if weight.requires_grad]
    assert all("feature_fit" in key or key.split(".")[-2] == "head" for key in trained)
    assert len(trained) == 4
    kept = weights_of(body)
    same = [key for key, weight in weights_of(net).items() if key in kept and torch.equal(weight, kept[key])]
    assert len(same) == len(kept) - 2, "all but the head"
