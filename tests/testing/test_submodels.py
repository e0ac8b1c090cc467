"""Sub-models of kinds that no method of Potluck's has yet, channels drawn at random and single elements, in a round."""

from dataclasses import dataclass

import pytest
import torch

from potluck import (
    Fit,
    LocalTraining,
    Message,
    Method,
    Narrowing,
    Need,
    Schema,
    Weights,
    like,
    load,
    mean_where_covered,
    on_client,
    parameters_of,
    put,
    select,
    zeros_like,
)
from potluck.methods import get_method
from potluck.testing.conformance import (
    declares_its_replies,
    is_deterministic,
    leaves_alone_what_nobody_covers,
    survives_a_missing_reply,
    trains_no_more_than_fits,
)


class Dropping(get_method("heterofl")):
    """Federated dropout: every round and rate draws its channels."""

    def submodel(self, server, rate):
        return server.about(None, Narrowing.to(server.build(width=rate))).drawn(server.rng)


@dataclass(frozen=True)
class State:
    weights: Weights


@dataclass(frozen=True)
class Sparse(Method[State]):
    """Every client trains single weights that are drawn for it, the others being 0."""

    training: LocalTraining = LocalTraining("sgd", lr=0.1)
    keeps_model = False

    def needs(self):
        return frozenset({Need.ONE_ARCHITECTURE, Need.WIDTH_SLICES})

    def init(self, server):
        return State(parameters_of(server.build()))

    def round(self, state, cohort, server):
        masks = {i: self.mask(state.weights, server.roster[i].capacity, server.rng) for i in cohort.ids}
        sent = {i: Message(weights=select(state.weights, masks[i]), masks=masks[i]) for i in masks}
        return State(mean_where_covered(cohort.stream(self.local_update, sent), masks, state.weights))

    def mask(self, weights, capacity, draws):
        return {name: torch.rand(w.shape, generator=draws) < capacity**2 / 2 for name, w in weights.items()}

    def replies(self, handler, member, message, server):
        return Schema(weights=like(message["weights"]))

    @on_client
    def local_update(self, client, message):
        net = client.build()
        load(net, put(message["weights"], message["masks"], zeros_like(parameters_of(net))), partial=True)
        yield Fit(net, client.objective, client.train, self.training)
        return Message(weights=select(parameters_of(net), message["masks"]))

    def global_model(self, state, server):
        return load(server.build(), state.weights, partial=True)


@pytest.mark.parametrize("method", [Dropping, Sparse])
@pytest.mark.parametrize(
    "check",
    [
        is_deterministic,
        declares_its_replies,
        trains_no_more_than_fits,
        leaves_alone_what_nobody_covers,
        survives_a_missing_reply,
    ],
)
def test_drawn_channels_and_single_elements_pass_the_checks_of_a_round(method, check):
    check(method)
