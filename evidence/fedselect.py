"""FedSelect, from the growing masks and the alternating training of Tamirisa et al. (CVPR 2024).

No code of the authors was read. As the method's departures say, of the code is that masks cover weights and no biases,
that a mask grows if its share is no more than alpha before, and that what it gains is taken over from the average once
more; a mask gains exactly a share p, rounded as there, and rounds are counted by client. In a client's first round
nothing grows, as in the code.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from evidence.ground import SGD, Run, Weights, cross_entropy, gap, gradient, logits, owned, played
from potluck.methods.fedselect import FedSelect
from potluck.testing.worlds import World

COHORTS = [[0, 1], [0, 1, 2], [0, 2], [0, 1, 2], [1, 2], [0, 1, 2]]
P, EPOCHS, ETA = 0.25, 3, 0.1


def reference(run: Run, alpha: float, every: int, merged: bool) -> tuple[list[Weights], list[dict[int, Weights]]]:
    """The average before the first round and after each, and every client's model after each."""
    theta_g = dict(max(run.start.values(), key=len))
    theta, v = dict[int, Weights](), dict[int, Weights]()  # each client's model, and where it was when its mask grew
    m = {k: {n: 0 * w for n, w in run.start[data.architecture].items()} for k, data in run.clients.items()}
    sent, took = dict(m), dict.fromkeys(run.clients, 0)  # the masks by which clients train, and rounds of each
    found, models = [theta_g], list[dict[int, Weights]]()
    for cohort in COHORTS:
        for k in cohort:
            start = owned(theta_g, m[k])
            received = joined(sent[k], theta.get(k, start), start)
            v.setdefault(k, start)
            theta[k] = local(run, k, received, m[k])
            sent[k], took[k] = m[k], took[k] + 1
            if took[k] > 1 and (took[k] - 1) % every == 0:
                m[k], v[k] = grown(m[k], theta[k], v[k], alpha), theta[k]
        theta_g = averaged(theta_g, [(theta[k], sent[k]) for k in cohort])
        found.append(theta_g)
        mix = {k: joined(sent[k], theta.get(k, w), w) for k, w in ((k, owned(theta_g, m[k])) for k in m)}
        models.append(mix if merged else mix | theta)
    return found, models


def joined(mask: Weights, own: Weights, shared: Weights) -> Weights:
    """The client's own weights where the mask is 1, the average's elsewhere."""
    return {n: torch.where(mask[n] > 0, own[n], shared[n]) for n in mask}


def supervised(x: Tensor, y: Tensor, w: Weights) -> Tensor:
    """A client's loss."""
    return cross_entropy(logits(w, x), y)


def local(run: Run, k: int, w: Weights, m: Weights) -> Weights:
    """Passes that move a client's own weights and passes that move the shared ones, in turns."""
    loss = partial(supervised, run.clients[k].x, run.clients[k].y)
    for _ in range(EPOCHS):
        for moving in (m, {n: 1 - mask for n, mask in m.items()}):
            g = gradient(loss, w)
            w = {n: w[n] - ETA * moving[n] * g[n] for n in w}
    return w


def grown(m: Weights, w: Weights, v: Weights, alpha: float) -> Weights:
    """The masks with the share p of the shared weights that have changed most."""
    found = dict(m)
    for n in m:
        if "weight" in n and m[n].mean() <= alpha:
            moved = (w[n] - v[n]).abs().flatten()
            shared = [j for j in range(moved.numel()) if m[n].flatten()[j] == 0]
            most = sorted(shared, key=lambda j, moved=moved: -float(moved[j]))[
                : len(shared) - round((1 - P) * len(shared))
            ]
            found[n] = m[n].flatten().index_fill(0, torch.tensor(most, dtype=torch.int64), 1.0).view(m[n].shape)
    return found


def averaged(theta_g: Weights, trained: list[tuple[Weights, Weights]]) -> Weights:
    """Of each weight the plain mean over the clients that have it and share it; it stays if there is none."""
    found = Weights()
    for n, kept in theta_g.items():
        total, count = torch.zeros_like(kept), torch.zeros_like(kept)
        for w, mask in trained:
            if n in w:
                total, count = total + (1 - mask[n]) * w[n], count + 1 - mask[n]
        found[n] = torch.where(count > 0, total / count.clamp(min=1), kept)
    return found


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    for what, alpha, every, evaluated in (
        ("growing every round", 0.5, 1, "merged"),
        ("growing every second round, as trained", 0.8, 2, "trained"),
    ):
        method = FedSelect(SGD, P, alpha, every, evaluated)
        run = played(method, len(COHORTS), World(clients=3), COHORTS)
        theta_g, models = reference(run, alpha, every, evaluated == "merged")
        yield f"theta_g of six rounds, {what}", gap([state.weights for state in run.states], theta_g)
        yield f"every client's model, {what}", gap(run.models, models)
