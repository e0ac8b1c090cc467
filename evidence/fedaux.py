"""FedAUX, from the certainties and the weighted ensemble of Sattler et al. (IEEE TNNLS 2023).

No code of the authors was read; as the method's departures say, the regression and its features are the authors'
code's, h_0 is the untrained network, and all prototypes are distilled. D_minus is as it was drawn, and the server takes
all of D_distill at once. The regression is solved by Newton's method.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, features, gap, logits, mean_by_layer, played
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedaux import FedAUX
from potluck.parts.sharing import Sharing
from potluck.testing.worlds import World

COHORTS = [[0, 1, 2], [0, 2], [1, 3]]
ETA_S, STEPS = 0.3, 3
Pool = dict[str, Weights]


def reference(
    run: Run, certainty: str, regression: str, penalty: float, by_examples: bool
) -> tuple[list[Pool], list[dict[int, Tensor]]]:
    """The prototypes before the first round and after each, and the scores s_i without their 1e-8."""
    public = run.federation.public
    D, D_minus = public.batch(torch.arange(len(public))).inputs.double(), run.states[0].negatives
    rest = torch.tensor([row for row in range(len(D)) if row not in set(D_minus.tolist())])
    theta, s = dict(run.start), dict[int, Tensor]()
    found, scores = [theta], [s]
    for cohort in COHORTS:
        trained: dict[int, Weights] = {}
        for i in cohort:
            data = run.clients[i]
            if certainty == "logistic" and i not in s:
                h = [features(run.start[data.architecture], x) for x in (data.x, D[D_minus], D[rest])]
                s = s | {i: certain(*h, regression, penalty)}
            trained[i] = descended(lambda v, d=data: cross_entropy(logits(v, d.x), d.y), theta[data.architecture])
        weight = torch.stack([s[i] + 1e-8 if i in s else torch.ones(len(rest)) for i in cohort])[:, :, None]
        f = torch.stack([logits(trained[i], D[rest]) for i in cohort])
        target = torch.softmax((weight * f).sum(0) / weight.sum(0), 1)
        theta = dict(theta)
        for p in theta:
            mine = [i for i in cohort if run.clients[i].architecture == p]
            average = mean_by_layer([trained[i] for i in mine], shares(run, mine, by_examples), theta[p])
            theta[p] = descended(lambda v, q=target: divergence(q, logits(v, D[rest])), average, STEPS, ETA_S)
        found.append(theta)
        scores.append(s)
    return found, scores


def shares(run: Run, mine: list[int], by_examples: bool) -> list[float]:
    """What clients count in an average."""
    return [float(run.clients[i].n) if by_examples else 1.0 for i in mine]


def divergence(q: Tensor, z: Tensor) -> Tensor:
    """KL of q from the network's predictions, the mean over a batch."""
    return (torch.xlogy(q, q) - q * F.log_softmax(z, 1)).sum(1).mean()


def certain(own: Tensor, negatives: Tensor, asked: Tensor, regression: str, penalty: float) -> Tensor:
    """The probability that what is asked is a client's own, by a logistic regression against D_minus."""
    known, kind = torch.cat([own, negatives]), torch.cat([torch.ones(len(own)), torch.zeros(len(negatives))])
    if regression == "sum":
        length = known.norm(dim=1).max()
        known, asked = (torch.cat([x / length, torch.ones(len(x), 1)], 1) for x in (known, asked))
        w = newton(known, kind, penalty * torch.cat([torch.ones(own.shape[1]), torch.zeros(1)]))
    else:
        length = negatives.norm(dim=1).max()
        known, asked = (x / x.norm(dim=1, keepdim=True).clamp(min=length) for x in (known, asked))
        w = newton(known, kind, len(known) * penalty * torch.ones(own.shape[1]))
    return torch.sigmoid(asked @ w)


def newton(x: Tensor, kind: Tensor, penalty: Tensor) -> Tensor:
    """The minimum of the sum of the logistic losses + half the penalised squares; steps are halved until they help."""

    def value(w: Tensor) -> Tensor:
        return (F.softplus(x @ w) - kind * (x @ w)).sum() + (penalty * w * w).sum() / 2

    w = torch.zeros(x.shape[1])
    for _ in range(30):
        p = torch.sigmoid(x @ w)
        g = x.T @ (p - kind) + penalty * w
        step = torch.linalg.solve((x.T * (p * (1 - p))) @ x + torch.diag(penalty), g)
        while step.norm() > 1e-14 and value(w - step) > value(w) + 1e-12:
            step = step / 2
        w = w - step
        if step.norm() < 1e-13:
            break
    return w


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    server = LocalTraining("sgd", lr=ETA_S, epochs=STEPS, batch_size=10**6)
    for what, certainty, regression, penalty, weighting in (
        ("sum of losses", "logistic", "sum", 0.01, "uniform"),
        ("mean of losses, by examples", "logistic", "mean", 0.002, "samples"),
        ("all equally certain", "equal", "sum", 0.01, "uniform"),
    ):
        sharing = Sharing("architecture", weighting)
        method = FedAUX(SGD, server, certainty, penalty=penalty, regression=regression, sharing=sharing)
        run = played(method, 3, World(clients=4, labels=2), COHORTS)
        theta, s = reference(run, certainty, regression, penalty, weighting == "samples")
        found = {"theta": [state.weights for state in run.states], "s": [state.scores for state in run.states]}
        yield f"prototypes of three rounds and scores, {what}", gap(found, {"theta": theta, "s": s})
