from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from potluck.core.message import Message
from potluck.core.method import on_client
from potluck.core.weights import load, mean_where_present
from potluck.methods.fedavg import FedAvg
from potluck.methods.mfedepth import MFeDepth
from potluck.testing.exits import predicts_with_exits_as_it_says, shares_its_exits


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
        sent = self.sharing.send(state.pool, cohort, server, exits=lambda member: state.exits["all"])
        replies = cohort.ask(self.local_update, sent)
        means = self.sharing.means(replies, server.roster, "weights", "buffers")
        found = [{**state.exits["all"], **reply.get("exits", {})} for reply in replies.values()]
        exits = {"all": mean_where_present(found, [1.0] * len(found), state.exits["all"])}
        return replace(state, pool=means.over(state.pool, "weights", "buffers"), exits=exits)


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
