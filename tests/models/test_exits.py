"""Named exits, and nets that are cut in depth, asked of one variant of every family."""

import inspect
from functools import partial

import pytest
import torch
from torch import Size, Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError
from potluck.core.ground.rng import fold_in, isolated
from potluck.core.nets.modes import held_layers, to_training
from potluck.core.nets.scale import FULL, Scale
from potluck.core.nets.weights import frozen_names, weights_of
from potluck.models import get_model, list_models
from potluck.models.contract import (
    Blocks,
    Exit,
    StagedNet,
    blocks,
    classifier_names,
    linear_exit,
    of_depth,
    place_shapes,
    places,
    with_exits,
)
from potluck.models.split import feature_shapes, split

CLASSES = 3
SHAPE = (2, 8, 8)
EXACTLY = {"rtol": 0, "atol": 0}
SMALL = {"width": 8, "widths": (4, 8, 16), "size": 0.5, "patch": 4}
FAMILIES = ["cnn4", "mlp4", "mnist1d_cnn", "mobilenetv2", "preresnet18", "resnet10", "resnet14_cifar"]
FAMILIES += ["shufflenetv2", "vit", "wrn16_1"]
NARROWER = [name for name in FAMILIES if name not in ("shufflenetv2", "vit")]

every_family = pytest.mark.parametrize("name", FAMILIES)


def build(name: str, scale: Scale = FULL, seed: int = 0) -> StagedNet:
    variant = get_model(name)
    options = inspect.signature(variant).parameters
    small = {option: value for option, value in SMALL.items() if option in options}
    if "patch" in options:
        small["width"] = 12
    with isolated(fold_in(seed, "model")):
        return variant(CLASSES, SHAPE, scale=scale, **small)


def images(seed: int = 0) -> Tensor:
    return torch.randn(4, *SHAPE, generator=fold_in(seed, "images").generator())


def exits_for(net: StagedNet, *at: str, shape: tuple[int, ...] = SHAPE) -> dict[str, Exit]:
    """An exit at each of these places, or behind every block."""
    shapes = place_shapes(net, shape)
    made = {}
    for place in at or blocks(net):
        with isolated(fold_in(0, place)):
            made[place] = linear_exit(net, shapes[place], CLASSES)
    return made


def shapes_of(net: nn.Module) -> dict[str, Size]:
    return {name: tensor.shape for name, tensor in net.state_dict().items()}


def some_depths(net: StagedNet) -> list[int]:
    """The smallest, a middle one, and the largest at which a block is left out."""
    count = len(blocks(net))
    return sorted({1, count // 2, count - 1} - {0})


# Depth


def test_families__all_are_here():
    assert {get_model(name).__module__ for name in FAMILIES} == {get_model(name).__module__ for name in list_models()}


@every_family
def test_depth__a_shallower_net_is_the_leading_part_of_the_deeper_one(name):
    full = build(name)
    shapes, whole = place_shapes(full, SHAPE), weights_of(full)
    for depth in some_depths(full):
        shallow, place = build(name, Scale(depth=depth)), blocks(full)[depth - 1]
        own = {key: tensor for key, tensor in weights_of(shallow).items() if not key.startswith("exits.")}
        assert_close(own, {key: whole[key] for key in own}, **EXACTLY)
        assert 0 < len(own) < len(whole)
        assert list(shallow.exits) == [place]
        assert places(shallow)[-1] == place
        assert place_shapes(shallow, SHAPE) == {p: shapes[p] for p in places(shallow)}
        assert shallow(images()).shape == (4, CLASSES)


@every_family
def test_depth__nets_with_exits_are_nested_whole(name):
    full = build(name)
    deepest = shapes_of(with_exits(full, exits_for(full)))
    for depth in some_depths(full):
        shallow = build(name, Scale(depth=depth))
        assert shapes_of(shallow).items() < deepest.items()
        assert shapes_of(with_exits(shallow, exits_for(shallow))).items() < deepest.items()


@every_family
def test_depth__of_all_blocks_is_the_net_itself(name):
    full = build(name)
    again = build(name, Scale(depth=len(blocks(full))))
    assert_close(weights_of(again), weights_of(full), **EXACTLY)
    assert not list(again.exits)
    with pytest.raises(ConfigError, match=f"^depth 99; expected at most {len(blocks(full))}, the number of the full"):
        build(name, Scale(depth=99))


@pytest.mark.parametrize("name", NARROWER)
def test_depth__and_width_go_together(name):
    narrow, both = build(name, Scale(0.5)), build(name, Scale(0.5, 1))
    own = {key: shape for key, shape in shapes_of(both).items() if not key.startswith("exits.")}
    assert own.items() < shapes_of(narrow).items()
    assert both(images()).shape == (4, CLASSES)
    assert both.num_features < build(name, Scale(depth=1)).num_features


def test_depth__counts_residual_blocks_across_stages():
    full = build("resnet14")
    assert [type(stage) for stage in full.stages] == [nn.Sequential, *[Blocks] * 4]
    assert blocks(full) == ["layer1", "layer2", "layer3-1", "layer3", "layer4-1", "layer4"]
    third, fourth = build("resnet14", Scale(depth=3)), build("resnet14", Scale(depth=4))
    assert (list(third.exits), list(fourth.exits)) == (["layer3-1"], ["layer3"])
    assert {key.split(".")[2] for key in shapes_of(third) if key.startswith("stages.layer3.")} == {"0"}


def test_depth__places_have_one_name_in_nets_of_one_family():
    ten, eighteen = build("resnet10"), build("resnet18")
    assert set(places(ten)) < set(places(eighteen))
    common = set(places(ten))
    own, others = (place_shapes(net, SHAPE) for net in (ten, eighteen))
    assert {place: own[place] for place in common} == {place: others[place] for place in common}
    one, other = (exits_for(net, "layer2")["layer2"] for net in (ten, eighteen))
    assert shapes_of(one) == shapes_of(other)


def test_depth__a_shortened_stage_has_no_exit_at_the_full_stages_end():
    shallow = build("resnet14", Scale(depth=3))
    with pytest.raises(ConfigError, match=r"^exit behind 'layer3': the net has no such place; expected stem, layer1,"):
        with_exits(shallow, {"layer3": nn.Flatten()})


def test_depth__norms_and_stems_are_no_blocks():
    assert blocks(build("preresnet20")) == [f"block{number}" for number in range(1, 10)]
    assert blocks(build("mlp3")) == ["hidden1", "hidden2"]
    single = get_model("mlp1_norm")(CLASSES, SHAPE)
    assert blocks(single) == []
    with pytest.raises(ConfigError, match="depth 1; expected at most 0"):
        of_depth(single, 1, CLASSES, SHAPE)


def test_depth__a_net_of_blocks_from_the_first_stage_on_counts_them():
    net = StagedNet({"all": Blocks(*(nn.Linear(4, 4) for _ in range(3)))}, nn.Linear(4, 2))
    assert blocks(net) == ["all-1", "all-2", "all"]
    assert [*shapes_of(of_depth(net, 1, 2, (4,)))][:2] == ["stages.all.0.weight", "stages.all.0.bias"]


def test_depth__the_exit_may_be_of_another_form():
    def flat(net, features, outputs):
        return Exit(nn.Flatten(), nn.Linear(features.numel(), outputs))

    net = of_depth(build("cnn4"), 2, CLASSES, SHAPE, flat)
    assert net.num_features == 8 * 4 * 4
    assert net(images()).shape == (4, CLASSES)


def test_depth__exits_that_a_net_has_are_kept():
    exits = exits_for(build("cnn4"), "stem", "block1", "block2", "block3")
    net = of_depth(with_exits(build("cnn4"), exits), 2, CLASSES, SHAPE)
    assert dict(net.exits.named_children()) == {place: exits[place] for place in ("stem", "block1", "block2")}


@pytest.mark.parametrize(("name", "depth"), [("resnet14", 3), ("cnn4", 2)])
def test_depth__holds_no_layer_that_the_full_net_does_not_hold(name, depth):
    evaluated = of_depth(build(name).eval(), depth, CLASSES, SHAPE)  # as libraries hand out pre-trained nets
    assert not held_layers(evaluated)
    assert not frozen_names(to_training(evaluated))
    whole = build(name)
    whole.stages[1].eval()
    stage = list(dict(whole.stages.named_children()))[1]
    held = frozen_names(of_depth(whole, depth, CLASSES, SHAPE))
    assert held == {key for key in frozen_names(whole) if key.startswith(f"stages.{stage}.")} != frozenset()


@every_family
def test_depth__a_net_that_ends_in_an_exit_is_a_net_like_any_other(name):
    scale = Scale(depth=min(2, len(blocks(build(name))) - 1))
    net = build(name, scale)
    net(images(1))
    net.eval()
    expected = net(images())
    assert_close(net.exits[net.ending](net.stages(images())), expected, **EXACTLY)
    parts = split(net)
    assert_close(parts.classifier(parts.intermediate(parts.extractor(images()))), expected, **EXACTLY)
    assert feature_shapes(net, SHAPE)[1] == (net.num_features,)
    assert classifier_names(net) == {f"exits.{net.ending}.head.{kind}" for kind in ("weight", "bias")}
    assert not classifier_names(net) & split(net).intermediate_names
    behind = {key for key in shapes_of(net) if key.startswith(f"exits.{net.ending}.body.")}
    assert behind & dict(net.named_parameters()).keys() <= split(net).intermediate_names
    again = build(name, scale, seed=1).eval()
    again.load_state_dict(net.state_dict(), strict=True)
    assert_close(again(images()), expected, **EXACTLY)


def test_linear_exit__behind_a_sequence_averages_over_positions():
    stages = {"stem": nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4)), "flat": nn.Flatten()}
    net = StagedNet(stages, nn.Linear(4 * 6, CLASSES))
    made = exits_for(net, "stem", shape=(1, 8))["stem"]
    x = torch.randn(5, 4, 6)
    pooled = ((x - x.mean((0, 2), keepdim=True)) / (x.var((0, 2), correction=0, keepdim=True) + 1e-5).sqrt()).mean(2)
    assert_close(made(x), made.head(pooled))


@pytest.mark.parametrize("name", ["mlp3_norm", "preresnet20", "vit"])
def test_depth__vmap_equals_the_loop(name):
    nets = [build(name, Scale(depth=1), seed).eval() for seed in (1, 2)]
    together = vmap(lambda p, b, x: functional_call(nets[0], (p, b), (x,)), in_dims=(0, 0, None))
    assert_close(together(*stack_module_state(nets), images()), torch.stack([net(images()) for net in nets]))


# Exits


@every_family
def test_exits__change_nothing_of_what_the_net_puts_out(name):
    plain = build(name)
    net = with_exits(build(name), exits_for(plain))
    assert_close(net(images()), plain(images()), **EXACTLY)
    own = {key: tensor for key, tensor in weights_of(net).items() if not key.startswith("exits.")}
    assert_close(own, weights_of(plain), **EXACTLY)  # running statistics, too
    fresh = with_exits(build(name), exits_for(plain))
    exits = {key: tensor for key, tensor in weights_of(fresh).items() if key.startswith("exits.")}
    after = weights_of(net)
    assert_close({key: after[key] for key in exits}, exits, **EXACTLY)


@every_family
def test_exits__put_out_what_they_make_of_the_features_at_their_place(name):
    net = with_exits(build(name), exits_for(build(name)))
    net(images(1))
    net.eval()
    found = net.exit_outputs(images())
    assert list(found) == [*blocks(net), "head"]
    assert_close(found["head"], net(images()), **EXACTLY)
    for depth in some_depths(net):
        place = blocks(net)[depth - 1]
        leading = of_depth(net, depth, CLASSES, SHAPE, lambda *_, place=place: net.exits[place])
        assert_close(leading.eval()(images()), found[place], **EXACTLY)


@every_family
def test_exits__gradients_reach_what_lies_before_them_and_nothing_else(name):
    net = with_exits(build(name), exits_for(build(name)))
    for depth in some_depths(net):
        place = blocks(net)[depth - 1]
        net.zero_grad()
        nn.functional.cross_entropy(net.exit_outputs(images())[place], torch.tensor([0, 1, 2, 0])).backward()
        reached = {key for key, parameter in net.named_parameters() if parameter.grad is not None}
        before = dict(build(name, Scale(depth=depth)).named_parameters()).keys()
        assert reached == before


def test_exits__the_parts_of_a_net_have_all_of_their_outputs():
    net = with_exits(build("cnn4"), exits_for(build("cnn4"), "block1", "block2")).eval()
    parts = net.part_outputs(images())
    assert parts["exits"].shape == (4, 3, CLASSES)
    assert_close(parts["exits"][:, 0], net.exit_outputs(images())["block1"], **EXACTLY)
    assert_close(parts["exits"][:, -1], parts["outputs"], **EXACTLY)
    assert_close(build("cnn4").eval().part_outputs(images())["exits"][:, 0], build("cnn4").eval()(images()), **EXACTLY)


def test_exits__stand_in_the_nets_order_and_take_the_place_of_others_of_their_name():
    net = build("cnn4")
    exits = exits_for(net)
    first = with_exits(net, dict(reversed(exits.items())))
    assert list(first.exits) == list(exits)
    other = exits_for(build("cnn4"), "block2")
    assert with_exits(first, other).exits["block2"] is other["block2"]
    assert with_exits(first, other).exits["block1"] is exits["block1"]
    shallow = build("cnn4", Scale(depth=2))
    replaced = with_exits(shallow, exits_for(net, "block1", "block2"))
    assert replaced.ending == "block2"
    assert replaced.head is not shallow.head
    assert list(replaced.exit_outputs(images())) == ["block1", "block2"]


def test_exits__share_the_nets_layers():
    net = build("cnn4")
    assert with_exits(net, {}).stages[0] is net.stages[0]
    assert with_exits(net, {}).head is net.head


# Heads


class Cosine(nn.Module):
    """A head that states its width and has a temperature."""

    def __init__(self, in_features, classes):
        super().__init__()
        self.in_features = in_features
        self.temperature = nn.Parameter(torch.tensor(10.0))
        self.scales = nn.Parameter(torch.ones(1))
        self.weight = nn.Parameter(torch.randn(classes, in_features))

    def forward(self, z):
        return self.temperature * self.scales * nn.functional.normalize(z) @ nn.functional.normalize(self.weight).T


def test_head__states_its_width_or_is_given_it():
    stages = {"stem": nn.Linear(4, 6), "inner": nn.Linear(6, 5)}
    assert StagedNet(stages, Cosine(5, 2)).num_features == 5
    mlp = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 2))
    assert StagedNet(stages, mlp, num_features=5).num_features == 5
    with pytest.raises(
        ConfigError, match=r"^head: Sequential does not say how many features it reads; give num_features"
    ):
        StagedNet(stages, mlp)
    with pytest.raises(ConfigError, match=r"^num_features 6: the head, Linear, reads 5$"):
        StagedNet(stages, nn.Linear(5, 2), num_features=6)
    with pytest.raises(ConfigError, match=r"^num_features 6: the head is given 5 features by the pooling before it$"):
        feature_shapes(StagedNet(stages, mlp, num_features=6), (4,))


def test_head__there_is_one_or_an_exit_behind_the_last_stage():
    stages = {"stem": nn.Linear(4, 6), "inner": nn.Linear(6, 5)}
    last = Exit(nn.Identity(), nn.Linear(5, 2))
    assert StagedNet(stages, exits={"inner": last}).head is last.head
    with pytest.raises(ConfigError, match=r"^a net without a head: expected an exit behind inner, found stem$"):
        StagedNet(stages, exits={"stem": Exit(nn.Identity(), nn.Linear(6, 2))})
    with pytest.raises(
        ConfigError, match=r"^exit behind inner, in which the net ends: expected an Exit, found Linear$"
    ):
        StagedNet(stages, exits={"inner": nn.Linear(5, 2)})


def test_classifier_names__are_of_the_last_layer_whose_rows_are_classes():
    stages = {"stem": nn.Linear(4, 6), "inner": nn.Linear(6, 5)}
    mlp = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 2))
    assert classifier_names(StagedNet(stages, nn.Linear(5, 2))) == {"head.weight", "head.bias"}
    assert classifier_names(StagedNet(stages, mlp, num_features=5)) == {"head.2.weight", "head.2.bias"}
    assert classifier_names(StagedNet(stages, Cosine(5, 2))) == {"head.weight"}
    assert classifier_names(StagedNet(stages, nn.Identity(), num_features=5)) == frozenset()


def test_with_stages__keeps_the_classifier_of_a_net_that_ends_in_an_exit():
    net = build("cnn4", Scale(depth=2)).eval()
    tail = net.with_stages(dict(list(net.stages.named_children())[1:]), extractor_stages=0).eval()
    assert_close(tail(net.stages[0](images())), net(images()), **EXACTLY)
    assert tail.num_features == net.num_features


def test_linear_exit__keeps_statistics_unless_told_otherwise():
    net = build("cnn4")
    features = place_shapes(net, SHAPE)["block1"]
    kept = partial(linear_exit, net, features, CLASSES)
    assert [name.rpartition(".")[2] for name, _ in kept().named_buffers()][:2] == ["running_mean", "running_var"]
    assert not list(kept(track=False).buffers())
