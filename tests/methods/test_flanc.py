"""FLANC: composed convolutions, the banks that all widths share, what each width has of its own, what is refused."""

from collections import OrderedDict
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.federation import Federation, Site
from potluck.core.ground.errors import ConfigError, PotluckWarning
from potluck.core.ground.rng import fold_in
from potluck.core.nets.scale import FULL, Scale
from potluck.core.nets.weights import parameters_of, weights_of
from potluck.core.requests.examples import Batch, Examples
from potluck.core.requests.fit import LocalTraining
from potluck.engine.rounds.engine import Engine
from potluck.methods import get_method
from potluck.methods.fedavg import FedAvg
from potluck.methods.flanc import FLANC, OrthogonalLoss
from potluck.models import get_model
from potluck.models.contract import StagedNet
from potluck.parts.banks import blocks_to_compose, composed, layers_of, own_weights
from potluck.parts.sharing import Sharing
from potluck.testing import checks_of, worlds

EXACTLY = {"rtol": 0, "atol": 0}
RATES = (1.0, 0.5, 0.25, 0.5)
THREE = partial(FLANC, levels=(1.0, 0.5, 0.25))
SGD = LocalTraining("sgd", lr=0.05, batch_size=4, epochs=2)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def small(scale=FULL):
    """A convolution for the input, two to compose, one of kernel 1, and a classifier."""
    width = scale.of(8)
    body = [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 1)]
    stages = {
        "stem": nn.Sequential(nn.Conv2d(2, width, 3), nn.ReLU()),
        "body": nn.Sequential(*body, nn.ReLU()),
        "last": nn.Sequential(nn.Conv2d(width, width, 3, stride=2, bias=False), nn.ReLU()),
    }
    return StagedNet(stages, nn.Linear(width, 3))


COMPOSED = ["stages.body.0", "stages.last.0"]
BANKS = [f"{name}.bank.weight" for name in COMPOSED]


def images(*capacities, build=small):
    """Clients with 6, 8, 10, ... images of three classes."""
    sites = {}
    for id, capacity in enumerate(capacities):
        targets = torch.arange(6 + 2 * id) % 3
        inputs = torch.randn(len(targets), 2, 8, 8, generator=fold_in(0, "image", id).generator())
        data = Examples(inputs + targets.view(-1, 1, 1, 1), targets)
        sites[id] = Site(id, "net", data, data, data, capacity)
    return Federation(sites, {"net": build}, "net", num_classes=3)


def with_coefficients(net, banks, seed=1):
    """The net composed, with coefficients drawn."""
    net = composed(net, banks)
    for layer in layers_of(net).values():
        nn.init.normal_(layer.coefficients.weight, generator=generator(seed))
    return net


def mixed(layer):
    """The kernel that a composed layer stands for."""
    bank, coefficients = layer.bank.weight, layer.coefficients.weight
    return torch.einsum("ogj,jc...->ogc...", coefficients.view(-1, layer.groups, len(bank)), bank).flatten(1, 2)


def kernel(layer):
    """The same, filter by filter."""
    bank, coefficients = layer.bank.weight, layer.coefficients.weight.flatten(1)
    filters, channels = bank.shape[:2]
    whole = torch.zeros(len(coefficients), channels * layer.groups, *bank.shape[2:])
    for output in range(len(coefficients)):
        for group in range(layer.groups):
            for j in range(filters):
                place = slice(group * channels, (group + 1) * channels)
                whole[output, place] += coefficients[output, group * filters + j] * bank[j]
    return whole


# One layer


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(8, 6, 5, padding=2),
        nn.Conv2d(8, 6, 3, stride=2, padding=1, bias=False),
        nn.Conv2d(8, 6, (3, 1), dilation=2, padding="same"),
        nn.Conv2d(8, 6, 3, padding=(2, 1), padding_mode="circular"),
        nn.Conv3d(8, 6, 2),
    ],
)
@pytest.mark.parametrize("channels", [1, 2, 8])
def test_a_composed_layer_is_the_convolution_with_the_mixed_kernel(layer, channels):
    net = nn.Sequential(OrderedDict(layer=layer))
    bank = torch.randn(3, channels, *layer.kernel_size, generator=generator())
    x = torch.randn(4, 8, *[7] * len(layer.kernel_size), generator=generator(2))
    with torch.no_grad():
        found = with_coefficients(net, {"layer.bank.weight": bank})
        layer.weight.copy_(kernel(found.layer))
        assert_close(found(x), layer(x), rtol=1e-4, atol=1e-5)
        assert found(x[:0]).shape == layer(x[:0]).shape


@pytest.mark.parametrize(
    "name", ["resnet14", "preresnet18", "preresnet20", "wrn16_1", "heterofl_cnn", "cnn4", "resnet20"]
)
@pytest.mark.parametrize("width", [1.0, 0.5])
def test_a_model_of_the_zoo_is_composed_as_a_whole(name, width):
    options = {"widths": (8, 8, 16)} if name == "preresnet20" else {"width": 8}
    build = partial(get_model(name), 3, (2, 8, 8), **options)
    full = build()
    banks = FLANC().new_banks(full, generator())
    wide = {n for n, m in full.named_modules() if isinstance(m, nn.Conv2d) and m.kernel_size != (1, 1)}
    assert banks.keys() == {f"{name}.bank.weight" for name in wide - {"stages.stem.conv"}}
    plain = build(scale=Scale(width)).eval()
    net = with_coefficients(build(scale=Scale(width)), banks).eval()
    with torch.no_grad():
        for name, layer in layers_of(net).items():
            plain.get_submodule(name).weight.copy_(mixed(layer))
        own = {n: t for n, t in net.state_dict().items() if n in plain.state_dict()}
        assert plain.load_state_dict(own, strict=False).missing_keys == [name.replace(".bank.", ".") for name in banks]
        x = torch.randn(2, 2, 8, 8, generator=generator(3))
        assert_close(net(x), plain(x), rtol=1e-3, atol=1e-3)


def test_only_inner_convolutions_of_several_positions_are_composed():
    head = nn.Sequential(nn.Unflatten(1, (8, 1)), nn.Conv1d(8, 3, 3, padding=1), nn.Flatten())
    grouped, frozen = nn.Conv2d(8, 8, 3, groups=2), nn.Conv2d(8, 8, 3)
    frozen.weight.requires_grad_(False)
    body = [nn.Conv2d(8, 8, 1), grouped, frozen, nn.ConvTranspose2d(8, 8, 3), nn.Conv2d(8, 8, 3)]
    net = StagedNet({"stem": nn.Conv2d(2, 8, 3), "body": nn.Sequential(*body)}, head, num_features=8)
    assert [list(block) for block in blocks_to_compose(net)] == [["stages.body.4"]]
    assert (
        blocks_to_compose(get_model("mlp3")(3, (6,)))
        == blocks_to_compose(get_model("mobilenetv2")(3, (3, 32, 32)))
        == []
    )


def test_a_layer_that_a_net_has_twice_stays_one_layer():
    layer = nn.Conv1d(4, 4, 3, padding=1)
    net = nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), layer, nn.Sequential(layer, layer))
    banks = FLANC(channels=0.5).new_banks(net, generator())
    found = with_coefficients(net, banks)
    assert found[1] is found[2][0] is found[2][1]
    assert not [name for name in own_weights(found, banks) if "bank" in name]


# Banks


def test_banks_have_the_sizes_of_the_authors_resnet18():
    sizes = {
        n: tuple(b.shape[:2]) for n, b in FLANC().new_banks(get_model("resnet18")(10, (3, 32, 32)), generator()).items()
    }
    of_block = {"layer1.0": (16, 8), "layer1.1": (16, 8), "layer2.0": (32, 8), "layer2.1": (32, 16)}
    of_block |= {"layer3.0": (64, 16), "layer3.1": (64, 32), "layer4.0": (128, 32), "layer4.1": (128, 64)}
    assert sizes == {f"stages.{b}.conv{n}.bank.weight": size for b, size in of_block.items() for n in (1, 2)}


def test_banks_of_a_block_begin_with_rows_that_are_orthonormal_together():
    banks = FLANC().new_banks(get_model("resnet10")(10, (3, 32, 32), width=64), generator())
    for layer in ("layer1.0", "layer2.0"):
        rows = torch.cat([banks[f"stages.{layer}.conv{n}.bank.weight"] for n in (1, 2)]).flatten(1)
        assert_close(rows @ rows.T, torch.eye(len(rows)), rtol=0, atol=1e-5)
    one, other = (banks[f"stages.{layer}.conv1.bank.weight"] for layer in ("layer1.0", "layer2.0"))
    assert not torch.allclose(one, other[: len(one)])


def test_a_net_begins_with_the_builders_layers_and_coefficients_of_the_stated_variance(play):
    build = partial(get_model("resnet10"), 3, (2, 8, 8), width=16)
    run = play(THREE(), images(*RATES, build=build), rounds=0)
    for level in (1.0, 0.5, 0.25):
        plain = parameters_of(run.engine.server(0).build(width=level))
        own = {n.removeprefix(f"{level}/"): t for n, t in run.state.weights.items() if n.startswith(f"{level}/")}
        assert own.keys() == {
            n if n.replace(".weight", ".bank.weight") not in run.state.banks else n.replace(".w", ".coefficients.w")
            for n in plain
        }
        assert_close({n: own[n] for n in own if n in plain}, {n: plain[n] for n in own if n in plain}, **EXACTLY)
    wide = run.state.weights["1.0/stages.layer4.0.conv2.coefficients.weight"]
    assert wide.shape == (128, 32 * 16, 1, 1)  # 32 filters, and 128 channels in groups of 64 / 8
    assert abs(float(wide.var()) * len(wide) / 2 - 1) < 0.03
    narrow = run.state.weights["0.5/stages.layer4.0.conv2.coefficients.weight"]
    assert not torch.allclose(narrow, wide[: len(narrow), : narrow.shape[1]])


def test_every_run_of_a_seed_begins_alike_and_another_seed_does_not():
    first, second, other = (Engine(THREE(), images(*RATES), seed=seed).start() for seed in (0, 0, 1))
    assert_close(first.banks, second.banks, **EXACTLY)
    assert_close(first.weights, second.weights, **EXACTLY)
    assert not torch.equal(first.banks[BANKS[0]], other.banks[BANKS[0]])


# The loss


def test_the_penalty_is_lambda_times_the_mean_squared_distance_from_orthonormal_rows():
    banks = {name: torch.randn(2, 4, 3, 3, generator=generator(seed)) for seed, name in enumerate(BANKS)}
    net = with_coefficients(small(), banks).eval()
    batch = Batch(torch.randn(5, 2, 8, 8, generator=generator()), torch.arange(5) % 3, {})
    expected, slopes = F.cross_entropy(net(batch.inputs), batch.targets), {}
    expected.backward()
    for name, bank in banks.items():
        rows = bank.flatten(1)
        gap = rows @ rows.T - torch.eye(2)
        expected = expected + 3.0 * gap.square().mean()
        slopes[name] = net.get_parameter(name).grad + (3.0 * gap @ rows).view_as(bank)  # 4 lambda / 2^2
    net.zero_grad()
    loss = OrthogonalLoss(F.cross_entropy, 3.0)(net, batch, {})
    loss.backward()
    assert_close(loss, expected)
    assert_close({name: net.get_parameter(name).grad for name in banks}, slopes)


def test_the_penalty_is_0_for_orthonormal_rows():
    net = with_coefficients(small(), FLANC(channels=0.5).new_banks(small(), generator())).eval()
    batch = Batch(torch.randn(5, 2, 8, 8, generator=generator()), torch.arange(5) % 3, {})
    with torch.no_grad():
        assert_close(
            OrthogonalLoss(F.cross_entropy, 10.0)(net, batch, {}), F.cross_entropy(net(batch.inputs), batch.targets)
        )


# A round


def of_width(found, width):
    return {n.removeprefix(f"{width}/"): t for n, t in found.items() if n.startswith(f"{width}/")}


def test_banks_are_the_mean_over_all_and_the_rest_over_those_of_one_width(play):
    run = play(THREE(SGD), images(*RATES), rounds=0)
    for ids in [(0, 1, 2, 3), (1, 2), (3,)]:
        run.round(*ids)
        before, after = run.states[-2:]
        replies = run.wire.replied["local_update"][-1]
        for name, bank in after.banks.items():
            assert_close(bank, torch.stack([replies[id]["banks"][name] for id in ids]).mean(0))
            assert not torch.equal(bank, before.banks[name])
        for width in (1.0, 0.5, 0.25):
            who = [id for id in ids if RATES[id] == width]
            for part, entry in (("weights", "weights"), ("statistics", "tracked")):
                old, new = (of_width(getattr(state, part), width) for state in (before, after))
                for name in old:
                    if not who:
                        assert torch.equal(new[name], old[name])
                    elif old[name].is_floating_point():
                        assert_close(new[name], torch.stack([replies[id][entry][name] for id in who]).mean(0))
                        moved = not torch.allclose(new[name], old[name], rtol=0, atol=1e-7)
                        assert moved == (name != "stages.body.0.bias")  # before a BatchNorm its gradient is rounding


def test_all_widths_have_the_same_banks_and_move_all_filters(play):
    run = play(THREE(SGD), images(*RATES), rounds=2)
    for id in range(4):
        found = parameters_of(run.model(id))
        assert_close({name: found[name] for name in BANKS}, run.state.banks, **EXACTLY)
    for reply in run.wire.replied["local_update"][0].values():
        for name, bank in reply["banks"].items():
            assert (bank != run.states[0].banks[name]).flatten(1).any(1).all()


def test_a_client_is_sent_the_banks_and_what_its_width_has_and_keeps_nothing(play):
    run = play(THREE(SGD), images(*RATES), rounds=2)
    for before, sent in zip(run.states, run.wire.sent["local_update"], strict=False):
        for id, message in sent.items():
            assert_close(message["banks"], before.banks, **EXACTLY)
            assert_close(message["weights"], of_width(before.weights, RATES[id]), **EXACTLY)
            assert_close(message["statistics"], of_width(before.statistics, RATES[id]), **EXACTLY)
    assert run.kept(0) == {"state": {}}
    size = sum(t.nbytes for t in run.state.banks.values())
    assert run.reports[0].traffic.down["banks"] == run.reports[0].traffic.up["banks"] == 4 * size
    assert size == 4 * 2 * (2 * 1 * 3 * 3)  # the same for every width


def test_with_one_width_and_no_penalty_it_is_fedavg_of_the_composed_net(play):
    flanc = play(FLANC(SGD, levels=(1.0,), penalty=0.0), images(1.0, 1.0, 1.0), rounds=0)
    start = {**of_width(flanc.state.weights, 1.0), **of_width(flanc.state.statistics, 1.0)}

    def build():
        net = composed(small(), flanc.states[0].banks)
        net.load_state_dict(start, strict=False)
        return net

    uniform = FedAvg(SGD, sharing=Sharing(weighting="uniform"))
    fedavg = play(uniform, images(1.0, 1.0, 1.0, build=build), rounds=0)
    for _ in range(2):
        flanc.round()
        fedavg.round()
    assert_close(weights_of(flanc.model(1)), weights_of(fedavg.model(1)), **EXACTLY)
    with_penalty = play(FLANC(SGD, levels=(1.0,), penalty=10.0), images(1.0, 1.0, 1.0), rounds=2)
    assert not torch.allclose(with_penalty.state.banks[BANKS[0]], flanc.state.banks[BANKS[0]])


def test_the_penalty_draws_banks_towards_orthonormal_rows(play):
    def distance(penalty):
        method = FLANC(LocalTraining("sgd", lr=0.05, steps=20), levels=(1.0,), penalty=penalty, channels=0.5)
        run = play(method, images(1.0), rounds=0)
        run.states[0] = replace(run.state, banks={name: 2 * bank for name, bank in run.state.banks.items()})
        rows = run.round().banks[BANKS[0]].flatten(1)
        return float((rows @ rows.T - torch.eye(len(rows))).abs().max())

    assert distance(10.0) < 0.2 < distance(0.0)


# Predicting


def test_a_client_predicts_with_its_width_and_the_server_with_the_largest(play):
    run = play(THREE(SGD), images(*RATES), rounds=2)
    models = [*((rate, run.model(id)) for id, rate in enumerate(RATES)), (1.0, run.engine.global_model(run.state))]
    for rate, model in models:
        expected = {**of_width(run.state.weights, rate), **of_width(run.state.statistics, rate)}
        assert_close(dict(model.state_dict()), {**expected, **run.state.banks}, **EXACTLY)
        assert model.head.in_features == 8 * rate


# What it refuses


def test_a_layer_that_cannot_be_divided_is_named_before_training(play):
    with pytest.raises(
        ConfigError,
        match=r"flanc: at width 0\.3 stages\.body\.0 has 3 input channels, which cannot be divided into groups of 2,"
        r" as its bank's filters read; choose a network whose channels double from block to block or stay, or",
    ):
        play(FLANC(levels=(1.0, 0.3), channels=0.25), images(1.0), rounds=0)


def test_it_warns_of_clients_below_the_smallest_level(play):
    with pytest.warns(PotluckWarning, match=r"flanc: client 0: capacity 0\.1 lies below the smallest level, 0\.25"):
        play(FLANC(), images(0.1), rounds=0)


# The contract, with convolutions to compose


def toy_convolutions(depth, batchnorm, frozen=False, scale=FULL, *, width=16, classes=worlds.CLASSES):
    """As `potluck.testing.worlds.toy_net`, of convolutions over the ten features."""
    width = scale.of(width)

    def stage(inputs):
        norm = [nn.BatchNorm1d(width)] if batchnorm else []
        return nn.Sequential(nn.Conv1d(inputs, width, 5, padding=2), *norm, nn.ReLU())

    stages = {"stem": nn.Sequential(nn.Unflatten(1, (1, 10)), stage(1))}
    stages |= {f"hidden{i}": stage(width) for i in range(1, depth + 1)}
    net = StagedNet(stages, nn.Linear(10 * width, classes), pool=nn.Flatten())
    if frozen:
        stages["stem"].requires_grad_(False).eval()
        net.get_parameter("stages.hidden1.0.bias").requires_grad_(False)
    return net


QUICK = (
    "gives_the_same_bytes_on_workers",
    "agrees_when_stacked",
    "keeps_what_is_frozen",
    "leaves_the_global_generator_alone",
    "sends_what_it_documents",
    "declares_its_replies",
    "trains_no_more_than_fits",
    "leaves_alone_what_nobody_covers",
)


def contract():
    for check in checks_of(get_method("flanc")):
        # There are banks here: FedAvg has none, and a composed layer begins as what its bank and coefficients give.
        if not check.name.startswith("limit: levels") and not check.name.endswith("starts_as_every_method_does"):
            yield pytest.param(check, id=check.name, marks=[] if check.name in QUICK else [pytest.mark.slow])


@pytest.mark.parametrize("check", list(contract()))
def test_it_keeps_the_contract_with_banks(check, monkeypatch):
    monkeypatch.setattr(worlds, "toy_net", toy_convolutions)
    composed_layers = [list(block) for block in blocks_to_compose(toy_convolutions(1, batchnorm=True))]
    assert composed_layers == [["stages.hidden1.0"]]
    check.run()
