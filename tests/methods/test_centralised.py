"""Centralised: who sends what and when, and what the server trains on."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from potluck.core.requests.fit import LocalTraining
from potluck.core.schema import Misfit
from potluck.methods.centralised import Centralised

STEP = LocalTraining("sgd", lr=0.5, batch_size=64)  # one step on everything


def stepped(world, ids, weights):
    """The weights after a step on the data of these clients together."""
    net = world.architectures["mlp2"]()
    net.load_state_dict(weights)
    x, y = (torch.cat([getattr(world.sites[id].train, part) for id in ids]) for part in ("inputs", "targets"))
    gradients = torch.autograd.grad(nn.functional.cross_entropy(net(x), y), list(net.parameters()))
    return {n: w.detach() - 0.5 * g for (n, w), g in zip(net.named_parameters(), gradients, strict=True)}


def test_a_client_sends_its_data_once_and_all_rounds_train_on_all_that_came(play, clouds):
    world = clouds("mlp2", "mlp2", sizes=(12, 20))
    run = play(Centralised(STEP), world, rounds=0)
    for drawn, known in (((0,), (0,)), ((0, 1), (0, 1)), ((1,), (0, 1))):
        expected = stepped(world, known, run.state.weights["mlp2"])
        assert_close(run.round(*drawn).weights["mlp2"], expected)
    assert [set(exchange) for exchange in run.wire.replied["all_data"]] == [{0}, {1}]
    assert len(run.state.inputs) == len(run.state.targets) == 32
    assert run.state.heard == [0, 1]


def test_every_architecture_learns_from_everybodys_data(play, clouds):
    run = play(Centralised(STEP), clouds("mlp2", "wide2", labels=((0, 1), (2,))), rounds=40)
    for id in (0, 1):
        classes = run.model(id)(run.state.inputs).argmax(1)
        assert (classes == run.state.targets).float().mean() > 0.8, "the classes that a client lacks are learnt, too"


def test_a_client_that_failed_is_asked_again(play, clouds, monkeypatch):
    run = play(Centralised(STEP), clouds("mlp2", "mlp2"), rounds=0, tolerate_failures=True)
    plain = Centralised.all_data

    def failing(self, client, message):
        if client.id == 1 and client.round == 1:
            raise OSError("no disk")
        return plain(self, client, message)

    failing.on_client, failing.__name__ = True, "all_data"
    monkeypatch.setattr(Centralised, "all_data", failing)
    run.round()
    assert run.state.heard == [0]
    run.round()
    assert run.state.heard == [0, 1]


def test_the_server_takes_no_more_examples_than_a_client_has(clouds, play):
    run = play(Centralised(STEP), clouds("mlp2"), rounds=0)
    server = run.engine.server(1)
    schema = run.engine.method.replies("all_data", server.roster[0], None, server)
    schema.check({"inputs": torch.zeros(12, 6), "targets": torch.zeros(12, dtype=torch.int64)})
    for inputs, targets in ((13, 13), (12, 11)):
        with pytest.raises(Misfit):
            schema.check({"inputs": torch.zeros(inputs, 6), "targets": torch.zeros(targets, dtype=torch.int64)})
    with pytest.raises(Misfit, match="2"):
        schema.check({"inputs": torch.zeros(12, 6), "targets": torch.full((12,), 3)})


def test_clients_predict_with_the_servers_weights(play, clouds):
    run = play(Centralised(STEP), clouds("norm2", "norm2"))
    for id in (0, 1):
        assert_close(dict(run.model(id).state_dict()), run.state.weights["norm2"], rtol=0, atol=0)
