"""FML: the two losses, what each net learns from the other, and what the server makes of the copies."""

from dataclasses import replace
from math import log

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.needs import Need
from potluck.core.nets.weights import learnt_of, load, weights_of
from potluck.core.requests.examples import Batch
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedavg import FedAvg
from potluck.methods.fedorion import FedORION
from potluck.methods.fml import FML, MutualLosses
from potluck.methods.local import Local
from potluck.models.contract import StagedNet
from potluck.parts.means import Aggregate
from potluck.parts.sharing import Sharing

EXACTLY = {"rtol": 0, "atol": 0}
FULL = LocalTraining("sgd", lr=0.1, batch_size=64)  # one full step
STILL = LocalTraining("sgd", lr=0.0, batch_size=4)
SHORT = LocalTraining(lr=0.01, epochs=2, batch_size=4)


class Says(nn.Module):
    """A net whose logits are its parameters, whatever it is shown."""

    def __init__(self, *rows):
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(rows, dtype=torch.float64))

    def forward(self, inputs):
        return self.logits


def of_shares(*rows):
    """Logits whose softmax is these probabilities."""
    return Says(*[[log(p) for p in row] for row in rows])


def pair(own, common):
    return nn.ModuleDict({"own": own, "common": common})


def batch(*labels):
    return Batch(torch.zeros(len(labels), 1), torch.tensor(labels), {})


def own_nets(run, id=0):
    """A client's own net and its copy of the common one, before the round."""
    return run.new_model(id).train(), run.engine.global_model(run.state).train()


def replied(run, id):
    return run.wire.replied["local_update"][-1][id]["common"]


# The losses


def test_the_loss_of_a_case_done_by_hand():
    net = pair(of_shares([0.75, 0.25]), of_shares([0.5, 0.5]))
    kl_from_meme = 0.5 * log(0.5 / 0.75) + 0.5 * log(0.5 / 0.25)
    kl_from_own = 0.75 * log(0.75 / 0.5) + 0.25 * log(0.25 / 0.5)
    assert abs(kl_from_meme - kl_from_own) > 0.01  # the directions differ
    by_hand = 0.3 * -log(0.75) + 0.7 * kl_from_meme + 0.8 * -log(0.5) + 0.2 * kl_from_own
    loss = MutualLosses(F.cross_entropy, alpha=0.3, beta=0.8)(net, batch(0), {})
    assert_close(loss.item(), by_hand, rtol=1e-12, atol=0)


def test_the_loss_is_the_mean_over_the_batch_and_not_over_classes():
    rows = [[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]], [[0.3, 0.3, 0.4], [0.2, 0.5, 0.3]]
    loss = MutualLosses(F.cross_entropy, 0.4, 0.6)
    one, two = (loss(pair(of_shares(rows[0][i]), of_shares(rows[1][i])), batch(2 - i), {}) for i in range(2))
    both = loss(pair(of_shares(*rows[0]), of_shares(*rows[1])), batch(2, 1), {})
    assert_close(both, (one + two) / 2)


@pytest.mark.parametrize(("learner", "peer", "share"), [("own", "common", 0.3), ("common", "own", 0.8)])
def test_each_net_follows_the_slope_of_its_own_loss_alone(learner, peer, share):
    net = pair(Says([0.3, -1.0, 0.5], [2.0, 0.1, -0.4]), Says([-0.2, 0.8, 0.1], [0.5, 0.4, 1.5]))
    labels = torch.tensor([2, 0])
    MutualLosses(F.cross_entropy, alpha=0.3, beta=0.8)(net, batch(2, 0), {}).backward()

    def own_loss(logits):
        taught = net[peer].logits.detach().softmax(1)
        gap = (taught * (taught.log() - logits.log_softmax(1))).sum() / 2
        return share * F.cross_entropy(logits, labels) + (1 - share) * gap

    at, step = net[learner].logits.detach(), 1e-6
    for place in range(6):
        nudge = torch.zeros(6, dtype=torch.float64).index_fill(0, torch.tensor(place), step).view(2, 3)
        slope = (own_loss(at + nudge) - own_loss(at - nudge)) / (2 * step)
        assert_close(net[learner].logits.grad.view(-1)[place], slope, rtol=1e-7, atol=1e-9)


# A round


@pytest.mark.parametrize("architecture", ["mlp3", "norm2"])
def test_a_clients_step_is_the_papers(play, clouds, architecture):
    federation = clouds("norm2", architecture)
    run = play(FML(FULL, alpha=0.3, beta=0.8), federation, rounds=0)
    own, meme = own_nets(run, 1)
    data = federation.sites[1].train
    z_own, z_meme = own(data.inputs), meme(data.inputs)
    p_own, p_meme = z_own.detach().softmax(1), z_meme.detach().softmax(1)

    def kl(taught, logits):
        return (taught * (taught.log() - logits.log_softmax(1))).sum(1).mean()

    losses = {
        own: 0.3 * F.cross_entropy(z_own, data.labels) + 0.7 * kl(p_meme, z_own),
        meme: 0.8 * F.cross_entropy(z_meme, data.labels) + 0.2 * kl(p_own, z_meme),
    }
    for net, loss in losses.items():
        gradients = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
        with torch.no_grad():
            for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
    run.round(1)
    assert_close(weights_of(run.model(1)), weights_of(own))
    assert_close(replied(run, 1), weights_of(meme))
    assert_close(run.state.common, weights_of(meme))  # of one client


def test_running_statistics_move_once_a_batch(play, clouds):
    run = play(FML(replace(SHORT, epochs=1)), clouds("norm2", sizes=(12,)))
    for weights in (run.kept(0)["model"], run.state.common):
        counts = {int(tensor) for name, tensor in weights.items() if name.endswith("num_batches_tracked")}
        assert counts == {3}


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_the_common_model_is_the_mean_of_the_copies(play, clouds, weighting):
    sizes = (12, 20, 9)
    run = play(FML(SHORT, weighting=weighting), clouds("norm2", "norm3", "mlp2", sizes=sizes))
    shares = torch.tensor(sizes if weighting == "samples" else (1, 1, 1)) / (41 if weighting == "samples" else 3)
    for name, tensor in run.state.common.items():
        copies = torch.stack([replied(run, id)[name] for id in range(3)])
        expected = torch.einsum("i,i...->...", shares, copies) if tensor.is_floating_point() else copies.amax(0)
        assert_close(tensor, expected)


def test_a_robust_rule_applies_to_the_copies(play, clouds):
    run = play(FML(SHORT, combine=Aggregate("median")), clouds("mlp2", "mlp3", "mlp2"))
    copies = torch.stack([replied(run, id)["head.weight"] for id in range(3)])
    assert_close(run.state.common["head.weight"], copies.median(0).values)


def test_copies_start_from_the_common_model_and_own_nets_from_where_they_were(play, clouds):
    run = play(FML(STILL), clouds("mlp2", "mlp3"), rounds=2)
    before = [weights_of(run.model(id)) for id in range(2)]
    for sent in run.wire.sent["local_update"]:
        assert_close(sent[0]["common"], run.states[0].common, **EXACTLY)
    moved = play(FML(SHORT), clouds("mlp2", "mlp3"), rounds=1)
    after = weights_of(moved.model(1))
    assert not torch.equal(after["head.weight"], before[1]["head.weight"])
    moved.round(0)
    assert_close(weights_of(moved.model(1)), after, **EXACTLY)  # who is not drawn
    assert_close(moved.wire.sent["local_update"][1][0]["common"], moved.states[1].common, **EXACTLY)


def test_who_is_drawn_late_learns_from_the_current_common_model(play, clouds):
    federation = clouds("mlp2", "norm3", "mlp3")
    run = play(FML(SHORT), federation, rounds=0)
    for _ in range(3):
        run.round(0, 1)
    run.round(2)
    assert_close(run.wire.sent["local_update"][-1][2]["common"], run.states[3].common, **EXACTLY)


def test_clients_are_judged_with_their_own_nets_and_the_server_with_the_common_one(play, clouds):
    run = play(FML(SHORT), clouds("mlp2", "mlp3"))
    for id in range(2):
        assert_close(weights_of(run.model(id)), run.kept(id)["model"], **EXACTLY)
    assert_close(weights_of(run.engine.global_model(run.state)), run.state.common, **EXACTLY)


# What it becomes


def begin(run, **state):
    """Three rounds from another state: FML's common net is drawn apart, that of others is the architecture's."""
    run.states = [replace(run.state, **state)]
    for _ in range(3):
        run.round()


def test_the_common_net_is_no_copy_of_a_clients(play, clouds):
    run = play(FML(SHORT), clouds("mlp2", "mlp2"), rounds=0)
    own, other = weights_of(run.model(0)), weights_of(run.model(1))
    assert_close(own, other, **EXACTLY)
    assert not torch.equal(run.state.common["head.weight"], own["head.weight"])


def test_with_labels_alone_own_nets_are_local_and_copies_fedavg(play, clouds):
    federation = clouds("norm2", "norm2", "norm2")
    ours = play(FML(SHORT, alpha=1.0, beta=1.0), federation, rounds=3)
    fedavg = play(FedAvg(SHORT, Sharing(weighting="uniform")), federation, rounds=0)
    begin(fedavg, weights={"all": ours.states[0].common})
    local = play(Local(SHORT), federation, rounds=3)
    assert_close([s.common for s in ours.states], [s.weights["all"] for s in fedavg.states], **EXACTLY)
    for id in range(3):
        assert_close(weights_of(ours.model(id)), weights_of(local.model(id)), **EXACTLY)


def test_halves_at_twice_the_rate_are_fedorion_without_distillation(play, clouds):
    federation = clouds("norm2", "mlp3")

    def common():
        return StagedNet({"stem": nn.Sequential(nn.Linear(6, 5), nn.ReLU())}, nn.Linear(5, 3))

    federation = replace(
        federation, architectures={**federation.architectures, "small": common}, server_architecture="small"
    )
    training = LocalTraining("sgd", lr=0.05, epochs=2, batch_size=4)
    ours = play(FML(replace(training, lr=0.1)), federation, rounds=3)
    orion = play(FedORION(training, distillation=False, order="simultaneous"), federation, rounds=0)
    begin(orion, common=ours.states[0].common)
    assert_close(ours.state.common, orion.state.common, rtol=1e-4, atol=1e-6)
    for id in range(2):
        assert_close(weights_of(ours.model(id)), weights_of(orion.model(id)), rtol=1e-4, atol=1e-6)


def test_predictions_alone_leave_equal_nets_where_they_are(play, clouds):
    run = play(FML(FULL, alpha=0.0, beta=0.0), clouds("mlp2"), rounds=0)
    net = pair(run.model(0), load(run.model(0), learnt_of(run.model(0))))
    data = run.engine.federation.sites[0].train
    loss = MutualLosses(F.cross_entropy, 0.0, 0.0)(net, Batch(data.inputs, data.labels, {}), {})
    for gradient in torch.autograd.grad(loss, list(net.parameters())):
        assert gradient.abs().amax() < 1e-6


def test_own_nets_learn_from_one_another_by_way_of_the_common_one(play, clouds):
    """Clients that hold two classes each come to know the third, which no client alone does."""
    training = LocalTraining("sgd", lr=0.3, epochs=4, batch_size=12)
    federation = clouds("mlp2", "mlp3", "wide2", sizes=(36,) * 3, labels=((0, 1), (1, 2), (0, 2)))

    def third(alpha):
        run = play(FML(training, alpha=alpha), federation, rounds=4)
        inputs = torch.cat([site.train.inputs for site in federation.sites.values()])
        missing = (2, 0, 1)
        return sum(float(run.model(id)(inputs).softmax(1)[:, c].mean().detach()) for id, c in enumerate(missing))

    assert third(0.3) > 2 * third(1.0)


# Wire, needs, hyper-parameters


def test_it_needs_classes_and_nothing_else():
    assert FML().needs() == {Need.CLASSES}


@pytest.mark.parametrize(
    "changes", [{"alpha": -0.1}, {"alpha": 1.1}, {"beta": -0.1}, {"beta": 1.1}, {"weighting": "equal"}]
)
def test_what_is_out_of_range_is_refused_by_name(changes):
    with pytest.raises(ValueError, match=rf"^{next(iter(changes))}: expected"):
        replace(FML(), **changes)
