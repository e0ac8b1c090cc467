"""IFCA: clients of two kinds find each other."""

import pytest
import torch
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError
from potluck.core.requests.fit import LocalTraining
from potluck.core.schema import Misfit
from potluck.methods.ifca import IFCA
from potluck.parts.sharing import Sharing

FULL = LocalTraining("sgd", lr=0.2, batch_size=64)
EXACTLY = {"rtol": 0, "atol": 0}


def taken(run, exchange=-1):
    return {id: reply["cluster"] for id, reply in run.wire.replied["local_update"][exchange].items()}


def started(play, world, one, two):
    """A run whose models begin at these weights."""
    run = play(IFCA(FULL), world, rounds=0)
    for cluster, weight in (("0", one), ("1", two)):
        run.state.weights[cluster]["all"]["weight"].fill_(weight)
    return run


def test_clients_of_two_kinds_part_and_each_kind_gets_a_model(play, lines):
    run = started(play, lines((1, 3, 2), (1, -3, 2), (1, 3, 5), (1, -3, 1)), 0.5, -0.5)
    for _ in range(30):
        run.round()
    assert taken(run) == {0: 0, 1: 1, 2: 0, 3: 1}
    assert [float(run.model(id).weight.detach()) for id in range(4)] == pytest.approx([3, -3, 3, -3], abs=0.02)


def test_a_model_that_nobody_takes_keeps_its_values(play, lines):
    run = started(play, lines((1, 3, 2), (1, 3, 1)), 1.0, -9.0)
    run.round()
    assert set(taken(run).values()) == {0}
    assert float(run.state.weights["1"]["all"]["weight"]) == -9.0


def test_of_equal_models_the_first_is_taken(play, lines):
    run = started(play, lines((1, 3, 2)), 1.0, 1.0)
    run.round()
    assert taken(run) == {0: 0}


def test_the_mean_is_plain_and_over_those_who_took_the_model(play, lines):
    run = started(play, lines((1, 4, 9), (1, 2, 1), (1, -6, 1)), 0.0, -5.0)
    run.round()
    assert taken(run) == {0: 0, 1: 0, 2: 1}
    assert float(run.state.weights["0"]["all"]["weight"]) == pytest.approx(0.2 * (4 + 2) / 2)
    assert float(run.state.weights["1"]["all"]["weight"]) == pytest.approx(-5 + 0.2 * -1)


def test_models_begin_apart_and_the_first_as_with_every_method(play, clouds):
    run = play(IFCA(FULL, clusters=3), clouds("mlp2", "mlp3"), rounds=0)
    heads = [run.state.weights[j]["all"]["head.weight"] for j in ("0", "1", "2")]
    assert not torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[1], heads[2])
    assert_close(heads[0], run.engine.server(0).build("mlp3").head.weight.detach(), **EXACTLY)


def test_a_client_cannot_name_a_model_that_there_is_not(play, clouds):
    run = play(IFCA(FULL), clouds("mlp2", "mlp2"))
    server, message = run.engine.server(1), run.wire.sent["local_update"][0][0]
    schema = run.engine.method.replies("local_update", server.roster[0], message, server)
    reply = dict(run.wire.replied["local_update"][0][0])
    schema.check(reply)
    for cluster in (-1, 2):
        with pytest.raises(Misfit, match="cluster"):
            schema.check({**reply, "cluster": cluster})


def test_refuses_sharing_nothing():
    with pytest.raises(ConfigError, match=r"sharing\.scope: expected one that averages"):
        IFCA(sharing=Sharing("none"))
