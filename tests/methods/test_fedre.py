"""FedRE: what a client mixes, and what the server learns from it."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.message import Message
from potluck.core.method import on_client
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedgh import FedGH
from potluck.methods.fedre import FedRE

EXACTLY = {"rtol": 0, "atol": 0}
FULL = LocalTraining("sgd", lr=0.1, batch_size=64)  # one full step
CLASSES = 3


def replied(run, exchange=-1):
    """By client, the vector and the shares of an exchange."""
    replies = run.wire.replied["local_update"][exchange]
    return {id: {name: reply[name][0] for name in reply} for id, reply in replies.items()}


def test_a_client_mixes_its_classes_means_and_labels_by_the_same_weights(play, clouds):
    federation = clouds("norm2", "mlp3", labels=((0, 2), (0, 1, 2)))
    run = play(FedRE(FULL), federation)
    for id, site in federation.sites.items():
        reply, net = replied(run)[id], run.model(id).eval()
        h, labels = net.pool(net.stages(site.train.inputs)).detach(), site.train.labels
        shares = reply["shares"]
        mixed = sum(shares[label] * h[labels == label].mean(0) for label in labels.unique())
        assert_close(reply["representation"], mixed)
        assert_close(shares.sum(), torch.tensor(1.0))
        assert ((shares > 0) == (labels.bincount(minlength=CLASSES) > 0)).all()


def test_weights_are_drawn_anew_for_each_client_and_round(play, clouds):
    run = play(FedRE(FULL), clouds("mlp2", "mlp2"), rounds=2)
    shares = [replied(run, exchange)[id]["shares"] for exchange in (0, 1) for id in (0, 1)]
    assert len({tuple(one.tolist()) for one in shares}) == 4


def test_weights_are_normalised_uniform_draws(play, clouds):
    run = play(FedRE(LocalTraining("sgd", lr=0.0)), clouds("mlp2", labels=((0, 1),)), rounds=60)
    first = torch.stack([replied(run, exchange)[0]["shares"][0] for exchange in range(60)])
    assert abs(first.mean() - 0.5) < 0.1
    # u / (u + v) of uniform u and v lies below 1/4 in a sixth of the cases: P(3u < v) = 1/6
    assert 3 <= (first < 0.25).sum() <= 18


def test_the_head_steps_against_the_cross_entropy_of_each_class_by_its_share(play, clouds):
    run = play(FedRE(FULL, FULL), clouds("mlp2", "mlp3", labels=((0, 1), (0, 1, 2))))
    head = nn.Linear(8, CLASSES)
    head.load_state_dict(run.states[0].head)
    losses = [
        sum(y[c] * F.cross_entropy(head(r)[None], torch.tensor([c])) for c in range(CLASSES))
        for r, y in ((reply["representation"], reply["shares"]) for reply in replied(run).values())
    ]
    gradients = torch.autograd.grad(sum(losses) / 2, list(head.parameters()))
    for (name, before), gradient in zip(head.named_parameters(), gradients, strict=True):
        assert_close(run.state.head[name], before.detach() - 0.1 * gradient)


def test_one_class_a_client_is_fedgh_with_one_mean_each(play, clouds):
    federation = clouds("mlp2", "mlp3", "mlp2", labels=((0,), (1,), (2,)))
    ours, theirs = (play(method(FULL, FULL), federation, rounds=2) for method in (FedRE, FedGH))
    assert_close(ours.state.head, theirs.state.head, **EXACTLY)
    mixed = play(FedRE(FULL, FULL), clouds("mlp2", "mlp3"), rounds=2)
    plain = play(FedGH(FULL, FULL), clouds("mlp2", "mlp3"), rounds=2)
    assert not torch.allclose(mixed.state.head["weight"], plain.state.head["weight"], atol=1e-4)


def test_a_vector_and_its_shares_are_all_that_is_sent_up(play, clouds):
    run = play(FedRE(FULL), clouds("mlp2", "mlp3"), rounds=2)
    assert run.reports[1].traffic.up == {"representation": 2 * 8 * 4, "shares": 2 * CLASSES * 4}
    assert run.reports[1].traffic.down == {"head": 2 * 3 * (8 + 1) * 4}


def test_clients_use_the_servers_head_and_a_newcomer_does_too(play, clouds):
    run = play(FedRE(FULL, FULL), clouds("mlp2", "mlp2", "norm3"), rounds=0)
    run.round(0, 1)
    for id in range(3):
        assert_close(dict(run.model(id).head.state_dict()), run.state.head, **EXACTLY)
    head = run.state.head
    run.round(2)
    assert_close(run.wire.sent["local_update"][-1][2]["head"], head, **EXACTLY)


def test_a_class_that_nobody_has_is_never_a_target(play, clouds):
    strong = LocalTraining("sgd", lr=0.5, epochs=30, batch_size=64)
    run = play(FedRE(FULL, strong), clouds("mlp2", "mlp3", labels=((0, 1), (1, 0))))
    assert all(reply["shares"][2] == 0 for reply in replied(run).values())
    assert run.state.head["bias"][2] < run.states[0].head["bias"][2]


def test_shares_that_are_no_distribution_are_refused(play, clouds):
    @dataclass(frozen=True)
    class Liar(FedRE):
        @on_client
        def local_update(self, client, message):
            reply = yield from FedRE.local_update(self, client, message)
            return Message(**(dict(reply) | {"shares": 3 * reply["shares"]})) if client.id == 1 else reply

    run = play(Liar(FULL, FULL), clouds("mlp2", "mlp2"), tolerate_failures=True)
    assert "a row whose sum is 3" in run.reports[0].failures[1].reason
    alone = play(FedRE(FULL, FULL), clouds("mlp2", "mlp2"), rounds=0)
    alone.round(0)
    assert_close(run.state.head, alone.state.head, **EXACTLY)
