"""FedDPA: Fisher information example by example, who moves when, and what the server makes of updates."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.federation import Federation, Site
from potluck.core.needs import Need
from potluck.core.nets.weights import load, minus, parameters_of
from potluck.core.requests.beside_training import Gradient
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import LocalTraining
from potluck.engine.numerics.numerics import Numerics
from potluck.methods.fedavg import FedAvg
from potluck.methods.feddpa import FedDPA, FisherLoss, PullLoss, scaled
from potluck.models.cnn import cnn2
from potluck.parts.sharing import Sharing

EXACTLY = {"rtol": 0, "atol": 0}
CLOSELY = {"rtol": 1e-4, "atol": 1e-6}
FULL = LocalTraining("sgd", lr=0.1, batch_size=64)  # one full step a part
BOTH = ["norm2", "mlp3"]


def fisher_of(net, data):
    """The mean of squared gradients, one example after the other, in evaluation mode."""
    net.eval()
    total = {name: torch.zeros_like(weight) for name, weight in net.named_parameters()}
    for x, y in zip(data.inputs, data.targets, strict=True):
        net.zero_grad()
        net(x[None]).log_softmax(1)[0, y].backward()
        for name, weight in net.named_parameters():
            total[name] += weight.grad**2
    net.zero_grad()
    net.train()
    return {name: tensor / len(data) for name, tensor in total.items()}


def masks_by_hand(net, data, threshold=0.4):
    masks = {}
    for name, fisher in fisher_of(net, data).items():
        span = fisher.max() - fisher.min()
        masks[name] = (fisher - fisher.min()) / span > threshold if span else torch.zeros_like(fisher, dtype=torch.bool)
    return masks


def distance(net, sent):
    return sum((weight - sent[name]).norm() for name, weight in net.named_parameters())


# Fisher information


@pytest.mark.parametrize("architecture", BOTH)
def test_fisher_loss__has_the_squared_gradients_of_single_examples_as_its_gradient(play, clouds, architecture):
    run = play(FedDPA(FULL), clouds(architecture, sizes=(20,)))  # more than are taken at a time
    net, data = run.model(0).train(), run.engine.federation.sites[0].train
    found = run.engine.server(1).gradient(Gradient(net, FisherLoss(F.cross_entropy), data, batch_size=8))
    assert_close(found, fisher_of(net, data), **CLOSELY)
    whole = run.engine.server(1).gradient(Gradient(net, FisherLoss(F.cross_entropy), data, batch_size=64))
    assert_close(found, whole, **CLOSELY)
    assert net.training


def images(seed=0):
    draws = torch.Generator().manual_seed(seed)
    data = Examples(torch.randn(24, 1, 8, 8, generator=draws), torch.arange(24) % 3)
    sites = {id: Site(id, "cnn2", data, data, data) for id in range(2)}
    return Federation(sites, {"cnn2": partial(cnn2, 3, (1, 8, 8), width=4)}, "cnn2", 3)


def test_fisher_loss__is_computed_in_float32_whatever_the_precision_of_the_run(play):
    plain, low = (play(FedDPA(FULL), images(), 2, computing=Numerics(precision)) for precision in ("fp32", "bf16"))
    assert low.reports[-1].failures == {}
    net, data = plain.model(0).train(), images().sites[0].train
    request = Gradient(net, FisherLoss(F.cross_entropy), data)
    assert_close(low.engine.server(1).gradient(request), plain.engine.server(1).gradient(request), **EXACTLY)
    assert_close(low.state.weights, plain.state.weights, rtol=0.1, atol=0.05)


class Looking(torch.nn.Module):
    """Scales what is large, so that it looks at numbers, which `vmap` does not let it."""

    def __init__(self):
        super().__init__()
        self.first, self.out = torch.nn.Linear(4, 6), torch.nn.Linear(6, 3)

    def forward(self, x):
        h = self.first(x).tanh()
        if x.abs().max() > 1e6:
            h = h / x.abs().max().item()
        return self.out(h)


def test_fisher_loss__of_a_net_that_looks_at_numbers_is_that_of_one_example_after_another(play):
    draws = torch.Generator().manual_seed(0)
    data = Examples(torch.randn(10, 4, generator=draws), torch.arange(10) % 3)
    federation = Federation({i: Site(i, "own", data, data, data) for i in range(2)}, {"own": Looking}, "own", 3)
    run = play(FedDPA(FULL), federation)
    assert run.reports[-1].failures == {}
    request = Gradient(run.model(0).train(), FisherLoss(F.cross_entropy), data, batch_size=4)
    assert_close(run.engine.server(1).gradient(request), fisher_of(run.model(0), data), **CLOSELY)


def test_scaled__goes_from_0_to_1_and_is_0_where_all_are_the_same():
    assert scaled(torch.tensor([2.0, 6.0, 3.0])).tolist() == [0.0, 1.0, 0.25]
    assert scaled(torch.zeros(3)).tolist() == scaled(torch.full((3,), 7.0)).tolist() == [0.0, 0.0, 0.0]


# The losses


@pytest.mark.parametrize(("bound", "expected"), [(None, 7.0), (9.0, 2.0), (4.0, 3.0)])
def test_pull_loss__adds_half_the_distance_or_its_gap_to_the_bound(bound, expected):
    net = torch.nn.Linear(2, 2)
    load(net, {"weight": torch.tensor([[3.0, 0.0], [0.0, 4.0]]), "bias": torch.tensor([0.0, 2.0])})
    sent = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}  # at distance 5 + 2
    batch = type("Batch", (), {"inputs": torch.ones(1, 2), "targets": torch.tensor([0])})
    plain = F.cross_entropy(net(batch.inputs), batch.targets)
    found = PullLoss(F.cross_entropy, 3.0, bound)(net, batch, {"sent": sent})
    assert (found - plain).item() == pytest.approx(1.5 * expected, rel=1e-5)


@pytest.mark.parametrize("bound", [None, 0.5])
def test_pull_loss__has_a_finite_gradient_where_nothing_has_moved(bound):
    net = torch.nn.Linear(2, 2)
    batch = type("Batch", (), {"inputs": torch.ones(1, 2), "targets": torch.tensor([0])})
    PullLoss(F.cross_entropy, 1.0, bound)(net, batch, {"sent": parameters_of(net)}).backward()
    assert net.weight.grad.isfinite().all()


def test_pull_loss__does_not_draw_a_tensor_that_rounding_alone_has_moved():
    net = torch.nn.Linear(2, 2)
    batch = type("Batch", (), {"inputs": torch.ones(1, 2), "targets": torch.tensor([0])})
    sent = {"weight": net.weight.detach() + 0.1, "bias": net.bias.detach() - 1e-7}
    pulled, plain = (
        torch.autograd.grad(PullLoss(F.cross_entropy, weight)(net, batch, {"sent": sent}), list(net.parameters()))
        for weight in (1.0, 0.0)
    )
    assert torch.equal(pulled[1], plain[1])
    assert_close(pulled[0] - plain[0], torch.full((2, 2), -0.25))


def test_pull_loss__draws_own_weights_to_the_global_ones_and_the_updates_size_to_the_bound():
    """Gradient steps on the second part alone: the distance falls to 0, or goes to the bound from either side."""
    batch = type("Batch", (), {"inputs": torch.zeros(1, 2), "targets": torch.tensor([0])})
    for bound, start, goal in ((None, 2.0, 0.0), (1.0, 2.0, 1.0), (1.0, 0.1, 1.0)):
        net = torch.nn.Linear(2, 2, bias=False)
        load(net, {"weight": torch.full((2, 2), start / 2)})  # the zero input has no part in it
        sent = {"weight": torch.zeros(2, 2)}
        for _ in range(100):
            net.zero_grad()
            PullLoss(F.cross_entropy, 1.0, bound)(net, batch, {"sent": sent}).backward()
            with torch.no_grad():
                net.weight -= 0.05 * net.weight.grad
        assert distance(net, sent).item() == pytest.approx(goal, abs=0.06)


# A client's round


def part_by_hand(net, data, moving, loss_of, training, sent):
    named = dict(net.named_parameters())
    optimizer = training.new_optimizer(list(named.values()))
    for _ in range(training.epochs):
        before = parameters_of(net)
        net.zero_grad()
        (F.cross_entropy(net(data.inputs), data.targets) + loss_of(distance(net, sent))).backward()
        optimizer.step()
        with torch.no_grad():
            for name, weight in named.items():
                weight.copy_(torch.where(moving[name], weight, before[name]))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_clients_second_round_is_the_papers(play, clouds, optimizer):
    training = LocalTraining(optimizer, lr=0.05, batch_size=64, epochs=2)
    names = BOTH if optimizer == "sgd" else ["mlp2", "mlp3"]  # Adam steps on what is rounding of a bias before a norm
    federation = clouds(*names)
    run = play(FedDPA(training, lambda1=0.3, lambda2=0.2, bound=0.7), federation)
    nets = [load(run.engine.server(1).build(name), run.kept(id)["model"]) for id, name in enumerate(names)]
    run.round()
    for id, net in enumerate(nets):
        message, data = run.wire.sent["local_update"][1][id], federation.sites[id].train
        sent = message["weights"]
        load(net, message.get("buffers") or {}, partial=True)
        masks = masks_by_hand(net, data)
        own = parameters_of(net)
        assert any(not torch.equal(own[name], sent[name]) for name in own)
        load(net, {name: torch.where(masks[name], own[name], sent[name]) for name in own}, partial=True)
        part_by_hand(net, data, masks, lambda d: 0.15 * d, training, sent)
        shared = {name: ~mask for name, mask in masks.items()}
        part_by_hand(net, data, shared, lambda d: 0.1 * (d - 0.7).abs(), training, sent)
        assert_close(run.wire.replied["local_update"][1][id]["weights"], parameters_of(net), rtol=1e-3, atol=1e-5)


def test_in_its_first_round_a_client_starts_from_the_global_model(play, clouds):
    """Also one that comes late, when the global model is no longer what it was built with."""
    federation, everything = clouds("mlp2", "mlp2"), {"threshold": -0.1}  # all weights are a client's own
    run = play(FedDPA(FULL, **everything), federation, rounds=0)
    run.round(0)
    still = play(FedDPA(replace(FULL, lr=0.0), **everything), federation, rounds=0)
    still.engine.round(2, run.state, [1])
    replied = still.wire.replied["local_update"][0][1]["weights"]
    assert_close(replied, run.state.weights["all"], **EXACTLY)
    assert not torch.equal(replied["head.weight"], run.states[0].weights["all"]["head.weight"])


@pytest.mark.parametrize(("threshold", "own"), [(1.0, False), (-0.1, True)])
def test_at_the_ends_of_the_threshold_nothing_or_everything_is_a_clients_own(play, clouds, threshold, own):
    """With a rate of zero, it goes on from its own model or from the global one."""
    federation = clouds("mlp2", "mlp2")
    run = play(FedDPA(FULL, threshold=threshold), federation)
    still = play(FedDPA(replace(FULL, lr=0.0), threshold=threshold), federation, rounds=0)
    still.engine.store.write(0, run.engine.store.read(0))
    still.engine.round(2, run.state, [0])
    replied = still.wire.replied["local_update"][0][0]["weights"]
    expected = parameters_of(run.model(0)) if own else run.state.weights["all"]
    assert_close(replied, expected, **EXACTLY)
    assert any(not torch.equal(tensor, run.state.weights["all"][name]) for name, tensor in replied.items()) == own


def test_a_client_is_evaluated_with_its_own_model_or_with_the_global_one(play, clouds):
    runs = [play(FedDPA(FULL, evaluated=which), clouds("mlp2", "mlp2"), rounds=0) for which in ("own", "global")]
    for run in runs:
        run.round(0)
    own, common = runs
    assert_close(parameters_of(own.model(0)), own.wire.replied["local_update"][0][0]["weights"], **EXACTLY)
    assert_close(parameters_of(own.model(1)), own.state.weights["all"], **EXACTLY)  # has not taken part
    assert_close(parameters_of(common.model(0)), common.state.weights["all"], **EXACTLY)


# The server


def test_clip__shortens_what_is_longer_than_the_bound_and_nothing_else(play, clouds):
    server = play(FedDPA(), clouds("mlp2"), rounds=0).engine.server(1)
    sent = {"a": torch.tensor([1.0, 1.0]), "b": torch.tensor([[2.0]]), "of others": torch.ones(3)}
    near, far = ({"a": torch.tensor([1.0 + s * 3, 1.0]), "b": torch.tensor([[2.0 + s * 4]])} for s in (0.05, 10.0))
    method = FedDPA(clipped=True, bound=0.5)
    assert_close(method.clip(sent, near, len(server.roster), server.rng), near)
    found = minus(method.clip(sent, far, len(server.roster), server.rng), {name: sent[name] for name in far})
    assert_close(found, {"a": torch.tensor([0.3, 0.0]), "b": torch.tensor([[0.4]])})


def test_clip__adds_noise_of_the_stated_size(play, clouds):
    server = play(FedDPA(), clouds("mlp2", "mlp2", "mlp2", "mlp2"), rounds=0).engine.server(1)
    sent = {"a": torch.zeros(20_000)}
    found = FedDPA(clipped=True, bound=0.5, noise_multiplier=3.0).clip(sent, sent, len(server.roster), server.rng)["a"]
    assert float(found.std()) == pytest.approx(0.5 * 3.0 / 2, rel=0.03)  # the root of four clients
    assert abs(float(found.mean())) < 0.03


def test_a_round_with_clipping_is_the_mean_of_clipped_updates_by_examples(play, clouds):
    run = play(FedDPA(FULL, clipped=True, bound=0.01), clouds("mlp2", "mlp2", sizes=(10, 30)))
    sent, replies = run.states[0].weights["all"], run.wire.replied["local_update"][0]
    updates = [minus(replies[id]["weights"], sent) for id in (0, 1)]
    lengths = [torch.cat([tensor.flatten() for tensor in update.values()]).norm() for update in updates]
    assert min(lengths) > 0.01
    for name, found in run.state.weights["all"].items():
        first, second = (0.01 / length * update[name] for length, update in zip(lengths, updates, strict=True))
        assert_close(found, sent[name] + 0.25 * first + 0.75 * second)


def test_a_bound_that_nobody_reaches_changes_nothing(play, clouds):
    federation = clouds("norm2", "norm3")
    methods = [FedDPA(FULL, clipped=limited, bound=100.0, lambda2=0.0) for limited in (True, False)]
    runs = [play(method, federation, rounds=2) for method in methods]
    assert_close(runs[0].state.weights, runs[1].state.weights)


# Limits and refusals


def test_with_nothing_of_their_own_and_no_constraint_it_is_fedavg_bit_for_bit(play, clouds):
    federation, long = clouds("norm2", "norm3"), LocalTraining("adam", lr=0.01, batch_size=8, epochs=2)
    runs = [play(m, federation, rounds=3) for m in (FedDPA(long, threshold=1.0, lambda2=0.0), FedAvg(long))]
    assert_close(runs[0].state.weights, runs[1].state.weights, **EXACTLY)


def test_it_needs_classes():
    assert FedDPA().needs() == {Need.NESTED_LAYERS, Need.CLASSES, Need.SHARED_LAYERS}


@pytest.mark.parametrize(
    "changes",
    [{"threshold": 1.1}, {"lambda1": -1.0}, {"lambda2": -1.0}, {"bound": 0.0}, {"noise_multiplier": 1.0}],
)
def test_what_is_out_of_range_is_refused_by_name(changes):
    with pytest.raises(ValueError, match=rf"^{next(iter(changes))}: expected"):
        replace(FedDPA(), **changes)


def test_a_sharing_that_averages_nothing_is_refused():
    with pytest.raises(ValueError, match=r"^sharing.scope: expected one that averages"):
        FedDPA(sharing=Sharing("none"))
