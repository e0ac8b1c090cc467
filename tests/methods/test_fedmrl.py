"""FedMRL: the mixed representation and its two heads, what is averaged, and what stays."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError
from potluck.core.needs import Need
from potluck.core.nets.weights import parameters_of, weights_of
from potluck.core.requests.examples import Batch
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedmrl import FedMRL, Matryoshka, MatryoshkaLoss, both_heads
from potluck.models.contract import StagedNet
from potluck.parts.means import Aggregate

EXACTLY = {"rtol": 0, "atol": 0}
FULL = LocalTraining("sgd", lr=0.1, batch_size=64)  # one full step
STILL = LocalTraining("sgd", lr=0.0, batch_size=64)
SHORT = LocalTraining(lr=0.01, epochs=2, batch_size=4)


def narrow():
    """A common net whose last layer reads five numbers; that of every client reads more."""
    return StagedNet({"stem": nn.Sequential(nn.Linear(6, 7), nn.ReLU()), "next": nn.Linear(7, 5)}, nn.Linear(5, 3))


@pytest.fixture
def narrowed(clouds):
    """A federation with that net as the server's."""

    def make(*architectures, **options):
        federation = clouds(*architectures, **options)
        known = {**federation.architectures, "narrow": narrow}
        return replace(federation, architectures=known, server_architecture="narrow")

    return make


def replied(run, id):
    return run.wire.replied["local_update"][-1][id]["common"]


def by_hand(net, inputs):
    """Logits of the common head and of the client's, from the nets' own layers."""
    common, own = (staged.pool(staged.stages(inputs)) for staged in (net.common, net.own))
    mixed = torch.cat([common, own], 1) @ net.projector.weight.T + net.projector.bias
    return net.common.head(mixed[:, : common.shape[1]]), net.own.head(mixed)


# The net and its loss


def test_a_head_reads_its_part_of_the_mixed_representation(play, narrowed):
    federation = narrowed("mlp2", "wide2", "norm3")
    run = play(FedMRL(STILL), federation, rounds=0)
    for id, width in enumerate((8, 16, 8)):
        net, inputs = run.model(id), federation.sites[id].train.inputs
        assert isinstance(net, Matryoshka)
        assert net.projector.weight.shape == (width, 5 + width)
        net.eval()
        common, own = by_hand(net, inputs)
        assert_close(both_heads(net, inputs), (common, own))
        assert_close(net(inputs), own)


def test_the_common_head_reads_the_first_numbers_of_a_case_done_by_hand():
    common, own = (StagedNet({"a": nn.Linear(1, d, bias=False), "b": nn.Identity()}, nn.Linear(d, 2)) for d in (1, 2))
    net = Matryoshka(common, own, nn.Linear(3, 2))
    values = {
        "common.stages.a.weight": [[2.0]],
        "own.stages.a.weight": [[3.0], [5.0]],
        "projector.weight": [[1.0, 10.0, 100.0], [0.0, 1.0, -1.0]],
        "projector.bias": [0.5, 0.0],
        "common.head.weight": [[1.0], [-1.0]],
        "common.head.bias": [0.0, 1.0],
        "own.head.weight": [[1.0, 1.0], [0.0, 2.0]],
        "own.head.bias": [0.0, 0.0],
    }
    net.load_state_dict({name: torch.tensor(value) for name, value in values.items()})
    # the representations of 1 are 2 and (3, 5): mixed they are 2 + 30 + 500 + 0.5 and 3 - 5
    common_logits, own_logits = both_heads(net, torch.ones(1, 1))
    assert_close(common_logits, torch.tensor([[532.5, -531.5]]))
    assert_close(own_logits, torch.tensor([[530.5, -4.0]]))


def test_the_loss_weighs_both_heads_losses(play, narrowed):
    federation = narrowed("mlp2")
    net, data = play(FedMRL(STILL), federation, rounds=0).model(0), federation.sites[0].train
    common, own = by_hand(net, data.inputs)
    expected = 0.25 * F.cross_entropy(common, data.labels) + 2.0 * F.cross_entropy(own, data.labels)
    loss = MatryoshkaLoss(F.cross_entropy, common_weight=0.25, own_weight=2.0)
    assert_close(loss(net, Batch(data.inputs, data.labels, {}), {}), expected)


def test_both_losses_reach_both_extractors_and_the_projector_and_one_head_each(play, narrowed):
    federation = narrowed("mlp2")
    net, data = play(FedMRL(STILL), federation, rounds=0).model(0), federation.sites[0].train
    batch = Batch(data.inputs, data.labels, {})
    for weights, idle in (((1.0, 0.0), "own.head"), ((0.0, 1.0), "common.head")):
        net.zero_grad()
        MatryoshkaLoss(F.cross_entropy, *weights)(net, batch, {}).backward()
        moved = {name for name, p in net.named_parameters() if p.grad is not None and p.grad.any()}
        assert moved == {name for name, _ in net.named_parameters() if not name.startswith(idle)}


# A round


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_a_round_is_the_papers(play, narrowed, weighting):
    federation = narrowed("mlp2", "wide2", "norm2")
    run = play(FedMRL(FULL, common_weight=0.5, own_weight=2.0, weighting=weighting), federation, rounds=0)
    nets = [run.model(id).train() for id in range(3)]
    for id, net in enumerate(nets):
        data = federation.sites[id].train
        common, own = by_hand(net, data.inputs)
        loss = 0.5 * F.cross_entropy(common, data.labels) + 2.0 * F.cross_entropy(own, data.labels)
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
    run.round()
    shares = torch.tensor([12.0, 20.0, 9.0] if weighting == "samples" else [1.0, 1.0, 1.0])
    shares = shares / shares.sum()
    copies = [weights_of(net.common) for net in nets]
    for name, tensor in run.state.common.items():
        expected = sum(share * copy[name] for share, copy in zip(shares, copies, strict=True))
        assert_close(tensor, expected, rtol=1e-4, atol=1e-6)
    for id, net in enumerate(nets):
        assert_close(parameters_of(run.model(id).own), parameters_of(net.own), rtol=1e-4, atol=1e-6)
        assert_close(weights_of(run.model(id).projector), weights_of(net.projector), rtol=1e-4, atol=1e-6)


def test_only_the_common_net_travels(play, narrowed):
    run = play(FedMRL(SHORT), narrowed("mlp2", "wide2"))
    size = sum(tensor.numel() * tensor.element_size() for tensor in run.state.common.values())
    assert run.reports[0].traffic.down == {"common": 2 * size}
    assert run.reports[0].traffic.up == {"common": 2 * size, "examples": 2 * 8}


def test_own_nets_and_projectors_go_on_and_copies_start_from_the_average(play, narrowed):
    run = play(FedMRL(SHORT), narrowed("mlp2", "mlp3"), rounds=1)
    before = [weights_of(run.model(id)) for id in range(2)]
    run.round(0)
    assert_close(run.wire.sent["local_update"][-1][0]["common"], run.states[1].common, **EXACTLY)
    after = [weights_of(run.model(id)) for id in range(2)]
    for name, tensor in after[1].items():  # who was not drawn has a new common net, and nothing else
        old = run.state.common[name.removeprefix("common.")] if name.startswith("common.") else before[1][name]
        assert_close(tensor, old, **EXACTLY)
    for part in ("own.head.weight", "projector.weight", "common.head.weight"):
        assert not torch.equal(after[0][part], before[0][part])


def test_clients_begin_equal_and_the_common_net_is_no_copy_of_theirs(play, clouds):
    federation = clouds("mlp2", "mlp2")
    run = play(FedMRL(STILL), federation, rounds=0)
    one, two = run.model(0), run.model(1)
    assert_close(weights_of(one), weights_of(two), **EXACTLY)
    assert federation.server_architecture == "mlp2"
    assert not torch.equal(one.own.head.weight, one.common.head.weight)


def test_a_robust_rule_applies_to_the_copies(play, narrowed):
    run = play(FedMRL(SHORT, combine=Aggregate("median")), narrowed("mlp2", "mlp3", "wide2"))
    copies = torch.stack([replied(run, id)["head.weight"] for id in range(3)])
    assert_close(run.state.common["head.weight"], copies.median(0).values)


def test_a_net_narrower_than_the_common_one_is_refused_at_the_start(play, clouds):
    federation = clouds("wide2", "mlp2")
    with pytest.raises(ConfigError, match=r"features of client 1, mlp2: expected at least 16.* found 8"):
        play(FedMRL(STILL), federation, rounds=0)


def test_it_needs_nets_that_split():
    assert FedMRL().needs() == {Need.SPLIT_MODEL}


@pytest.mark.parametrize("changes", [{"common_weight": -1.0}, {"own_weight": -1.0}, {"weighting": "equal"}])
def test_what_is_out_of_range_is_refused_by_name(changes):
    with pytest.raises(ValueError, match=rf"^{next(iter(changes))}: expected"):
        replace(FedMRL(), **changes)
