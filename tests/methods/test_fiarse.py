"""FIARSE: masks, the surrogate's gradient, and what becomes of what masks cover, against numbers worked out by hand."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError
from potluck.core.nets.weights import parameters_of, weights_of
from potluck.core.requests.fit import LocalTraining
from potluck.engine.rounds.engine import Engine
from potluck.methods.fiarse import FIARSE, maskable, masked, smallest_of_largest
from potluck.models.resnet import VARIANTS
from potluck.models.vit import vit
from potluck.parts.submodels import unpacked
from potluck.testing.worlds import World, toy_federation

EXACTLY = {"rtol": 0, "atol": 0}
DENSITIES = (1.0, 0.5, 0.25, 0.1)
TRAINING = LocalTraining("sgd", lr=0.2, epochs=2)
NORM = "stages.stage1.1.weight"


def masks_of(message, state):
    """The masks that a client was sent, by name."""
    return {name: unpacked(bits, state.weights[name].shape) for name, bits in message["masks"].items()}


def dense(message, state, masks):
    """What a client was sent or replied, in its place, and what it covers: NaN where it covers nothing."""
    found = {}
    for name, values in message["weights"].items():
        full = torch.full_like(state.weights[name], torch.nan)
        full[masks.get(name, torch.ones_like(full, dtype=torch.bool))] = values.flatten()
        found[name] = full
    return found


def test_a_client_is_sent_the_largest_weights_of_the_net_and_all_norms(play, clouds):
    run = play(FIARSE(TRAINING), clouds(*["norm3"] * 4, capacities=DENSITIES), rounds=3)
    for state, sent in zip(run.states, run.wire.sent["local_update"], strict=False):
        for id, message in sent.items():
            masks = masks_of(message, state)
            assert sorted(state.weights.keys() - masks.keys()) == [
                f"stages.stage{i}.1.{kind}" for i in range(3) for kind in ("bias", "weight")
            ]
            every = torch.cat([state.weights[name].abs().flatten() for name in masks])
            count = int(DENSITIES[id] * len(every))
            theta = every.sort(descending=True).values[count - 1]
            assert sum(int(mask.sum()) for mask in masks.values()) == count
            for name, found in message["weights"].items():
                mine = state.weights[name]
                if name in masks:
                    assert torch.equal(masks[name], mine.abs() >= theta)
                    mine = mine[masks[name]]
                assert_close(found, mine, **EXACTLY)


def test_with_a_threshold_by_layer_every_layer_has_its_share(play, clouds):
    run = play(FIARSE(TRAINING, threshold="layer"), clouds("norm3", "norm3", capacities=(1.0, 0.25)))
    masks = masks_of(run.wire.sent["local_update"][0][1], run.state)
    for layer in ("stages.stage0.0", "stages.stage1.0", "stages.stage2.0", "head"):
        parts = [masks[f"{layer}.{kind}"] for kind in ("weight", "bias")]
        total = sum(part.numel() for part in parts)
        assert sum(int(part.sum()) for part in parts) == total // 4


class Nested(nn.Module):
    """A plain net of two children, the first of which has two layers."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8))
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.body(x).relu())


@pytest.mark.parametrize(
    ("net", "stages"),
    [
        # As the code of fiarse_layerwise has it: conv1, layer1 to layer4, linear.
        (
            VARIANTS["resnet18"](10, (3, 8, 8), width=4),
            ["stages.stem.", *(f"stages.layer{i}." for i in range(1, 5)), "head."],
        ),
        (Nested(), ["body.", "out."]),
    ],
)
def test_with_a_threshold_by_stage_a_stage_has_its_share_and_its_layers_have_not(net, stages):
    method, weights = FIARSE(threshold="stage"), parameters_of(net)
    sizes = {name: weights[name].abs() for name in maskable(net)}
    theta = method.least(sizes, 0.25)
    kept = {name: int((size >= theta[name]).sum()) for name, size in sizes.items()}
    for stage in stages:
        names = [name for name in sizes if name.startswith(stage)]
        assert sum(kept[name] for name in names) == sum(sizes[name].numel() for name in names) // 4
        assert len({float(theta[name]) for name in names}) == 1
    assert len({float(value) for value in theta.values()}) == len(stages)


@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm1d(8), nn.GroupNorm(2, 8), nn.InstanceNorm1d(8, affine=True), nn.LayerNorm(8), nn.RMSNorm(8)],
)
def test_the_weights_of_no_norm_are_masked(norm):
    assert maskable(nn.Sequential(nn.Linear(6, 8), norm, nn.Linear(8, 3))) == (
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    )


def test_every_weight_is_the_mean_over_exactly_the_clients_that_cover_it(play, clouds):
    run = play(FIARSE(TRAINING), clouds(*["norm3"] * 4, capacities=DENSITIES), rounds=0)
    for ids in [(0, 1, 2, 3), (1, 2), (3,), (1, 3), (2, 3)]:
        run.round(*ids)
        before, after = run.states[-2:]
        sent, replies = run.wire.sent["local_update"][-1], run.wire.replied["local_update"][-1]
        found = [dense(replies[id], before, masks_of(sent[id], before)) for id in ids]
        for name, old in before.weights.items():
            expected = torch.stack([one[name] for one in found]).nanmean(0)
            covered = ~expected.isnan()
            assert_close(after.weights[name][covered], expected[covered])
            assert torch.equal(after.weights[name][~covered], old[~covered])
        assert not torch.equal(after.weights["head.weight"], before.weights["head.weight"])
        assert 0 not in ids or not any(full.isnan().any() for full in found[0].values())


def test_masked_is_the_product_and_its_gradient_has_the_surrogate():
    """At theta = 0.5: 1 + 2 * 0.5 * 0.5 / 1 = 1.5, 1 + 2 * 0.5 * 2 / 2.5^2 = 1.32, and nothing below theta."""
    x = torch.tensor([0.5, -2.0, 0.1, 3.0], requires_grad=True)
    kept = torch.tensor([True, True, True, False])
    upstream = torch.tensor([1.0, -3.0, 5.0, 7.0])
    found = masked(x, kept, torch.tensor(0.5), "learnt")
    assert found.tolist() == [0.5, -2.0, 0.0, 0.0]
    (gradient,) = torch.autograd.grad(found, x, upstream)
    assert_close(gradient, torch.tensor([1.5, -3 * 1.32, 0.0, 0.0]))


def test_masked_without_the_surrogate_is_the_mask_as_sent_with_its_plain_gradient():
    x = torch.tensor([0.5, -2.0, 0.1, 3.0], requires_grad=True)
    kept = torch.tensor([True, True, True, False])
    found = masked(x, kept, torch.tensor(0.5), "fixed")
    assert_close(found, torch.tensor([0.5, -2.0, 0.1, 0.0]))
    (gradient,) = torch.autograd.grad(found, x, torch.ones(4))
    assert gradient.tolist() == [1.0, 1.0, 1.0, 0.0]


def test_masked_as_released_follows_the_weights_and_has_the_plain_gradient_of_what_is_kept():
    x = torch.tensor([0.5, -2.0, 0.1, 3.0], requires_grad=True)
    found = masked(x, torch.tensor([True, True, True, False]), torch.tensor(0.5), "followed")
    assert found.tolist() == [0.5, -2.0, 0.0, 0.0]
    (gradient,) = torch.autograd.grad(found, x, torch.ones(4))
    assert gradient.tolist() == [1.0, 1.0, 0.0, 0.0]


def test_masked_of_zeros_under_a_threshold_of_zero_has_their_plain_gradient():
    x = torch.tensor([0.0, 1.0], requires_grad=True)
    found = masked(x, torch.ones(2, dtype=torch.bool), torch.tensor(0.0), "learnt")
    (gradient,) = torch.autograd.grad(found, x, torch.ones(2))
    assert gradient.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("masks", ["learnt", "followed", "fixed"])
def test_a_clients_step_is_along_the_gradient_at_its_masked_weights(masks, play, clouds):
    """Eq. by hand: x - eta g m (1 + 2 theta |x| / (|x| + theta)^2), with g of a net whose other weights are 0."""
    federation = clouds("mlp3", capacities=(0.4,))
    method = FIARSE(LocalTraining("sgd", lr=0.3, batch_size=100), masks=masks)
    run = play(method, federation)
    before, data = run.states[0].weights, federation.sites[0].train
    large = masks_of(run.wire.sent["local_update"][0][0], run.state)
    theta = torch.cat([before[name][mask].abs() for name, mask in large.items()]).min()
    net = run.engine.server(0).build()
    net.load_state_dict({name: tensor * large[name] for name, tensor in before.items()})
    loss = nn.functional.cross_entropy(net(data.inputs), data.targets)
    gradients = dict(zip(before, torch.autograd.grad(loss, list(net.parameters())), strict=True))
    for name, x in before.items():
        size = x.abs()
        slope = 1 + 2 * theta * size / (size + theta) ** 2 if masks == "learnt" else 1.0
        expected = torch.where(large[name], x - 0.3 * gradients[name] * slope, x)
        assert_close(run.state.weights[name], expected)
    moved = sum(int((run.state.weights[name] != before[name]).sum()) for name in before)
    assert moved > 20


def test_at_full_density_theta_is_the_smallest_weight(clouds):
    method, engine = FIARSE(), Engine(FIARSE(), clouds("mlp3"))
    weights = engine.start().weights
    place = method.submodel(weights, 1.0, engine.server(1))
    assert all(bool(mask.all()) for mask in place.values())
    found = method.least({name: weights[name].abs() for name in place}, 1.0)
    assert {float(theta) for theta in found.values()} == {min(float(t.abs().min()) for t in weights.values())}


def test_smallest_of_largest_rounds_down_and_leaves_one_at_least():
    sizes = torch.tensor([3.0, 1.0, 4.0, 1.5, 9.0])
    assert [float(smallest_of_largest(sizes, density)) for density in (1.0, 0.5, 0.4, 0.01)] == [1.0, 4.0, 4.0, 9.0]


def test_a_server_rate_goes_part_of_the_way(play, clouds):
    federation = clouds(*["norm3"] * 4, capacities=DENSITIES)
    whole, half = (play(FIARSE(TRAINING, server_lr=rate), federation) for rate in (1.0, 0.5))
    for name, old in whole.states[0].weights.items():
        assert_close(half.state.weights[name], (old + whole.state.weights[name]) / 2)


def test_growing_densities_climb_the_ladder_from_where_a_client_is(play, clouds):
    method = FIARSE(TRAINING, ladder=(0.2, 0.5, 1.0), grow_every=2)
    run = play(method, clouds("mlp3", "mlp3", capacities=(0.05, 0.3)), rounds=7)
    total = sum(tensor.numel() for tensor in run.state.weights.values())
    counts = [
        [sum(int(mask.sum()) for mask in masks_of(sent[id], run.state).values()) for id in (0, 1)]
        for sent in run.wire.sent["local_update"]
    ]
    weak, strong = [0.2] * 2 + [0.5] * 2 + [1.0] * 3, [0.3] * 2 + [0.5] * 2 + [1.0] * 3
    assert counts == [[int(total * a), int(total * b)] for a, b in zip(weak, strong, strict=True)]


@pytest.mark.parametrize("ladder", [(0.5, 0.2), (0.5, 0.5)])
def test_a_ladder_that_does_not_rise_is_refused(ladder):
    with pytest.raises(ConfigError, match=r"^ladder: expected densities that rise, found \(0\.5, 0\.[25]\)$"):
        FIARSE(ladder=ladder)


def test_a_client_is_evaluated_with_its_own_mask_and_statistics_of_its_own_data(play, clouds):
    federation = clouds("norm3", "norm3", capacities=(1.0, 0.25))
    run = play(FIARSE(LocalTraining("sgd", lr=0.2, batch_size=100)), federation, rounds=2)
    model, weights = run.model(1), run.state.weights
    found, masks = parameters_of(model), {}
    every = torch.cat([weights[name].abs().flatten() for name in maskable(model)])
    theta = smallest_of_largest(every, 0.25)
    for name in maskable(model):
        masks[name] = weights[name].abs() >= theta
        assert torch.equal(found[name], weights[name] * masks[name])
    assert torch.equal(found[NORM], weights[NORM])
    read = model.stages[0][0](federation.sites[1].train.inputs)
    assert_close(model.stages[0][1].running_mean, read.mean(0).detach(), rtol=1e-4, atol=1e-5)


def test_the_global_model_is_the_whole_net_if_it_needs_no_statistics(play, clouds):
    run = play(FIARSE(TRAINING), clouds("mlp3", "mlp3", capacities=(1.0, 0.25)))
    assert_close(weights_of(run.engine.global_model(run.state)), run.state.weights, **EXACTLY)
    normed = play(FIARSE(TRAINING), clouds("norm3"), rounds=0)
    assert normed.engine.global_model(normed.state) is None


def test_a_client_of_next_to_no_capacity_trains_one_weight(play, clouds):
    run = play(FIARSE(LocalTraining("sgd", lr=0.2)), clouds("mlp3", capacities=(1e-9,)), rounds=2)
    for sent in run.wire.sent["local_update"]:
        assert sum(int(mask.sum()) for mask in masks_of(sent[0], run.state).values()) == 1


def test_a_client_is_sent_its_weights_and_a_bit_for_each_of_the_net(play, clouds):
    run = play(FIARSE(TRAINING), clouds("mlp3", capacities=(0.25,)))
    (sent,) = run.wire.sent["local_update"][0].values()
    every = run.state.weights.values()
    kept = int(0.25 * sum(tensor.numel() for tensor in every))
    assert sent.nbytes == 4 * kept + sum((tensor.numel() + 7) // 8 for tensor in every)


def test_maskable_leaves_out_norms_and_what_is_frozen():
    net = vit(3, (3, 32, 32), width=16, depth=1, heads=2)
    net.head.bias.requires_grad_(False)
    left = {name for name, _ in net.named_parameters()} - set(maskable(net))
    norms = {"stages.block1.norm1", "stages.block1.norm2", "stages.norm"}
    assert left == {"head.bias"} | {f"{norm}.{kind}" for norm in norms for kind in ("weight", "bias")}


def test_what_is_frozen_is_not_masked_in_the_model_that_is_used():
    engine = Engine(FIARSE(), toy_federation(World(clients=2, architectures=1, capacity=0.25, frozen=True)))
    net, whole = engine.inference_model(engine.start(), 0), engine.server(0).build()
    assert_close(net.stages.stem[0].weight, whole.stages.stem[0].weight, **EXACTLY)


def test_masks_change_from_round_to_round(play, clouds):
    run = play(FIARSE(TRAINING), clouds("mlp3", "mlp3", capacities=(1.0, 0.5)), rounds=6)
    masks = [
        torch.cat([mask.flatten() for mask in masks_of(sent[1], run.state).values()])
        for sent in run.wire.sent["local_update"]
    ]
    assert not torch.equal(masks[0], masks[-1])
