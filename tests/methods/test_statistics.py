"""BatchNorm's statistics where nets are read or evaluated: sent, learnt, or measured on the client's own data."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from potluck.core.nets.batchnorm import batch_norms
from potluck.core.nets.weights import buffers_of, frozen_of, weights_of
from potluck.core.requests.beside_training import Gradient
from potluck.core.requests.fit import Fit, LocalTraining
from potluck.engine.client.runtime import ClientRuntime
from potluck.methods import get_method
from potluck.methods.fedavg import FedAvg
from potluck.methods.feddpa import FedDPA
from potluck.methods.fedselect import FedSelect
from potluck.parts.sharing import Sharing

EXACTLY = {"rtol": 0, "atol": 0}
LONG = LocalTraining("sgd", lr=0.1, batch_size=8, epochs=2)
TEACHING = {"fedntd": "global", "fedgkd": "teacher", "fedmlb": "global", "moon": "global", "incomoon": "global"}


@pytest.fixture
def read(monkeypatch):
    """By client, the nets that its fits have read, and those whose gradient was asked for, as they were then."""
    seen = {}
    carry_out = ClientRuntime.carry_out

    def noting(runtime, request, key):
        if isinstance(request, Fit | Gradient):
            nets = {**request.frozen, "net": request.net}
            seen.setdefault(type(request), []).append((request.data, deepcopy(nets)))
        return carry_out(runtime, request, key)

    monkeypatch.setattr(ClientRuntime, "carry_out", noting)
    return seen


def measured(net, examples):
    """The buffers that a net of these weights has after one pass in training mode over all examples, by plain torch."""
    net = deepcopy(net).train()
    for norm in batch_norms(net).values():
        norm.reset_running_stats()
        norm.momentum = None
    with torch.no_grad():
        net(examples.inputs)
    return buffers_of(net)


def with_norms(net):
    found = buffers_of(net)
    assert any("running_mean" in name for name in found)
    return found


# Teachers


@pytest.mark.parametrize("name", TEACHING)
def test_a_teachers_dropped_statistics_are_measured_in_every_round(play, clouds, read, name):
    federation = clouds("norm2", "norm2")
    method = get_method(name)
    run = play(method(LONG, sharing=replace(method().sharing, buffers="drop")), federation, rounds=3)
    nets = [(data, nets[TEACHING[name]]) for data, nets in read[Fit] if TEACHING[name] in nets]
    assert len(nets) == 2 * (3 if name in ("fedntd", "fedmlb") else 2)
    for data, teacher in nets:
        assert_close(with_norms(teacher), measured(teacher, data))
    assert set(run.wire.replied["local_update"][-1][0]) == {"weights", "examples"}


@pytest.mark.parametrize("name", ["fedntd", "fedgkd", "fedmlb"])
def test_a_teachers_local_statistics_are_measured_at_a_clients_first_training_and_then_its_own(
    play, clouds, read, name
):
    method = get_method(name)
    run = play(method(LONG, sharing=replace(method().sharing, buffers="local")), clouds("norm2", "norm2"), rounds=0)
    for ids in ((0,), (0,), (0, 1), (1,)):
        kept = run.kept(1)["state"]
        run.round(*ids)
    (data, first), (_, second) = ((data, nets[TEACHING[name]]) for data, nets in read[Fit][-2:])
    assert_close(with_norms(first), measured(first, data))
    assert_close(with_norms(second), kept["buffers"], **EXACTLY)


@pytest.mark.parametrize("name", TEACHING)
def test_a_teachers_averaged_statistics_are_those_that_were_sent(play, clouds, read, name):
    run = play(get_method(name)(LONG), clouds("norm2", "norm2"), rounds=2)
    _, nets = read[Fit][-1]
    sent = run.wire.sent["local_update"][-1][1]
    assert_close(with_norms(nets[TEACHING[name]]), {**sent["buffers"], **_buffers(sent.get("teacher", {}))}, **EXACTLY)


def _buffers(weights):
    return {name: tensor for name, tensor in weights.items() if name.endswith(("mean", "var", "tracked"))}


def test_a_measured_teacher_agrees_with_labels_where_that_of_a_new_layer_is_at_chance(play, clouds, read):
    federation = clouds("norm2", "norm2", sizes=(40, 40))
    run = play(get_method("fedntd")(LONG, sharing=Sharing(buffers="drop")), federation, rounds=6)
    data, nets = read[Fit][-1]
    teacher = nets["global"].eval()
    accuracy = float((teacher(data.inputs).argmax(1) == data.targets).float().mean())
    mine = run.model(1).eval()
    assert accuracy == pytest.approx(float((mine(data.inputs).argmax(1) == data.targets).float().mean()), abs=0.1)
    assert accuracy > 0.6


def test_fccls_teachers_without_pretraining_have_measured_statistics_at_first(play, clouds, read):
    method = get_method("fccl")(LONG, correlation=LONG, pretrain=0)
    play(method, clouds("norm2", "norm2", public=30), rounds=2)
    fits = [(data, nets) for data, nets in read[Fit] if "intra" in nets]
    for data, nets in fits:
        assert_close(with_norms(nets["intra"]), measured(nets["intra"], data))  # never trained
    first, second = fits[0], fits[2]
    assert_close(with_norms(first[1]["inter"]), measured(first[1]["inter"], first[0]))
    assert not torch.equal(*(nets["inter"].get_buffer("stages.stage0.1.running_mean") for _, nets in (first, second)))


# Clients that have never taken part


NEVER = [
    FedAvg(LONG, Sharing(buffers="local")),
    FedAvg(LONG, Sharing("none")),
    FedSelect(LONG),
    FedSelect(LONG, evaluated="trained"),
    FedDPA(LONG, sharing=Sharing(buffers="local")),
    FedDPA(LONG, sharing=Sharing(buffers="drop")),
    FedDPA(LONG, evaluated="global", sharing=Sharing(buffers="local")),
    get_method("lgfedavg")(LONG),
    get_method("fedproto")(LONG),
    get_method("local")(LONG),
]


@pytest.mark.parametrize("method", NEVER, ids=lambda method: f"{type(method).__name__}")
def test_a_client_that_never_took_part_is_evaluated_with_statistics_of_its_own_data(play, clouds, method):
    federation = clouds("norm2", "norm2")
    run = play(method, federation, rounds=0)
    run.round(0)
    run.round(0)
    net = run.model(1)
    assert_close(with_norms(net), measured(net, federation.sites[1].train))
    assert run.kept(1) == {"state": {}}
    trained = run.model(0)
    assert_close(with_norms(trained), with_norms(run.model(0)), **EXACTLY)


def test_averaged_statistics_are_evaluated_as_they_were_sent(play, clouds):
    run = play(FedAvg(LONG), clouds("norm2", "norm2"), rounds=0)
    assert not any(norm.running_mean.any() for norm in batch_norms(run.model(1)).values())
    run.round(0)
    assert_close(weights_of(run.model(1)), run.state.weights["all"], **EXACTLY)


def test_statistics_that_were_learnt_are_evaluated_as_they_are(play, clouds):
    for method in (FedAvg(LONG, Sharing(buffers="local")), get_method("local")(LONG), FedSelect(LONG)):
        run = play(method, clouds("norm2", "norm2"), rounds=2)
        kept = run.kept(1)
        learnt = kept["state"]["buffers"] if isinstance(method, FedAvg) else _buffers(kept["model"])
        assert_close(with_norms(run.model(1)), learnt, **EXACTLY)


def test_a_client_of_fedselect_that_never_took_part_is_one_of_fedavg_with_local_statistics(play, clouds):
    federation, uniform = clouds("norm2", "norm2"), Sharing(weighting="uniform", buffers="local")
    models = []
    for method in (FedSelect(LONG, rate=0.0), FedAvg(LONG, uniform)):
        run = play(method, federation, rounds=0)
        run.round(0)
        models.append(weights_of(run.model(1)))
    assert_close(*models, **EXACTLY)


def test_frozen_statistics_are_never_measured(play, clouds):
    federation = clouds("norm2", "norm2")
    build = federation.architectures["norm2"]

    def half_frozen():
        net = build()
        net.get_submodule("stages.stage0").requires_grad_(False).eval()
        return net

    federation = replace(federation, architectures={"norm2": half_frozen})
    for method in (FedSelect(LONG), FedAvg(LONG, Sharing(buffers="local")), FedAvg(LONG, Sharing(buffers="drop"))):
        run = play(method, federation, rounds=0)
        run.round(0)
        frozen = frozen_of(run.model(1))
        assert not frozen["stages.stage0.1.running_mean"].any()
        assert with_norms(run.model(1))["stages.stage1.1.running_mean"].any()


@pytest.mark.parametrize("examples", [0, 1])
def test_a_client_with_too_few_examples_to_measure_is_evaluated_all_the_same(play, clouds, examples):
    run = play(FedSelect(LONG), clouds("norm2", "norm2", sizes=(12, examples)), rounds=0)
    run.round(0)
    assert not any(norm.running_mean.any() for norm in batch_norms(run.model(1)).values())


# FedDPA keeps its clients' models


def test_feddpa__keeps_no_dropped_statistics_and_measures_them_for_its_own_weights(play, clouds):
    federation = clouds("norm2", "norm2")
    run = play(FedDPA(LONG, sharing=Sharing(buffers="drop")), federation, rounds=3)
    for id in (0, 1):
        kept, net = run.kept(id)["model"], run.model(id)
        assert not any(kept[name].any() for name in kept if name.endswith(("mean", "tracked")))
        assert torch.equal(weights_of(net)["head.weight"], kept["head.weight"])
        assert_close(with_norms(net), measured(net, federation.sites[id].train))


@pytest.mark.parametrize(("buffers", "rounds"), [("drop", (0, 1, 2)), ("local", (0,))])
def test_feddpa__weighs_weights_by_a_net_with_measured_statistics(play, clouds, read, buffers, rounds):
    play(FedDPA(LONG, sharing=Sharing(buffers=buffers)), clouds("norm2"), rounds=3)
    for number, (data, nets) in enumerate(read[Gradient]):
        found, expected = with_norms(nets["net"]), measured(nets["net"], data)
        if number in rounds:
            assert_close(found, expected)
        else:
            with pytest.raises(AssertionError):
                assert_close(found, expected)
