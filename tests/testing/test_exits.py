from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import nn

from potluck.core.message import Message
from potluck.core.method import Method, on_client
from potluck.core.needs import Need
from potluck.core.nets.weights import Weights, load, mean_where_present, parameters_of
from potluck.core.requests.fit import Fit, LocalTraining
from potluck.core.schema import Schema, like
from potluck.methods.fedavg import FedAvg
from potluck.methods.mfedepth import MFeDepth
from potluck.models.contract import blocks, linear_exit, place_shapes, with_exits
from potluck.parts.exits import new_exits
from potluck.testing.checks.clients import learns_a_toy_task
from potluck.testing.checks.networks import keeps_what_is_frozen
from potluck.testing.checks.repeating import (
    agrees_when_stacked,
    does_not_depend_on_the_order_of_clients,
    is_deterministic,
)
from potluck.testing.checks.statements import declares_its_replies
from potluck.testing.exits import predicts_with_exits_as_it_says, shares_its_exits
from potluck.testing.worlds import World


@dataclass(frozen=True)
class Untrained(MFeDepth):
    """Sends its exits back as they came."""

    @on_client
    def local_update(self, client, message):
        exits = message["exits"]
        reply = yield from super().local_update(client, message)
        return Message(
            **{**reply, **({"exits": {name: exits[name] for name in reply["exits"]}} if "exits" in reply else {})}
        )


@dataclass(frozen=True)
class Silent(MFeDepth):
    """Keeps its exits to itself."""

    @on_client
    def local_update(self, client, message):
        reply = yield from super().local_update(client, message)
        return Message(**{name: entry for name, entry in reply.items() if name != "exits"})


@dataclass(frozen=True)
class Forgetful(MFeDepth):
    """Averages nothing into its exits."""

    def round(self, state, cohort, server):
        return replace(super().round(state, cohort, server), exits=state.exits)


@dataclass(frozen=True)
class OverEveryone(MFeDepth):
    """Averages exits over all of the cohort, those as they were of the clients that trained none."""

    def round(self, state, cohort, server):
        sent = self.sharing.send(state.weights, cohort, server, exits=lambda member: state.exits["all"])
        replies = cohort.ask(self.local_update, sent)
        means = self.sharing.means(replies, server.roster, "weights", "buffers")
        found = [{**state.exits["all"], **reply.get("exits", {})} for reply in replies.values()]
        exits = {"all": mean_where_present(found, [1.0] * len(found), state.exits["all"])}
        return replace(state, weights=means.over(state.weights, "weights", "buffers"), exits=exits)


class Secret(MFeDepth):
    """Predicts with what its state holds of exits."""

    def inference_message(self, state, client_id, server):
        return Message(bias=state.exits["all"]["stem.head.bias"])

    @on_client
    def inference_model(self, client, message):
        last = nn.Linear(len(message["bias"]), len(message["bias"]))
        load(last, {"weight": torch.eye(len(message["bias"])), "bias": message["bias"]})
        return nn.Sequential(client.model, last)


class Open(Secret):
    """Does so, and says it."""

    predicts_with_exits = True


class Boastful(MFeDepth):
    """Says that it predicts with exits, and does not."""

    predicts_with_exits = True


class Empty(FedAvg):
    """Says that it predicts with exits, and has none."""

    predicts_with_exits = True


class Ensemble(nn.Module):
    """The mean of all exits' outputs."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net.part_outputs(x)["exits"].mean(1)


@dataclass(frozen=True)
class State:
    """The weights of the deepest net, with all of its exits."""

    weights: Weights


@dataclass(frozen=True)
class Nested(Method[State]):
    """Clients have as many of one net's blocks as their capacity allows, an exit behind each, and train all of them."""

    training: LocalTraining = LocalTraining()
    predicts_with_exits = True
    keeps_model = False

    def needs(self):
        return frozenset({Need.ONE_ARCHITECTURE, Need.DEPTH_PREFIXES})

    def init(self, server):
        return State(parameters_of(self.net(server, server.input_shape, 1.0)))

    def round(self, state, cohort, server):
        messages = {id: self.inference_message(state, id, server) for id in cohort.ids}
        replies = cohort.ask(self.local_update, messages).entries("weights")
        return State(mean_where_present(replies, [1.0] * len(replies), state.weights))

    def replies(self, handler, member, message, server):
        return Schema(weights=like(message["weights"]))

    @on_client
    def local_update(self, client, message):
        net = load(self.net(client, client.train.input_shape, client.capacity), message["weights"], partial=True)

        def loss(net, batch, extras):
            return sum(client.criterion(outputs, batch.targets) for outputs in net.exit_outputs(batch.inputs).values())

        yield Fit(net, loss, client.train, self.training)
        return Message(weights=parameters_of(net))

    def inference_message(self, state, client_id, server):
        net = self.net(server, server.input_shape, server.roster[client_id].capacity)
        return Message(weights={name: state.weights[name] for name in parameters_of(net)})

    @on_client
    def inference_model(self, client, message):
        net = self.net(client, client.train.input_shape, client.capacity)
        return Ensemble(load(net, message["weights"], partial=True))

    def net(self, party, input_shape, capacity):
        """The leading blocks, and exits behind all of them but the last of the whole net."""
        net = party.build(depth=max(1, int(capacity * len(blocks(party.build())))))
        shapes = place_shapes(net, input_shape)
        behind = [place for place in blocks(net) if net.ending or place != blocks(net)[-1]]
        build = partial(linear_exit, track=False)
        return with_exits(net, new_exits(party, net, {place: shapes[place] for place in behind}, build))


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    [
        shares_its_exits,
        predicts_with_exits_as_it_says,
        is_deterministic,
        does_not_depend_on_the_order_of_clients,
        agrees_when_stacked,
        keeps_what_is_frozen,
        declares_its_replies,
        learns_a_toy_task,
    ],
)
def test_a_method_that_cuts_nets_in_depth_and_predicts_with_their_exits_conforms(check):
    check(Nested)


def test_a_world_of_a_method_that_cuts_depth_has_depths_to_choose():
    world = World().fit_for(Nested())
    assert (world.architectures, world.depth) == (1, 3)
    assert World(architectures=2).fit_for(FedAvg()) == World(architectures=2)


@pytest.mark.parametrize("method", [MFeDepth, FedAvg])
def test_shares_its_exits__passes_a_method_that_does_and_one_without(method):
    shares_its_exits(method)


@pytest.mark.parametrize(
    ("method", "complaint"),
    [
        (Untrained, "client 1 sends exit '(stem|hidden1)' as it came; expected it trained, or absent"),
        (Silent, "exit 'hidden1' is made, but no client sends it back"),
        (Forgetful, r"clients trained the exits \['hidden1', 'stem'\], and on the server those changed: \[\]"),
        (OverEveryone, r"exit '(stem|hidden1)' was trained by clients \[1, 3\], but others have a part in its mean"),
    ],
)
def test_shares_its_exits__finds_what_is_wrong(method, complaint):
    with pytest.raises(AssertionError, match=complaint):
        shares_its_exits(method)


@pytest.mark.parametrize("method", [MFeDepth, FedAvg, Open])
def test_predicts_with_exits_as_it_says__passes_who_does(method):
    predicts_with_exits_as_it_says(method)


@pytest.mark.parametrize(
    ("method", "complaint"),
    [
        (Secret, "predicts_with_exits is False: expected that changing its exits has no part in what is predicted"),
        (Boastful, "predicts_with_exits is True: expected that changing its exits has a part in what is predicted"),
        (Empty, "it says that it predicts with exits, and its state has none"),
    ],
)
def test_predicts_with_exits_as_it_says__finds_who_does_not(method, complaint):
    with pytest.raises(AssertionError, match=complaint):
        predicts_with_exits_as_it_says(method)
