"""What is heard is what the next round would have sent; and what the server makes of it is what clients have."""

import pytest
import torch

from potluck.attacks.evidence import class_evidence, extracting_net, outputs_on_public, returned_net
from potluck.attacks.exposed import inverted, membership
from potluck.attacks.overheard import overhear
from potluck.core.ground.errors import ConfigError
from potluck.core.message import Message
from potluck.core.nets.weights import learnt_of, parameters_of
from potluck.engine.executors.hearing import Hearing
from potluck.engine.rounds.engine import Engine
from potluck.methods import get_method
from potluck.testing.worlds import World, packed_state, quick, toy_federation

ALIKE = World(clients=3, architectures=1)


def after(method, rounds=1, overrides=(), world=ALIKE, executor=None):
    engine = Engine(quick(get_method(method), overrides), toy_federation(world), executor=executor)
    state = engine.start()
    for number in range(1, rounds + 1):
        state, _ = engine.round(number, state, sorted(engine.federation.sites))
    return engine, state


@pytest.mark.parametrize("method", ["fedin", "fedproto", "fedmd"])
def test_what_is_heard_is_what_the_next_round_sends_and_the_run_stays_as_it_was(method):
    engine, state = after(method)
    clients = {id: engine.store.read(id) for id in engine.federation.sites}
    packed = packed_state(state)
    found = overhear(engine, state)
    assert found.round == 2
    assert {id: engine.store.read(id) for id in engine.federation.sites} == clients
    assert packed_state(state) == packed
    assert engine.rounds_done == 1
    after(method, rounds=2, executor=(hearing := Hearing()))
    second = [(call, answer) for call, answer in hearing.exchanges if call.round == 2]
    assert {call.client for call, _ in second} == set(found.heard)
    for client, heard in found.heard.items():
        own = [(call, answer) for call, answer in second if call.client == client]
        assert [call.payload for call in heard.calls] == [call.payload for call, _ in own]
        expected = {name: entry for _, answer in own for name, entry in Message.decode(answer.payload).items()}
        assert Message(**heard.reply).encode() == Message(**expected).encode()


def test_changes_of_weights_are_read_as_the_weights_that_clients_have():
    nets = {}
    for method in ("fedavg", "fednova", "scaffold"):
        engine, state = after(method, rounds=0)
        found = overhear(engine, state)
        nets[method] = learnt_of(returned_net(found.heard[0], found))
    for method in ("fednova", "scaffold"):
        for name, tensor in nets["fedavg"].items():
            assert torch.allclose(nets[method][name], tensor, atol=1e-5), (method, name)


@pytest.mark.parametrize("method", ["fjord", "depthfl"])
def test_a_narrower_or_shallower_network_is_put_together_from_its_reply(method):
    world = World(clients=4, labels=2).fit_for(get_method(method)())
    found, sizes = overhear(*after(method, world=world)), set[int]()
    for client, heard in found.heard.items():
        own = parameters_of(returned_net(heard, found))
        assert all(torch.equal(tensor, heard.reply["weights"][name]) for name, tensor in own.items())
        assert membership(heard, found).area.members == len(found.engine.federation.sites[client].train)
        assert class_evidence(heard, found).source == "bias of the last layer"
        sizes.add(sum(tensor.numel() for tensor in own.values()))
    assert len(sizes) > 1


def test_a_network_of_which_a_part_is_sent_is_not_made_up():
    for method in ("fedproto", "fedmd", "lgfedavg"):
        found = overhear(*after(method))
        assert returned_net(found.heard[0], found) is None


@pytest.mark.parametrize(
    ("method", "source"),
    [
        ("fedproto", "counts"),
        ("fedgkt", "labels"),
        ("fedre", "shares of classes"),
        ("fedavg", "bias of the last layer"),
        ("scaffold", "bias of the last layer"),
        ("fml", "bias of the last layer"),
        ("fedmd", "outputs on public examples"),
    ],
)
def test_classes_are_read_from_what_the_reply_has(method, source):
    world = World(clients=3, architectures=1, labels=2)
    found = overhear(*after(method, rounds=0 if method == "scaffold" else 1, world=world))  # then without control
    for client, heard in found.heard.items():
        counts = found.engine.federation.sites[client].train.labels.bincount(minlength=4)
        evidence = class_evidence(heard, found)
        assert evidence.source == source
        if source in ("counts", "labels"):
            assert evidence.shares.tolist() == pytest.approx((counts / counts.sum()).tolist())
        elif source == "bias of the last layer":  # of two classes of four, the two that are there
            assert set(evidence.shares.argsort()[-2:].tolist()) == set(counts.nonzero().flatten().tolist())


def test_nothing_is_read_from_a_client_that_sends_nothing():
    found = overhear(*after("local"))
    assert class_evidence(found.heard[0], found) is None
    assert outputs_on_public(found.heard[0], found) is None
    with pytest.raises(ConfigError, match="found neither a whole network nor outputs"):
        membership(found.heard[0], found)
    with pytest.raises(ConfigError, match="found no features"):
        inverted(found.heard[0], found, 2, 10, 0)


def test_inputs_that_are_sent_tell_members_for_certain():
    found = overhear(*after("centralised", rounds=0))
    told = membership(found.heard[0], found)
    assert (told.source, told.area.value) == ("inputs that were sent", 1.0)


@pytest.mark.slow
def test_a_model_that_knows_its_examples_by_heart_tells_members():
    told = {}
    for epochs in (1, 400):
        engine, state = after(
            "fedavg", rounds=0, overrides=[f"training.epochs={epochs}"], world=World(clients=1, architectures=1)
        )
        found = overhear(engine, state)
        told[epochs] = membership(found.heard[0], found)
        assert told[epochs].source == "loss of the client's weights"
    assert told[400].area.value > told[1].area.value


def test_features_are_inverted_by_the_best_network_that_the_server_has():
    engine, state = after("fedin", world=World(clients=2, architectures=1, width=32))
    found = overhear(engine, state)
    one = inverted(found.heard[0], found, 4, 800, 0)
    assert one.source == "weights that the client sent"
    assert extracting_net(found.heard[0], found)[1] == one.source
    blind = float((one.blind - one.true).square().mean())
    assert float((one.found - one.true).square().mean()) < 0.5 * blind
    assert one.images is None  # rows of numbers
    found = overhear(*after("fedgkt"))
    assert extracting_net(found.heard[0], found)[1] == "initial weights, which all know"


def test_a_layer_of_a_head_that_puts_out_no_classes_is_not_taken_for_the_last_one():
    world = World(clients=4, batchnorm=True, labels=2).fit_for(get_method("hypemefed")())
    found = overhear(*after("hypemefed", world=world))
    evidence = [class_evidence(heard, found) for heard in found.heard.values()]
    assert all(one is None or one.shares.shape == (4,) for one in evidence)
