"""FedL2G, from the step that is tried and the gradient on the quiz of Zhang et al. (2024), without second derivatives.

The gradient in v of the quiz's loss after one step is, as the paper has it, of first order: the step depends on v by
2 lambda (z - v_y) alone, so that pi is the derivative of z in the direction of the quiz's gradient. Of the authors'
code nothing was read: by the method's departures a class's mean covers the clients whose study has it. Guide, quiz and
study are those that the engine drew; the latter two are seen in what its losses are called with.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from evidence.ground import (
    SGD,
    Data,
    Run,
    Weights,
    cross_entropy,
    descended,
    features,
    gap,
    gradient,
    logits,
    played,
    recorded,
)
from potluck.methods.fedl2g import FedL2G, GuidedLoss, QuizLoss
from potluck.testing.worlds import CLASSES, World

COHORTS = [[0, 1, 2], [0, 2], [1], [0, 1, 2]]
ETA, LAMBDA = 0.3, 0.8
Guided = Callable[[Weights, Tensor], Tensor]


def reference(
    run: Run, z: Guided, eta_s: float, warm_up: int, studies: list[Tensor], own: dict[int, Data], quiz: dict[int, Data]
) -> tuple[list[Tensor], list[dict[int, Weights]]]:
    """The vectors before the first round and after each, and every client's model after each."""
    v, theta = run.states[0].guide, {k: run.start[data.architecture] for k, data in run.clients.items()}
    found, models, study = [v], list[dict[int, Weights]](), iter(studies)
    for t, cohort in enumerate(COHORTS, start=1):
        pi, count = torch.zeros_like(v), torch.zeros(CLASSES)
        for k in cohort:
            if t > warm_up:
                theta[k] = descended(lambda w, k=k, v=v: guided(w, own[k], z, v), theta[k])
            S = having(run.clients[k], next(study))
            pi += gradient_of_quiz(theta[k], S, quiz[k], z, v)
            count += torch.tensor([float(c in S.y) for c in range(CLASSES)])
        v = v - eta_s * pi / count.clamp(min=1)[:, None]
        found.append(v)
        models.append(dict(theta))
    return found, models


def guided(theta: Weights, data: Data, z: Guided, v: Tensor) -> Tensor:
    """L + lambda MSE(z, v_y)."""
    return cross_entropy(logits(theta, data.x), data.y) + LAMBDA * ((z(theta, data.x) - v[data.y]) ** 2).mean()


def gradient_of_quiz(theta: Weights, S: Data, quiz: Data, z: Guided, v: Tensor) -> Tensor:
    """pi, (classes, width): 2 eta lambda / (n width) times the sum over a class of dz along the quiz's gradient."""
    tried = descended(lambda w: guided(w, S, z, v), theta, 1, ETA)
    u = gradient(lambda w: cross_entropy(logits(w, quiz.x), quiz.y), tried)
    dz = moved(theta, u, S.x, to_logits=z is logits)
    by_class = torch.stack([dz[S.y == c].sum(0) for c in range(CLASSES)])
    return 2 * ETA * LAMBDA / dz.numel() * by_class


def moved(w: Weights, dw: Weights, x: Tensor, to_logits: bool) -> Tensor:
    """The derivative of z in the direction dw, layer by layer."""
    dx = torch.zeros_like(x)
    for stage in [n.removesuffix(".weight") for n in w if n.endswith(".0.weight")]:
        W, dW = w[f"{stage}.weight"], dw[f"{stage}.weight"]
        h, dh = x @ W.T + w[f"{stage}.bias"], dx @ W.T + x @ dW.T + dw[f"{stage}.bias"]
        x, dx = h.clamp(min=0), torch.where(h > 0, dh, 0.0)
    return dx @ w["head.weight"].T + x @ dw["head.weight"].T + dw["head.bias"] if to_logits else dx


def having(data: Data, x: Tensor, without: bool = False) -> Data:
    """Those of a client's examples that have these inputs, or that have not."""
    chosen = (data.x[:, None] == x.double()[None]).all(2).any(1) != without
    return Data(data.x[chosen], data.y[chosen], data.architecture)


def trained_on(run: Run, batches: list[Tensor]) -> dict[int, Tensor]:
    """By client the largest of the batches that are of its examples: what is not the quiz."""
    return {
        k: max((b for b in batches if len(having(data, b).y) == len(b)), key=len) for k, data in run.clients.items()
    }


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    for what, guide, z, eta_s, warm_up, world in (
        ("logits", "logits", logits, 2.0, 0, World(clients=3, labels=3)),
        ("features, after one round of guide alone", "features", features, 50.0, 1, World(clients=3)),
    ):
        options = {"strength": LAMBDA, "server_rate": eta_s, "study_rate": ETA, "study": 12, "warm_up": warm_up}
        with recorded(QuizLoss) as studies, recorded(GuidedLoss) as batches:
            run = played(FedL2G(SGD, guide, **options), 4, world, COHORTS)
        rest = trained_on(run, batches)
        own = {k: having(data, rest[k]) for k, data in run.clients.items()}
        quiz = {k: having(data, rest[k], without=True) for k, data in run.clients.items()}
        v, models = reference(run, z, eta_s, warm_up, studies, own, quiz)
        yield f"v of four rounds, {what}", gap([s.guide for s in run.states], v)
        yield f"every client's model, {what}", gap(run.models, models)
