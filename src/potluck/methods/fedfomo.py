"""FedFomo: personalized federated learning with first order model optimization.

Zhang, Sapra, Fidler, Yeung, Alvarez. ICLR 2021. https://arxiv.org/abs/2012.08565. Section 3.

There is no global model. A client downloads models of other clients, measures on its own validation examples how much
each improves on its own model per unit of distance, and moves towards those that do before it trains.

Symbols
    theta_i   client.model, kept by the client
    theta_n   state.models, what client n uploaded last
    w_n       gains, before they are divided by their sum
    M         peers
    P         state.affinity, the sums of w_n by client i and candidate n
    epsilon   epsilon

Wire
    down      candidates at most peers * (|w| + |b|)
    up        weights |theta_i|, gains at most peers * integer

Limits
    equals local on rounds=1
    candidates="same" equals local on clients=2

Departures from the paper
    1. Where architectures differ, a candidate is the client's own model with every layer that both have replaced by
       the other's; layers are averaged over the candidates that have them, and the others stay. "same" takes whole
       models of the client's own architecture only. The paper has one architecture.
    2. The client's own model is what the candidates are measured against, and none of them. In the authors' code it is
       what the model was before its last local training, and the trained model is one more candidate.
    3. Distances are Euclidean, as in the paper, over the parameters that both have; the code's default is the sum of
       absolute differences. A candidate at distance zero has no gain.
    4. Where no candidate is better the client goes on with its own model; the code falls back to the one from before
       its last training.
    5. Any client that has ever uploaded may be a candidate, drawn this round or not. Equal affinities are taken in
       random order. Epsilon is constant; the code starts from 0.3 and takes 0.05 off in each round. To P the code adds
       w_n divided by the magnitude of their sum, also where w_n is negative; here only gains are added.
    6. BatchNorm's running statistics are averaged with the weights.
    7. Local training defaults to Adam, like all methods here; the paper has SGD.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from potluck import fl

Affinity = dict[str, dict[str, float]]


@dataclass(frozen=True)
class State:
    """By client: the model that it uploaded last, and how much the others' models have helped it."""

    models: dict[str, fl.Weights]
    affinity: Affinity


@dataclass(frozen=True)
class FedFomo(fl.Method[State]):
    """Hyper-parameters of FedFomo.

    Attributes:
        training: a client's local training.
        peers: models that a client is sent at most.
        epsilon: probability that one of them is drawn at random and not by affinity.
        candidates: whose models a client is sent: of all that have layers in common with its own ("graft"), or of those
            of the "same" architecture.
    """

    family = "weights"
    unguarded = "clients choose what they mix, and no mean is taken"

    training: fl.LocalTraining = fl.LocalTraining()
    peers: Annotated[int, fl.at_least(1)] = 5
    epsilon: Annotated[float, fl.at_least(0), fl.at_most(1)] = 0.3
    candidates: Literal["graft", "same"] = "graft"

    def needs(self) -> frozenset[fl.Need]:
        return frozenset(
            {fl.Need.VALIDATION, fl.Need.SHARED_LAYERS if self.candidates == "graft" else fl.Need.SHARED_ARCHITECTURES}
        )

    def init(self, server: fl.Server) -> State:
        return State({}, {})

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        sent = {i: self._drawn(state, server.roster[i], server) for i in cohort.ids}
        replies = cohort.ask(self.local_update, {i: fl.Message(candidates=found or None) for i, found in sent.items()})
        models = state.models | {str(i): reply["weights"] for i, reply in replies.items()}
        return State(models, added(state.affinity, {str(i): reply["gains"] for i, reply in replies.items()}))

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        gains = {name: fl.schema.number(0) for name in message.get("candidates") or {}}
        return fl.Schema(
            weights=fl.schema.like(server.about(member.architecture, fl.weights.outline)), gains=fl.Schema(**gains)
        )

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        candidates, examples, gains = message.get("candidates", {}), client.validation, dict[str, float]()
        if candidates:
            own, mine, twin = fl.learnt_of(client.model), fl.parameters_of(client.model), client.twin()
            base = client.criterion((yield fl.Predict(client.model, examples)), examples.labels)
            for id, theirs in sorted(candidates.items()):
                outputs = yield fl.Predict(fl.load(twin, {**own, **theirs}), examples)
                fall, distance = base - client.criterion(outputs, examples.labels), distance_of(mine, theirs)
                gains[id] = max(0.0, float(fall / distance)) if distance > 0 else 0.0  # eq. 3
        if helpful := {id: gain for id, gain in gains.items() if gain > 0}:  # eq. 4
            theirs = [candidates[id] for id in helpful]
            fl.load(client.model, fl.weights.mean_where_present(theirs, list(helpful.values()), {}), partial=True)
        yield fl.Fit(client.model, client.objective, client.train, self.training)
        return fl.Message(weights=fl.learnt_of(client.model), gains=gains)

    def _drawn(self, state: State, member: fl.Member, server: fl.Server) -> dict[str, fl.Weights]:
        """M candidates by an epsilon-greedy choice, each as far as it fits the client's model."""
        mine = {name: shape for name, shape in member.shapes.items() if name not in member.frozen}
        others = {id: fitting(weights, mine) for id, weights in sorted(state.models.items()) if id != str(member.id)}
        names = {id: server.roster[int(id)].architecture for id in others}
        alike = [id for id in others if self.candidates == "graft" or names[id] == member.architecture]
        fit = [id for id in alike if not member.parameters.isdisjoint(others[id])]
        drawn: list[str] = [fit[place] for place in torch.randperm(len(fit), generator=server.rng).tolist()]
        affinity = state.affinity.get(str(member.id), {})
        liked = sorted(drawn, key=lambda id: affinity.get(id, 0.0), reverse=True)  # ties stay in random order
        chosen: list[str] = []
        for _ in range(min(self.peers, len(fit))):
            explores = float(torch.rand((), generator=server.rng)) < self.epsilon
            order = drawn if explores else liked
            chosen.append(next(id for id in order if id not in chosen))
        return {id: others[id] for id in sorted(chosen)}


def fitting(weights: fl.Weights, mine: Mapping[str, torch.Size]) -> fl.Weights:
    """Of another client's model the layers that a model with these shapes has too."""
    both = fl.weights.in_common(mine, {name: weight.shape for name, weight in weights.items()})
    return {name: weight for name, weight in weights.items() if name in both}


def distance_of(mine: fl.Weights, theirs: fl.Weights) -> Tensor:
    """The Euclidean distance over the parameters that both have, a scalar."""
    gaps = [(theirs[name] - mine[name]).square().sum() for name in mine if name in theirs]
    return torch.stack(gaps).sum().sqrt()


def added(affinity: Affinity, gains: dict[str, dict[str, float]]) -> Affinity:
    """P with the clients' gains added."""
    rows = {i: affinity.get(i, {}) for i in gains}
    return affinity | {i: row | {n: row.get(n, 0.0) + gain for n, gain in gains[i].items()} for i, row in rows.items()}
