"""FedRep: first the head, then the representation."""

import torch
from torch.testing import assert_close

from potluck.core.requests.fit import Fit, LocalTraining
from potluck.methods.fedrep import FedRep

FULL = LocalTraining("sgd", lr=0.1, batch_size=64)
STILL = LocalTraining("sgd", lr=0.0)
EXACTLY = {"rtol": 0, "atol": 0}


def test_without_training_of_the_representation_only_heads_learn(play, clouds):
    run = play(FedRep(STILL, head=FULL), clouds("mlp2", "mlp2"), rounds=2)
    assert_close(run.state.weights, run.states[0].weights, **EXACTLY)
    assert not torch.equal(run.model(0).head.weight, run.model(1).head.weight)


def test_without_training_of_heads_only_the_representation_learns(play, clouds):
    run = play(FedRep(FULL, head=STILL), clouds("mlp2", "mlp2"), rounds=2)
    head = run.engine.server(0).build("mlp2").head.weight
    assert_close(run.model(0).head.weight, head, **EXACTLY)
    before, after = run.states[0].weights["all"], run.state.weights["all"]
    assert not [name for name in before if torch.equal(before[name], after[name])]


def test_the_head_learns_first_and_longer(play, clouds):
    run = play(FedRep(), clouds("mlp2"), rounds=0)
    client = run.engine._host._open(0, None, run.engine.server(1)._key, 1)
    work = FedRep().local_update(client, FedRep().sharing.message(run.state.weights, run.engine.server(0).roster[0]))
    head, body = next(work), work.send(None)
    assert isinstance(head, Fit)
    assert (set(head.trained()), head.training.epochs) == ({"head.weight", "head.bias"}, 10)
    assert body.training.epochs == 1
    assert set(body.trained()) == set(run.state.weights["all"])
