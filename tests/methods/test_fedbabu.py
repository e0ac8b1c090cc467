"""FedBABU: a head that never learns, and what a client makes of it for itself."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError
from potluck.core.needs import Offer
from potluck.core.requests.fit import LocalTraining
from potluck.experiment.federation.needs import check_needs
from potluck.methods.fedbabu import FedBABU
from potluck.parts.sharing import Sharing

FULL = LocalTraining("sgd", lr=0.1, batch_size=64)
EXACTLY = {"rtol": 0, "atol": 0}


def test_the_head_is_never_trained_and_never_sent_back(play, clouds):
    run = play(FedBABU(FULL), clouds("mlp2", "mlp3"), rounds=3)
    first, last = run.states[0].weights["all"], run.state.weights["all"]
    assert {name for name in first if torch.equal(first[name], last[name])} == {"head.weight", "head.bias"}
    assert not [name for name in run.wire.replied["local_update"][0][0]["weights"] if name.startswith("head")]


def test_a_net_of_which_the_head_alone_is_trained_is_refused_before_anything_is(clouds):
    world = clouds("mlp2", "mlp3")

    def frozen(build):
        net = build()
        net.stages.requires_grad_(False)
        return net

    builders = {**world.architectures, "mlp3": partial(frozen, world.architectures["mlp3"])}
    with pytest.raises(
        ConfigError, match="it trains all but the head, and of mlp3 all but the head is frozen; let more"
    ):
        check_needs(FedBABU(FULL).needs(), "fedbabu", Offer.of(replace(world, architectures=builders)))


def test_clients_of_all_architectures_have_one_head(play, clouds):
    run = play(FedBABU(FULL, tuning_epochs=0), clouds("mlp2", "mlp3"))
    assert_close(run.model(0).head.weight, run.model(1).head.weight, **EXACTLY)


def test_fine_tuning_is_descent_on_the_clients_data_and_nothing_of_it_is_kept(play, clouds):
    world = clouds("mlp2", "mlp2", seed=1)
    run = play(FedBABU(FULL, tuning_epochs=1, tuning_lr=0.3, tuning_batch=64), world)
    net = run.engine.server(0).build("mlp2")
    net.load_state_dict(run.state.weights["all"])
    train = world.sites[1].train
    loss = torch.nn.functional.cross_entropy(net(train.inputs), train.targets)
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    expected = [w.detach() - 0.3 * g for w, g in zip(net.parameters(), gradients, strict=True)]
    for _ in range(2):  # evaluated twice, adapted once
        assert_close([w.detach() for w in run.model(1).parameters()], expected)
    assert run.kept(1) == {"state": {}} or "model" not in run.kept(1)


def test_tuning_the_head_leaves_the_body(play, clouds):
    run = play(FedBABU(FULL, tuned="head"), clouds("norm2", "norm2"))
    tuned, sent = run.model(0).state_dict(), run.state.weights["all"]
    assert {name for name in sent if not torch.equal(tuned[name], sent[name])} == {"head.weight", "head.bias"}


def test_there_is_a_global_model_only_where_clients_do_not_tune_theirs(play, clouds):
    for epochs, found in ((0, True), (1, False)):
        run = play(FedBABU(FULL, tuning_epochs=epochs), clouds("mlp2", "mlp2"))
        assert (run.engine.method.global_model(run.state, run.engine.server(1)) is not None) == found


def test_a_last_batch_of_one_example_joins_the_one_before(play, clouds):
    run = play(FedBABU(FULL, tuning_batch=4), clouds("norm2", sizes=(9,)), rounds=2)
    assert run.model(0).get_buffer("stages.stage0.1.running_mean").abs().sum() > 0


def test_refuses_to_average_nothing():
    with pytest.raises(ConfigError, match=r"sharing\.scope: expected one that averages"):
        FedBABU(sharing=Sharing("none"))
