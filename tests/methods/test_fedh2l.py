"""FedH2L: what the seeds teach, who teaches whom, and the projection that guards what was learnt from own data."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.needs import Need
from potluck.core.nets.weights import buffers_of, parameters_of
from potluck.core.requests.examples import Batch
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedh2l import FedH2L, OwnLoss, SeedLoss

STILL = LocalTraining("sgd", lr=0.0)
FULL = LocalTraining("sgd", lr=0.1, batch_size=64)  # one full step
CLASSES = 3


@pytest.fixture
def seeded(clouds):
    """Clouds with labelled seeds, of classes 0, 1 and 2 in turn."""

    def make(*architectures, seeds=12, **options):
        federation = clouds(*architectures, public=seeds, **options)
        public, targets = federation.public, torch.arange(seeds) % CLASSES
        clouds_of = F.one_hot(targets, public.inputs.shape[1]) - F.one_hot(public.targets, public.inputs.shape[1])
        labelled = replace(public, inputs=public.inputs + clouds_of, targets=targets)
        return replace(federation, public=labelled, public_labels=True)

    return make


def told(run, exchange=-1):
    return run.wire.replied["learn_and_predict"][exchange]


def sent(run, exchange=-1):
    return run.wire.sent["learn_from_peers"][exchange]


def rows(run, exchange=-1):
    return run.wire.sent["learn_and_predict"][exchange]


def gradients(loss, net):
    return torch.autograd.grad(loss, list(net.parameters()), allow_unused=True)


def stepped(net, found, rate):
    with torch.no_grad():
        for parameter, gradient in zip(net.parameters(), found, strict=True):
            parameter -= rate * gradient


def product(left, right):
    return sum((a * b).sum() for a, b in zip(left, right, strict=True))


# The loss


def test_seed_loss__has_the_gradient_of_labels_and_of_the_divergence_from_each_peer():
    torch.manual_seed(0)
    net = nn.Linear(4, CLASSES).double()
    inputs, targets = torch.randn(5, 4).double(), torch.tensor([0, 1, 2, 1, 0])
    peers = [torch.randn(5, CLASSES).double().softmax(1) for _ in range(3)]

    def by_hand():
        log_p = net(inputs).log_softmax(1)
        own = -log_p[torch.arange(5), targets].mean()
        apart = sum((p * (p.log() - log_p)).sum() / 5 for p in peers)  # KL(p_j || p_i), the mean over seeds
        return own + 0.7 * apart

    batch = Batch(inputs, targets, {"peers": sum(peers)})
    loss = SeedLoss(F.cross_entropy, 0.7)
    found, expected = gradients(loss(net, batch, {}), net), gradients(by_hand(), net)
    assert_close(found, expected)
    place, ends = (1, 2), []
    for sign in (1, -1):
        with torch.no_grad():
            net.weight[place] += sign * 1e-6
            ends.append(by_hand())
            net.weight[place] -= sign * 1e-6
    assert_close(found[0][place], (ends[0] - ends[1]) / 2e-6, rtol=1e-5, atol=1e-8)


def test_seed_loss__moves_predictions_to_those_of_the_peers():
    net = nn.Linear(1, CLASSES, bias=False)
    nn.init.zeros_(net.weight)
    batch = Batch(torch.ones(1, 1), torch.tensor([0]), {"peers": torch.tensor([[0.1, 0.1, 0.8]]) * 4})
    stepped(net, gradients(SeedLoss(F.cross_entropy, 10.0)(net, batch, {}), net), 0.01)
    p = net(batch.inputs).softmax(1)[0]
    assert p[2] > 1 / 3 > p[1]


# Who teaches whom


@pytest.mark.parametrize("weighting", ["sum", "mean"])
def test_each_client_is_sent_the_predictions_of_all_others_and_not_its_own(weighting, play, seeded):
    run = play(FedH2L(FULL, FULL, weighting=weighting), seeded("mlp2", "mlp3", "norm2"))
    for id, message in sent(run).items():
        others = [reply["predictions"] for other, reply in told(run).items() if other != id]
        assert len(others) == 2
        expected = (others[0] + others[1]) / (1 if weighting == "sum" else 2)
        assert_close(message["peers"], expected)


def test_clients_tell_what_their_locally_trained_networks_predict_of_the_seeds_drawn(play, seeded):
    federation = seeded("norm2", "mlp3")
    run = play(FedH2L(FULL, STILL, public_examples=5, conflicts="keep"), federation)
    for id, message in rows(run).items():
        assert len(message["rows"].unique()) == 5
        inputs = federation.public.inputs[message["rows"]]
        if id == 1:  # the other's running statistics have moved with the seeds since
            assert_close(told(run)[id]["predictions"], run.model(id).eval()(inputs).softmax(1).detach())
    first, second = rows(run)[0]["rows"], rows(play(FedH2L(FULL, STILL, public_examples=5), federation, 2))[1]["rows"]
    assert first.tolist() != second.tolist()


def test_clients_train_on_their_own_data_before_they_tell(play, seeded):
    federation = seeded("mlp2")
    run = play(FedH2L(FULL, STILL, conflicts="keep"), federation, rounds=0)
    net, train = run.model(0), federation.sites[0].train
    run.round()
    stepped(net, gradients(F.cross_entropy(net(train.inputs), train.targets), net), 0.1)
    assert_close(parameters_of(run.model(0)), parameters_of(net))
    assert_close(told(run)[0]["predictions"], net(federation.public.inputs[rows(run)[0]["rows"]]).softmax(1).detach())


@pytest.mark.parametrize("conflicts", ["keep", "project"])
def test_seeds_are_not_augmented(conflicts, play, seeded):
    plain = seeded("mlp2", "mlp3")
    public = replace(plain.public, preprocess=lambda inputs, rng: inputs if rng is None else 100 * inputs)
    runs = [
        play(FedH2L(STILL, FULL, conflicts=conflicts), federation)
        for federation in (plain, replace(plain, public=public))
    ]
    one, other = (parameters_of(run.model(0)) for run in runs)
    assert_close(one, other, rtol=0, atol=0)


def test_a_client_alone_learns_the_seeds_labels_and_nothing_is_sent_to_it(play, seeded):
    run = play(FedH2L(STILL, FULL, conflicts="keep", strength=5.0), seeded("mlp2"), rounds=0)
    net, seeds = run.model(0), run.engine.federation.public
    run.round()
    assert "peers" not in sent(run)[0]
    stepped(net, gradients(F.cross_entropy(net(seeds.inputs), seeds.labels), net), 0.1)
    assert_close(parameters_of(run.model(0)), parameters_of(net))


def test_a_newcomer_with_an_architecture_nobody_had_teaches_and_learns(play, seeded):
    run = play(FedH2L(FULL, FULL), seeded("mlp2", "mlp2", "wide2"), rounds=0)
    run.round(0, 1)
    before = parameters_of(run.model(2))
    run.round(1, 2)
    assert_close(sent(run)[1]["peers"], told(run)[2]["predictions"])
    assert not torch.equal(parameters_of(run.model(2))["head.weight"], before["head.weight"])


def test_a_class_that_a_client_lacks_is_learnt_from_seeds_and_peers(play, seeded):
    federation = seeded("mlp2", "mlp3", labels=((0, 1), (0, 1, 2)), sizes=(12, 30), seeds=30)
    train = LocalTraining(lr=0.02, epochs=5)
    run, alone = (play(FedH2L(train, LocalTraining(lr=rate, epochs=15)), federation, rounds=4) for rate in (0.02, 0.0))
    seeds = federation.public.inputs[federation.public.labels == 2]
    learnt, never = (of.model(0)(seeds).softmax(1)[:, 2].mean() for of in (run, alone))
    assert learnt > 0.5 > never


# The projection


def mutual_step(play, federation, **options):
    """A network before its step on the seeds, the gradients there, and the network after it."""
    method = FedH2L(STILL, LocalTraining("sgd", lr=0.1, batch_size=64), strength=0.3, **options)
    run = play(method, federation, rounds=0)
    net = run.model(0)
    run.round()
    examples, seeds = federation.sites[0].train, federation.public
    drawn = rows(run)[0]["rows"]
    logits = net(seeds.inputs[drawn])
    peers = sent(run)[0]["peers"]
    loss = F.cross_entropy(logits, seeds.labels[drawn]) - 0.3 * (peers * logits.log_softmax(1)).sum(1).mean()
    own = gradients(F.cross_entropy(net(examples.inputs), examples.labels), net)
    return run, net, gradients(loss, net), own


def opposed(seeded):
    """Seeds that are a client's own examples, of classes 1 and 2, all labelled 0; so each goes with one of them."""
    federation = seeded("mlp2", "mlp3", seeds=12, labels=((1, 2), (0, 1, 2)))
    train = federation.sites[0].train
    wrong = replace(federation.public, inputs=train.inputs, targets=torch.zeros_like(train.targets))
    return replace(federation, public=wrong)


def test_a_gradient_that_opposes_that_on_own_examples_is_projected_onto_the_half_space(play, seeded):
    run, net, g, o = mutual_step(play, opposed(seeded))
    assert product(g, o) < 0
    z = [a - product(g, o) / product(o, o) * b for a, b in zip(g, o, strict=True)]
    assert abs(product(z, o)) < 1e-6
    stepped(net, z, 0.1)
    assert_close(parameters_of(run.model(0)), parameters_of(net))
    assert run.reports[0].client_notes[0]["conflict"] == 1


def test_a_gradient_that_agrees_is_left_as_it_is(play, seeded):
    federation = opposed(seeded)
    train = federation.sites[0].train
    right = replace(federation.public, targets=train.targets)
    run, net, g, o = mutual_step(play, replace(federation, public=right))
    assert product(g, o) > 0
    stepped(net, g, 0.1)
    assert_close(parameters_of(run.model(0)), parameters_of(net))


def test_conflicts_that_are_kept_leave_the_gradient_as_it_is(play, seeded):
    run, net, g, o = mutual_step(play, opposed(seeded), conflicts="keep")
    assert product(g, o) < 0
    stepped(net, g, 0.1)
    assert_close(parameters_of(run.model(0)), parameters_of(net))


def test_seeds_that_oppose_own_examples_cost_less_on_these_when_projected(play, seeded):
    losses = {}
    for conflicts in ("project", "keep"):
        federation = opposed(seeded)
        examples = federation.sites[0].train
        run = play(FedH2L(STILL, FULL, strength=0.3, conflicts=conflicts), federation, rounds=5)
        losses[conflicts] = F.cross_entropy(run.model(0)(examples.inputs), examples.labels).item()
    assert losses["project"] < losses["keep"] - 0.05


def test_own_examples_beside_seeds_leave_running_statistics_alone(play, seeded):
    found = []
    for conflicts in ("project", "keep"):
        run = play(FedH2L(STILL, STILL, conflicts=conflicts), seeded("norm2", "norm3"))
        found.append(buffers_of(run.model(0)))
    assert_close(*found, rtol=0, atol=0)


@pytest.mark.usefixtures("uncounted")
def test_every_own_example_goes_with_as_many_seeds_as_any_other(play, seeded, monkeypatch):
    seen, plain = [], OwnLoss.__call__

    def watched(self, net, batch, extras):
        seen.append(batch.columns["inputs"][:, 0])
        return plain(self, net, batch, extras)

    monkeypatch.setattr(OwnLoss, "__call__", watched)
    federation = seeded("mlp2", seeds=31, sizes=(12,))
    run = play(FedH2L(STILL, LocalTraining("sgd", lr=0.1, batch_size=8)), federation)
    assert run.reports
    found = torch.cat(seen).unique(return_counts=True)[1]
    assert sorted(found.tolist()) == [2] * 5 + [3] * 7


# Needs


def test_needs_and_ranges():
    assert FedH2L().needs() == {Need.PUBLIC_DATA, Need.PUBLIC_LABELS, Need.CLASSES}
    for options, expected in (
        ({"strength": -1.0}, "strength: expected at least 0"),
        ({"public_examples": 0}, "public_examples: expected at least 1"),
        ({"weighting": "samples"}, "weighting: expected"),
    ):
        with pytest.raises(ValueError, match=expected):
            replace(FedH2L(), **options)
