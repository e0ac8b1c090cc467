"""Fed-ET: a consensus by confidence, a part for those who disagree, and heads that travel both ways."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError
from potluck.core.ground.rng import Key, isolated
from potluck.core.needs import Need, Offer
from potluck.core.nets.weights import load
from potluck.core.requests.examples import Batch, Examples
from potluck.core.requests.fit import LocalTraining
from potluck.experiment.federation.needs import check_needs
from potluck.methods.fedavg import FedAvg
from potluck.methods.fedet import FedET, TransferLoss, consensus, shares
from potluck.models.contract import StagedNet
from potluck.parts.heads import COMMON_HEAD, SERVERS_HEAD, WHOLE_HEAD
from potluck.parts.means import Aggregate
from potluck.parts.sharing import Sharing

EXACTLY = {"rtol": 0, "atol": 0}
FULL = LocalTraining("sgd", lr=0.1, batch_size=64)  # one full step
STILL = LocalTraining("sgd", lr=0.0, batch_size=64)
ONE_STEP = FedET(FULL, FULL, diversity=0.5)
HEAD = ("head.weight", "head.bias")
LOGITS = torch.tensor(
    [
        [[3.0, 0.0, 0.0], [0.0, 3.0, 0.0]],  # variance 2 in both rows
        [[0.0, 3.0, 0.0], [0.0, 6.0, 0.0]],  # 2 and 8
        [[6.0, 0.0, 0.0], [0.0, 1.5, 0.0]],  # 8 and 1/2
    ]
)


def large(width=30, features=8):
    """A server's net that no client could train, with the clients' head unless `features` says otherwise."""
    stages = {
        "stem": nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU()),
        "deep": nn.Sequential(nn.Linear(width, features), nn.ReLU()),
    }
    with isolated(Key(("large",))):
        return StagedNet(stages, nn.Linear(features, 3))


def served(federation, net=large):
    """The same clients beside a large server's net, with public data of which clients have different opinions."""
    inputs = 3 * torch.randn(40, 6, generator=torch.Generator().manual_seed(3))
    architectures = {**federation.architectures, "large": net}
    public = Examples(inputs, torch.zeros(40, dtype=torch.int64))
    return replace(federation, architectures=architectures, server_architecture="large", public=public)


@pytest.fixture
def mixed(clouds):
    return served(clouds("norm2", "mlp3", "norm2", labels=((0, 1), (1, 2), (0, 2))))


def replied(run):
    return run.wire.replied["local_update"][-1]


def net_of(run, name, weights):
    return load(run.engine.federation.architectures[name](), weights)


def logits_of(run):
    """The clients' logits for the public data, by their models as the server receives them: (clients, rows, 3)."""
    federation = run.engine.federation
    nets = (
        net_of(run, federation.sites[id].architecture, {**reply["weights"], **reply.get("buffers", {})}).eval()
        for id, reply in replied(run).items()
    )
    with torch.no_grad():
        return torch.stack([net(federation.public.inputs) for net in nets])


def mean_head(run):
    heads = [{name: reply["weights"][name] for name in HEAD} for reply in replied(run).values()]
    return {name: sum(head[name] for head in heads) / len(heads) for name in HEAD}


# The consensus


def test_shares__are_variances_over_their_sum():
    confidence = LOGITS.var(2, correction=0)
    assert_close(confidence, torch.tensor([[2.0, 2.0], [2.0, 8.0], [8.0, 0.5]]))
    found = shares(confidence, torch.ones(3, 2))
    assert_close(found, torch.tensor([[1 / 6, 4 / 21], [1 / 6, 16 / 21], [4 / 6, 1 / 21]]))
    assert_close(found.sum(0), torch.ones(2))


def test_shares__of_marked_clients_alone_and_of_nobody():
    among = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    found = shares(torch.tensor([[1.0, 1.0], [3.0, 1.0], [9.0, 1.0]]), among)
    assert_close(found, torch.tensor([[0.25, 0.0], [0.75, 0.0], [0.0, 0.0]]))


def test_shares__are_equal_where_no_marked_client_is_confident():
    found = shares(torch.tensor([[0.0], [0.0], [5.0]]), torch.tensor([[1.0], [1.0], [0.0]]))
    assert_close(found, torch.tensor([[0.5], [0.5], [0.0]]))


def test_consensus__by_hand():
    """Row 1: 1/6 [3,0,0] + 1/6 [0,3,0] + 4/6 [6,0,0] = [4.5, 0.5, 0], and client 1 disagrees. Row 2: all agree."""
    labels, diverse = consensus(LOGITS, "skip")
    assert labels.tolist() == [0, 1]
    assert_close(diverse, torch.stack([torch.tensor([0.0, 3.0, 0.0]).softmax(0), torch.zeros(3)]))


def test_consensus__several_who_disagree_are_weighed_among_each_other():
    others = torch.tensor([[[0.0, 3.0, 0.0]], [[0.0, 0.0, 6.0]], [[30.0, 0.0, 0.0]]])  # variances 2, 8, 200
    labels, diverse = consensus(others, "skip")
    assert labels.tolist() == [0]
    assert_close(diverse[0], torch.tensor([0.0, 0.2 * 3, 0.8 * 6]).softmax(0))


def test_consensus__is_neither_a_vote_nor_the_plain_mean_of_logits():
    """Two of three choose class 0, as would the mean of the logits, [4, 0, 3.9] / 3; the third is more confident."""
    logits = torch.tensor([[[2.0, 0.0, 0.0]], [[2.0, 0.0, 0.0]], [[0.0, 0.0, 3.9]]])
    labels, diverse = consensus(logits, "skip")
    assert labels.tolist() == [2]
    assert_close(diverse[0], torch.tensor([2.0, 0.0, 0.0]).softmax(0))


@pytest.mark.parametrize(("unanimous", "expected"), [("skip", 0.0), ("uniform", 1 / 3)])
def test_consensus__equal_clients_teach_their_own_class_and_no_diversity(unanimous, expected):
    labels, diverse = consensus(LOGITS[:1].expand(4, 2, 3), unanimous)
    assert labels.tolist() == LOGITS[0].argmax(1).tolist()
    assert_close(diverse, torch.full((2, 3), expected))


def test_a_clients_share_grows_with_the_scale_of_its_logits_and_not_with_their_offset():
    everyone = torch.ones(3, 2)
    before = shares(LOGITS.var(2, correction=0), everyone)
    louder, moved = LOGITS.clone(), LOGITS.clone()
    louder[1] *= 1.5
    moved[1] += 7.0
    assert bool((shares(louder.var(2, correction=0), everyone)[1] > before[1]).all())
    assert_close(shares(moved.var(2, correction=0), everyone), before)


# The loss


def lesson(labels, diverse):
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).double()
    return Batch(x, torch.full((5,), 99), {"labels": labels, "diverse": diverse})


def test_transfer_loss__has_the_gradient_of_the_papers_by_finite_differences():
    """CE to the labels + lambda KL(softmax s_div || net), both means over all five rows, two of them without s_div."""
    net = nn.Linear(4, 3).double()
    labels = torch.tensor([0, 2, 1, 1, 0])
    goal = torch.randn(5, 3, generator=torch.Generator().manual_seed(1)).double().softmax(1)
    disputed = torch.tensor([1, 0, 1, 1, 0]).double()
    batch = lesson(labels, goal * disputed[:, None])
    TransferLoss(0.7)(net, batch, {}).backward()

    def value(step):
        weight = net.weight.detach().clone()
        weight[1, 2] += step
        q = F.linear(batch.inputs, weight, net.bias.detach()).softmax(1)
        divergence = (goal * (goal / q).log()).sum(1) * disputed
        return float((-q[torch.arange(5), labels].log() + 0.7 * divergence).sum() / 5)

    slope = (value(1e-6) - value(-1e-6)) / 2e-6
    assert net.weight.grad[1, 2].item() == pytest.approx(slope, rel=1e-6)


def test_transfer_loss__without_diversity_is_the_cross_entropy_to_the_labels():
    net, labels = nn.Linear(4, 3).double(), torch.tensor([0, 2, 1, 1, 0])
    batch = lesson(labels, torch.rand(5, 3).double())
    assert_close(TransferLoss(0.0)(net, batch, {}), F.cross_entropy(net(batch.inputs), labels), **EXACTLY)


# A round


def test_a_servers_step_is_the_papers(play, mixed):
    """From the mean of the heads on its own body, by the labels and the divergence, without the method's functions."""
    run = play(ONE_STEP, mixed, rounds=2)
    net = net_of(run, "large", {**run.states[1].common, **mean_head(run)}).train()
    s = logits_of(run)
    alpha = s.var(2) / s.var(2).sum(0)
    y = (alpha[:, :, None] * s).sum(0).argmax(1)
    differ = s.argmax(2) != y
    assert 0 < int(differ.any(0).sum()) < 40  # else one of the two kinds of rows would be missing
    total = torch.zeros(())
    out = F.log_softmax(net(mixed.public.inputs), 1)
    for row in range(40):
        total = total - out[row, y[row]]
        if who := [k for k in range(3) if differ[k, row]]:
            v = s[who, row].var(1)
            goal = F.softmax((v[:, None] * s[who, row]).sum(0) / v.sum(), 0)
            total = total + 0.5 * (goal * (goal.log() - out[row])).sum()
    gradients = torch.autograd.grad(total / 40, list(net.parameters()))
    for parameter, gradient in zip(net.parameters(), gradients, strict=True):
        parameter.data -= 0.1 * gradient
    assert_close(run.state.common, dict(net.state_dict()), rtol=1e-4, atol=1e-6)


def test_a_prototype_is_the_mean_of_its_clients_with_the_servers_head(play, mixed):
    run = play(ONE_STEP, mixed)
    sent = {id: {**reply["weights"], **reply.get("buffers", {})} for id, reply in replied(run).items()}
    for name, tensor in run.state.weights["norm2"].items():
        if name in HEAD:
            assert_close(tensor, run.state.common[name], **EXACTLY)
        elif tensor.is_floating_point():
            assert_close(tensor, (sent[0][name] + sent[2][name]) / 2)
    for name, tensor in run.state.weights["mlp3"].items():
        assert_close(tensor, (run.state.common if name in HEAD else sent[1])[name], **EXACTLY)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_the_server_starts_a_round_with_the_plain_mean_of_all_heads(play, mixed, weighting):
    run = play(FedET(FULL, STILL, sharing=Sharing("architecture", weighting)), mixed)
    body = run.states[0].common
    for name, tensor in run.state.common.items():
        if name in HEAD:
            assert_close(tensor, mean_head(run)[name])
            assert not torch.equal(tensor, body[name])
        elif "running" not in name and "num_batches" not in name:
            assert_close(tensor, body[name], **EXACTLY)


def test_examples_weigh_in_prototypes_if_asked_to(play, clouds):
    federation = served(clouds("mlp2", "mlp2", sizes=(3, 60)))
    run = play(FedET(FULL, STILL, sharing=Sharing("architecture", "samples")), federation)
    first, second = (reply["weights"] for reply in replied(run).values())
    for name in set(first) - set(HEAD):
        assert_close(run.state.weights["mlp2"][name], (3 * first[name] + 60 * second[name]) / 63)


def test_without_travelling_heads_server_and_prototypes_share_nothing(play, mixed):
    run = play(replace(ONE_STEP, representation="none"), mixed)
    apart = play(FedAvg(FULL, Sharing("architecture", "uniform")), mixed)
    assert_close(run.state.weights, apart.state.weights, **EXACTLY)
    still = play(FedET(FULL, STILL, representation="none"), mixed)
    assert_close({n: still.state.common[n] for n in HEAD}, {n: still.states[0].common[n] for n in HEAD}, **EXACTLY)


def test_layer_by_layer_prototypes_share_their_common_layers_and_the_servers_head(play, clouds):
    federation = served(clouds("mlp2", "mlp3"))
    run = play(replace(ONE_STEP, sharing=Sharing("layer", "uniform")), federation)
    one, two = (reply["weights"] for reply in replied(run).values())
    for name, tensor in run.state.weights["all"].items():
        if name in HEAD:
            assert_close(tensor, run.state.common[name], **EXACTLY)
        else:
            assert_close(tensor, (one[name] + two[name]) / 2 if name in one else two[name])
    assert one.keys() < two.keys()


def test_clients_label_in_evaluation_mode_and_the_server_keeps_the_publics_statistics(play, mixed):
    run = play(FedET(FULL, STILL), mixed)
    label_loss = run.reports[0].notes["transfer_loss"]
    labels, diverse = consensus(logits_of(run), "skip")  # logits_of evaluates
    net = net_of(run, "large", {**run.states[0].common, **mean_head(run)}).train()
    logs = F.log_softmax(net(mixed.public.inputs), 1).detach()
    expected = F.nll_loss(logs, labels) - 0.05 * (diverse * logs).sum(1).mean()
    assert label_loss == pytest.approx(float(expected), rel=1e-4)
    before, after = (state.common["stages.stem.1.running_mean"] for state in run.states)
    assert not torch.equal(before, after)


def test_the_server_learns_from_clients_none_of_whom_knows_every_class(play, clouds):
    federation = served(clouds("mlp2", "mlp3", "mlp2", sizes=(60, 60, 60), labels=((0, 1), (1, 2), (2, 0))))
    clear = {id: clearer(site.train) for id, site in federation.sites.items()}
    sites = {id: replace(site, train=clear[id]) for id, site in federation.sites.items()}
    x, y = torch.cat([own.inputs for own in clear.values()]), torch.cat([own.targets for own in clear.values()])
    federation = replace(federation, sites=sites, public=Examples(x, torch.zeros_like(y)))
    run = play(FedET(LocalTraining(lr=0.02, epochs=3), LocalTraining(lr=0.01, epochs=5)), federation, rounds=3)
    right = [float((run.engine.global_model(s).eval()(x).argmax(1) == y).float().mean()) for s in run.states]
    assert right[0] < 0.5
    assert right[-1] > 0.8


def clearer(examples):
    """The same classes further apart."""
    return Examples(examples.inputs + 3 * F.one_hot(examples.targets, 6), examples.targets)


# Who takes part, and what is evaluated


def test_an_architecture_that_was_not_drawn_keeps_its_body_and_gets_the_servers_head(play, mixed):
    run = play(ONE_STEP, mixed, rounds=0)
    run.round(0, 2)
    for name, tensor in run.state.weights["mlp3"].items():
        assert_close(tensor, (run.state.common if name in HEAD else run.states[0].weights["mlp3"])[name], **EXACTLY)
    run.round(1)  # a newcomer starts from that
    assert_close(run.wire.sent["local_update"][1][1]["weights"], run.states[1].weights["mlp3"], **EXACTLY)


def test_those_who_were_not_drawn_do_not_teach(play, mixed):
    run = play(ONE_STEP, mixed, rounds=0)
    run.round(0, 1)
    alone = play(ONE_STEP, replace(mixed, sites={id: mixed.sites[id] for id in (0, 1)}))
    assert_close(run.state.common, alone.state.common, **EXACTLY)


def test_clients_start_from_their_prototype_and_the_global_model_is_the_servers(play, mixed):
    run = play(FedET(STILL, FULL), mixed, rounds=2)
    for id, architecture in enumerate(("norm2", "mlp3", "norm2")):
        sent = run.wire.sent["local_update"][1][id]
        expected = run.states[1].weights[architecture]
        assert_close({**sent["weights"], **sent.get("buffers", {})}, expected, **EXACTLY)
        assert_close(dict(run.model(id).state_dict()), run.state.weights[architecture], **EXACTLY)
        assert run.kept(id).get("model") is None
    assert_close(dict(run.engine.global_model(run.state).state_dict()), run.state.common, **EXACTLY)


def test_public_targets_are_never_read_and_rows_are_drawn_anew(play, mixed):
    foreign = replace(mixed, public=Examples(mixed.public.inputs, torch.full((40,), torch.nan)))
    own, other = play(ONE_STEP, mixed, rounds=2), play(ONE_STEP, foreign, rounds=2)
    assert_close(own.state.common, other.state.common, **EXACTLY)
    few = play(FedET(STILL, replace(STILL, batch_size=10), public_examples=10), mixed, rounds=2)
    means = [state.common["stages.stem.1.running_mean"] for state in few.states]
    assert not torch.allclose(means[1] - 0.9 * means[0], means[2] - 0.9 * means[1])
    assert few.state.common["stages.stem.1.num_batches_tracked"] == 2  # of ten rows each


def test_a_robust_rule_combines_prototypes_and_heads(play, clouds):
    federation = served(clouds("mlp2", "mlp2", "mlp2"))
    run = play(FedET(FULL, STILL, sharing=Sharing("architecture", "uniform", combine=Aggregate("median"))), federation)
    weights = [reply["weights"] for reply in replied(run).values()]
    for name, tensor in run.state.weights["mlp2"].items():
        assert_close(tensor, torch.stack([one[name] for one in weights]).median(0).values)
    assert_close(run.state.common["head.bias"], run.state.weights["mlp2"]["head.bias"], **EXACTLY)


def test_messages_are_fedavg_s(play, mixed):
    traffic = [play(m, mixed).reports[0].traffic for m in (ONE_STEP, FedAvg(sharing=Sharing("architecture")))]
    assert (traffic[0].up, traffic[0].down) == (traffic[1].up, traffic[1].down)


# What it needs


def test_heads_of_one_shape_are_needed_only_where_they_travel():
    heads = {WHOLE_HEAD, COMMON_HEAD, SERVERS_HEAD}
    assert FedET().needs() == {Need.PUBLIC_DATA, Need.CLASSES, Need.SPLIT_MODEL} | heads
    assert replace(FedET(), representation="none").needs() == {Need.PUBLIC_DATA, Need.CLASSES}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"public": None}, "needs public data"),
        ({"public": Examples(torch.zeros(0, 6), torch.zeros(0, dtype=torch.int64))}, "needs public data"),
        ({"server": partial(large, features=9)}, r"large has \{'weight': \(3, 9\).* that of mlp3 .* \(3, 8\)"),
        ({"server": partial(nn.Linear, 6, 3)}, "large has none: Linear cannot be split"),
    ],
)
def test_a_federation_in_which_it_cannot_work_is_refused_before_it_starts(mixed, change, found):
    net = change.get("server", large)
    change = {name: value for name, value in change.items() if name != "server"}
    with pytest.raises(ConfigError, match=found):
        check_needs(FedET().needs(), "fedet", Offer.of(replace(served(mixed, net), **change)))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"sharing": Sharing("none")}, r"sharing\.scope: expected 'architecture', 'layer' or 'model', found 'none'"),
        (
            {"sharing": Sharing("architecture", buffers="drop")},
            r"sharing\.buffers: expected 'average', .* found 'drop'",
        ),
        ({"diversity": -0.1}, "diversity: expected at least 0"),
        ({"public_examples": 0}, "public_examples: expected at least 1"),
        ({"unanimous": "mask"}, "unanimous: expected"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(changes, found):
    with pytest.raises(ValueError, match=found):
        replace(FedET(), **changes)
