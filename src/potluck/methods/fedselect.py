"""FedSelect: personalised parts that grow by the weights that change most.

Tamirisa, Xie, Bao, Zhou, Arel, Shamsian. CVPR 2024. https://arxiv.org/abs/2404.02478.

Every client has a mask of the weights that are its own; all others are averaged. At first it owns none. From time to
time it takes those shared weights that have changed most since the last time, until it owns enough. Local training
alternates between passes over the data that move the client's own weights and passes that move the shared ones.

Symbols
    theta_k   client.model, kept by the client
    theta_g   state.weights
    m_k       state.masks, 1 where a weight of client k's is its own
    delta     moved, how far a weight is from where it was when the mask grew last, client.state["snapshot"]
    p         rate
    alpha     limit
    E, B, eta training.epochs, training.batch_size, training.lr

Wire
    down      weights at most |w|, before at most |bits|, masks at most |bits|
    up        weights at most |w|, masks at most |bits|

Limits
    rate=0.0 equals fedavg sharing.weighting="uniform" on rounds=5
    grow_every=1 rate=0.0 equals fedavg sharing.weighting="uniform" sharing.buffers="local" on rounds=3 batchnorm=true
    training.lr=0.0 grow_every=1 stays at rest on rounds=4

Departures from the paper
    1. Masks cover the tensors whose names contain "weight", as in the authors' code, also those of norms; biases are
       always shared. BatchNorm's running statistics stay at each client, as in the code; for a client that has never
       taken part, which the code does not have, they are measured on its training data.
    2. `grow_every` counts the rounds in which a client takes part; in the code the same clients take part in all.
    3. The weights that a mask gains are exactly a share p of the tensor's shared ones, rounded as in the code; of
       weights that have changed equally, the first come first. The code takes all that have changed as much as the
       last of them: the whole tensor, if nothing has moved.
    4. As in the code, a tensor's mask grows if its share is no more than alpha before, so that it ends above; and what
       a mask gains is taken over once more from the average before it is the client's own.
    5. The server holds the masks and sends each client its own, so that both agree after a reply that was lost. In the
       code everything is in one process.
    6. An epoch is a pass over the client's own weights and one over the shared ones, each with a new optimiser, after
       whose steps the others are put back: with Adam or momentum a gradient of zero would not hold them. Under
       `training.persist` all passes over own weights have one optimiser for the whole run, and all over shared ones
       another. A client that owns nothing yet trains as with FedAvg, on shared weights only; the code has it make
       passes that move nothing but running statistics.
    7. Norms are in training mode; in the code they are in evaluation mode from the second round on.
    8. A client is evaluated with its own weights and the average's ("merged"). The code evaluates before it averages,
       the client's model as it was trained ("trained"); a client that has never taken part has no such model.
    9. Where architectures differ, a weight is averaged over the clients of the round that have it and share it; with no
       such client it stays. The average is plain, not by examples.
    10. Local training defaults to Adam, like all methods here; the code has SGD with 0.05, batches of 32 and 15 epochs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from potluck import fl


@dataclass(frozen=True)
class State:
    """The average of all layers, and by client, packed, the masks of its last training and of the next."""

    weights: fl.Weights
    before: dict[str, fl.Weights]
    masks: dict[str, fl.Weights]


@dataclass(frozen=True)
class FedSelect(fl.Method[State]):
    """Hyper-parameters of FedSelect.

    Attributes:
        training: a client's local training; `epochs`, or `steps`, are those of each of the two parts.
        rate: p, the share of a tensor's shared weights that its mask gains at a time.
        limit: alpha, the share of a tensor up to which its mask grows.
        grow_every: rounds of a client from one growth of its mask to the next.
        evaluated: whether a client's shared weights are the current average, or those of its last training.
        combine: how the clients' values of a weight become one.
    """

    family = "weights"

    variants = {
        "growing often": {"grow_every": 1},
        "as it was trained": {"evaluated": "trained"},
        "lasting optimisers": {"training.persist": True},
    }

    training: fl.LocalTraining = fl.LocalTraining()
    rate: Annotated[float, fl.at_least(0), fl.at_most(1)] = 0.25
    limit: Annotated[float, fl.at_least(0), fl.at_most(1)] = 0.8
    grow_every: Annotated[int, fl.at_least(1)] = 3
    evaluated: Literal["merged", "trained"] = "merged"
    combine: fl.Aggregate = fl.Aggregate()

    def needs(self) -> frozenset[fl.Need]:
        nested = replace(fl.Need.NESTED_LAYERS, advice="use one nested family of models")
        return frozenset({nested, fl.Need.SHARED_LAYERS})

    def init(self, server: fl.Server) -> State:
        trained = {name for member in server.roster.values() for name in member.parameters}
        pool = fl.Sharing().initial(server)["all"]
        return State({name: tensor for name, tensor in pool.items() if name in trained}, {}, {})

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        sent = {i: message_of(state, server.roster[i]) for i in cohort.ids}
        shared = {i: shared_of(sent[i]["masks"], server.roster[i]) for i in cohort.ids}
        means, before, masks = (
            fl.submodels.CoverageMean(state.weights, self.combine),
            dict(state.before),
            dict(state.masks),
        )
        for i, reply in self.combine.arriving(cohort.stream(self.local_update, sent)):
            means.add(reply["weights"], shared[i])
            before[str(i)], masks[str(i)] = sent[i]["masks"], either(sent[i]["masks"], reply["masks"])
            del reply  # before the next comes
        return State(means.weights(), before, masks)

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        own, shared = server.about(member.architecture, fl.weights.outline), shared_of(message["masks"], member)
        rows = {n: own[n].new_empty(int(at.sum())) if isinstance(at, Tensor) else own[n] for n, at in shared.items()}
        return fl.Schema(weights=fl.schema.like(rows), masks=fl.schema.like(message["masks"]))

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        start = fl.parameters_of(merged(client, message))
        masks = {name: fl.submodels.unpacked(bits, start[name].shape) for name, bits in message["masks"].items()}
        yield from self._passes(client, masks)
        trained = fl.parameters_of(client.model)
        shared = fl.submodels.select(
            trained, {**fl.submodels.whole(trained), **{name: ~mask for name, mask in masks.items()}}
        )
        following = self._following(client, masks, start, trained)
        return fl.Message(weights=shared, masks={name: fl.submodels.packed(mask) for name, mask in following.items()})

    def inference_message(self, state: State, client_id: fl.ClientId, server: fl.Server) -> fl.Message:
        took_part = str(client_id) in state.masks
        return (
            fl.Message() if took_part and self.evaluated == "trained" else message_of(state, server.roster[client_id])
        )

    @fl.on_client
    def inference_model(self, client: fl.Client, message: fl.Message) -> nn.Module:
        return merged(client, message) if "weights" in message else client.model

    def _passes(self, client: fl.Client, masks: fl.Weights) -> Iterator[fl.Fit]:
        """Local training: in every epoch a pass that moves the client's own weights, and one that moves the others."""
        if not any(bool(mask.any()) for mask in masks.values()):
            yield fl.Fit(client.model, client.objective, client.train, self.training, name="shared")
            return
        nothing = {name: torch.zeros_like(w, dtype=torch.bool) for name, w in fl.parameters_of(client.model).items()}
        own = {**nothing, **masks}
        shared = {name: ~mask for name, mask in own.items()}
        training = replace(self.training, epochs=1)  # or as many steps as it has
        for _ in range(self.training.epochs if self.training.steps is None else 1):
            for name, moving in (("own", own), ("shared", shared)):
                extras = {"moving": moving, "start": fl.parameters_of(client.model)}
                yield fl.Fit(
                    client.model,
                    client.objective,
                    client.train,
                    training,
                    extras,
                    after_step=fl.moving.put_back,
                    name=name,
                )

    def _following(self, client: fl.Client, masks: fl.Weights, start: fl.Weights, trained: fl.Weights) -> fl.Weights:
        """The masks of the client's next round; it notes its rounds, and where its weights were at the last growth."""
        rounds, snapshot = (
            client.state.get("rounds", 0),
            client.state.get("snapshot", fl.submodels.select(start, fl.submodels.whole(masks))),
        )
        if rounds and rounds % self.grow_every == 0:
            masks = {name: self.grown(mask, (trained[name] - snapshot[name]).abs()) for name, mask in masks.items()}
            snapshot = {name: trained[name] for name in masks}
        client.state.update(rounds=rounds + 1, snapshot=snapshot)
        return masks

    def grown(self, mask: Tensor, moved: Tensor) -> Tensor:
        """A tensor's mask with a share p more of its shared weights, those that have moved most."""
        shared = (~mask).flatten().nonzero().flatten()
        gained = len(shared) - round((1 - self.rate) * len(shared))
        if float(mask.double().mean()) > self.limit or not gained:
            return mask
        order = moved.flatten()[shared].argsort(descending=True, stable=True)
        more = mask.flatten().clone()
        more[shared[order[:gained]]] = True
        return more.view(mask.shape)


def maskable(member: fl.Member) -> list[str]:
    """Names of the weights that can become a client's own."""
    return sorted(name for name in member.parameters if "weight" in name)


def message_of(state: State, member: fl.Member) -> fl.Message:
    """The average where a client shared its weights in its last training, its mask of then, and the one of the next."""
    none = {name: fl.submodels.packed(torch.zeros(member.shapes[name], dtype=torch.bool)) for name in maskable(member)}
    before, masks = (held.get(str(member.id), none) for held in (state.before, state.masks))
    return fl.Message(weights=fl.submodels.select(state.weights, shared_of(before, member)), before=before, masks=masks)


def shared_of(masks: fl.Weights, member: fl.Member) -> fl.submodels.SubModel:
    """Where the weights lie that a client shares, by its packed masks."""
    places = {name: ~fl.submodels.unpacked(bits, member.shapes[name]) for name, bits in masks.items()}
    return {**fl.submodels.leading({name: member.shapes[name] for name in sorted(member.parameters)}), **places}


def merged(client: fl.Client, message: fl.Message) -> nn.Module:
    """The client's model after it took over the average where its weights were not its own in its last training."""
    own = fl.parameters_of(client.model)
    places = {name: ~fl.submodels.unpacked(bits, own[name].shape) for name, bits in message["before"].items()}
    return fl.load(
        client.model, fl.submodels.put(message["weights"], {**fl.submodels.whole(own), **places}, own), partial=True
    )


def either(one: fl.Weights, other: fl.Weights) -> fl.Weights:
    """Packed masks of what is in one of two."""
    return {name: bits | other[name] for name, bits in one.items()}
