"""Sub-models of kinds that no method of Potluck's has yet, channels drawn at random and single elements, in a round."""

from dataclasses import dataclass

import pytest
import torch

from potluck import fl
from potluck.methods import get_method
from potluck.testing.checks.clients import survives_a_missing_reply
from potluck.testing.checks.networks import leaves_alone_what_nobody_covers, trains_no_more_than_fits
from potluck.testing.checks.repeating import is_deterministic
from potluck.testing.checks.statements import declares_its_replies


class Dropping(get_method("heterofl")):
    """Federated dropout: every round and rate draws its channels."""

    def submodel(self, server, rate):
        return server.about(None, fl.channels.Narrowing.to(server.build(width=rate))).drawn(server.rng)


@dataclass(frozen=True)
class State:
    weights: fl.Weights


@dataclass(frozen=True)
class Sparse(fl.Method[State]):
    """Every client trains single weights that are drawn for it, the others being 0."""

    training: fl.LocalTraining = fl.LocalTraining("sgd", lr=0.1)
    keeps_model = False

    def needs(self):
        return frozenset({fl.Need.ONE_ARCHITECTURE, fl.Need.WIDTH_SLICES})

    def init(self, server):
        return State(fl.parameters_of(server.build()))

    def round(self, state, cohort, server):
        masks = {i: self.mask(state.weights, server.roster[i].capacity, server.rng) for i in cohort.ids}
        sent = {i: fl.Message(weights=fl.submodels.select(state.weights, masks[i]), masks=masks[i]) for i in masks}
        return State(fl.submodels.mean_where_covered(cohort.stream(self.local_update, sent), masks, state.weights))

    def mask(self, weights, capacity, draws):
        return {name: torch.rand(w.shape, generator=draws) < capacity**2 / 2 for name, w in weights.items()}

    def replies(self, handler, member, message, server):
        return fl.Schema(weights=fl.schema.like(message["weights"]))

    @fl.on_client
    def local_update(self, client, message):
        net = client.build()
        fl.load(
            net,
            fl.submodels.put(message["weights"], message["masks"], fl.weights.zeros_like(fl.parameters_of(net))),
            partial=True,
        )
        yield fl.Fit(net, client.objective, client.train, self.training)
        return fl.Message(weights=fl.submodels.select(fl.parameters_of(net), message["masks"]))

    def global_model(self, state, server):
        return fl.load(server.build(), state.weights, partial=True)


@pytest.mark.slow
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
