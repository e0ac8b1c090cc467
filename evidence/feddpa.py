"""FedDPA, from the Fisher personalisation and the adaptive constraint of Yang et al. (NeurIPS 2023).

No code of the authors was read. As the method's departures say, of the code are the norms, which are summed over
tensors and not squared, that all weights count in them, and that both kinds are sent; a tensor that has moved by less
than 1e-6 does not count, one with the same Fisher information everywhere has none, and clients begin with the global
model. The noise is the engine's draw.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from evidence.ground import (
    SGD,
    Run,
    Weights,
    cross_entropy,
    gap,
    gradient,
    logits,
    mean_by_layer,
    owned,
    played,
)
from potluck.core.ground.rng import fold_in
from potluck.methods.feddpa import FedDPA
from potluck.testing.worlds import CLASSES, World

COHORTS = [[0, 1, 2], [0, 2], [1, 2]]
TAU, LAMBDA_1, LAMBDA_2, C = 0.3, 0.8, 0.02, 0.055
STEPS, ETA = 3, 0.1


def reference(run: Run, clipped: bool, sigma: float, own: bool) -> tuple[list[Weights], list[dict[int, Weights]]]:
    """The server's weights before the first round and after each, and what clients would deploy after each."""
    theta_g = dict(max(run.start.values(), key=len))
    theta, found, models = dict[int, Weights](), [theta_g], list[dict[int, Weights]]()
    for t, cohort in enumerate(COHORTS, start=1):
        key = fold_in(int(torch.randint(2**62, (), generator=fold_in(0, "server", t).generator())))
        sent: list[Weights] = []
        for i in cohort:
            start = owned(theta_g, run.start[run.clients[i].architecture])
            theta[i] = local(run, i, theta.get(i, start), start)
            draws = key.fold(i).generator()
            sent.append(private(start, theta[i], sigma * C / len(run.clients) ** 0.5, draws) if clipped else theta[i])
        theta_g = mean_by_layer(sent, [run.clients[i].n for i in cohort], theta_g)
        found.append(theta_g)
        deployed = {i: owned(theta_g, run.start[data.architecture]) for i, data in run.clients.items()}
        models.append(deployed | theta if own else deployed)
    return found, models


def local(run: Run, i: int, w: Weights, theta_g: Weights) -> Weights:
    """A client's weights after it has chosen its own and trained both kinds."""
    x, y = run.clients[i].x, run.clients[i].y
    F = fisher(w, x, y)
    m = {n: (F[n] > TAU).double() for n in w}
    w = {n: torch.where(m[n] > 0, w[n], theta_g[n]) for n in w}

    def distance(v: Weights) -> Tensor:
        moved = [(v[n] - theta_g[n]).norm() for n in v if (v[n] - theta_g[n]).norm() > 1e-6]
        return sum(moved, torch.zeros(()))

    def pulled(v: Weights) -> Tensor:
        return cross_entropy(logits(v, x), y) + LAMBDA_1 / 2 * distance(v)

    def bounded(v: Weights) -> Tensor:
        return cross_entropy(logits(v, x), y) + LAMBDA_2 / 2 * (distance(v) - C).abs()

    for loss, moving in ((pulled, m), (bounded, {n: 1 - m[n] for n in m})):
        for _ in range(STEPS if any(mask.any() for mask in moving.values()) else 0):
            g = gradient(loss, w)
            w = {n: w[n] - ETA * moving[n] * g[n] for n in w}
    return w


def fisher(w: Weights, x: Tensor, y: Tensor) -> Weights:
    """The mean square of each weight's gradient of log p(y | x) over single examples, from 0 to 1 in a tensor."""
    layers = [name.removesuffix(".weight") for name in w if name.endswith(".weight")]
    inputs = [x]
    for layer in layers[:-1]:
        inputs.append((inputs[-1] @ w[f"{layer}.weight"].T + w[f"{layer}.bias"]).clamp(min=0))
    delta, found = torch.softmax(logits(w, x), 1) - one_hot(y, CLASSES), Weights()
    for layer, h in zip(reversed(layers), reversed(inputs), strict=True):
        # One example's gradient is its delta times what the layer reads.
        found[f"{layer}.weight"] = (delta**2).T @ h**2 / len(y)
        found[f"{layer}.bias"] = (delta**2).mean(0)
        delta = (delta @ w[f"{layer}.weight"]) * (h > 0)
    spread = {n: found[n].max() - found[n].min() for n in w}
    return {n: (found[n] - found[n].min()) / spread[n] if spread[n] else 0 * found[n] for n in w}


def private(theta_g: Weights, w: Weights, deviation: float, draws: torch.Generator) -> Weights:
    """What is sent: theta_g + the update, clipped to a norm of C, and noise."""
    norm = torch.cat([(w[n] - theta_g[n]).flatten() for n in w]).norm()
    sent = {n: theta_g[n] + (w[n] - theta_g[n]) / max(1.0, norm / C) for n in w}
    if not deviation:
        return sent
    return {n: tensor + deviation * torch.randn(tensor.shape, generator=draws) for n, tensor in sent.items()}


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    for what, clipped, sigma, evaluated in (
        ("plain", False, 0.0, "own"),
        ("clipped", True, 0.0, "own"),
        ("noisy, the global model", True, 0.1, "global"),
    ):
        options = {"threshold": TAU, "lambda1": LAMBDA_1, "lambda2": LAMBDA_2, "bound": C, "clipped": clipped}
        method = FedDPA(SGD, noise_multiplier=sigma, evaluated=evaluated, **options)
        run = played(method, 3, World(clients=3), COHORTS)
        theta_g, models = reference(run, clipped, sigma, evaluated == "own")
        yield f"weights of three rounds, {what}", gap([state.weights["all"] for state in run.states], theta_g)
        yield f"every client's model, {what}", gap(run.models, models)
