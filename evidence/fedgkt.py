"""FedGKT, from eq. 6 and 7 and Algorithm 1 of He et al. (NeurIPS 2020).

No code of the authors was read. As the method's departures say, the server trains on the features of the whole cohort
together, its logits are those after its training, and alpha weighs the other side's term at both. The server's network
begins as the engine drew it.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, logits, played
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedgkt import FedGKT
from potluck.testing.worlds import World

COHORTS = [[0, 1, 2], [0, 2], [0, 1]]
ETA_S, STEPS = 0.2, 4


def reference(
    run: Run, alpha: float, T: float
) -> tuple[list[Weights], list[dict[int, Tensor]], list[dict[int, Weights]]]:
    """W_s and z_s before the first round and after each, and extractor and W_s of each client after each."""
    W, W_s = {k: run.start[data.architecture] for k, data in run.clients.items()}, run.states[0].net
    z_s = dict[int, Tensor]()
    found, taught, models = [W_s], [z_s], list[dict[int, Weights]]()
    for cohort in COHORTS:
        for k in cohort:
            x, y = run.clients[k].x, run.clients[k].y
            W[k] = descended(partial(of_client, x, y, z_s.get(k), alpha, T), W[k])
        H = {k: extracted(W[k], run.clients[k].x) for k in cohort}
        z_c = torch.cat([logits(W[k], run.clients[k].x) for k in cohort])
        labels = torch.cat([run.clients[k].y for k in cohort])
        of_server = partial(of_both, torch.cat([*H.values()]), labels, z_c, alpha, T)
        W_s = descended(of_server, W_s, STEPS, ETA_S)
        z_s = z_s | {k: logits(W_s, H[k]) for k in cohort}
        found.append(W_s)
        taught.append(z_s)
        models.append({k: {n: W[k][n] for n in W[k] if ".stem." in n} | W_s for k in W})
    return found, taught, models


def extracted(W: Weights, x: Tensor) -> Tensor:
    """What the extractor gives, the first stage of a network."""
    return (x @ W["stages.stem.0.weight"].T + W["stages.stem.0.bias"]).clamp(min=0)


def of_client(x: Tensor, y: Tensor, z_s: Tensor | None, alpha: float, T: float, W: Weights) -> Tensor:
    """Eq. 7, without the second term in a client's first round."""
    return cross_entropy(logits(W, x), y) if z_s is None else of_both(x, y, z_s, alpha, T, W)


def of_both(x: Tensor, y: Tensor, taught: Tensor, alpha: float, T: float, W: Weights) -> Tensor:
    """Cross-entropy + alpha T^2 KL(taught || net), both softened by T."""
    z = logits(W, x)
    q = torch.softmax(taught / T, 1)
    return cross_entropy(z, y) + alpha * T**2 * (q * (q.log() - F.log_softmax(z / T, 1))).sum(1).mean()


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    server = LocalTraining("sgd", lr=ETA_S, epochs=STEPS, batch_size=10**6)
    for alpha, T in ((1.0, 3.0), (0.4, 1.5)):
        run = played(FedGKT(SGD, server, alpha=alpha, temperature=T), 3, World(clients=3), COHORTS)
        W_s, z_s, models = reference(run, alpha, T)
        what = f"alpha {alpha}, T {T}"
        yield f"W_s of three rounds, {what}", gap([state.net for state in run.states], W_s)
        yield f"the server's logits, {what}", gap([state.logits for state in run.states], z_s)
        yield f"every client's extractor with W_s, {what}", gap(run.models, models)
