"""FedGen, from eq. 4 and 5 and Algorithm 1 of Zhu et al. (ICML 2021).

No code of the authors was read. G's layers, and the distances of the diversity term, which are means, are the method's.
As its departures say, G learns before the average, on the layers that were sent; clients weigh by examples; p(y) is of
the last cohort; and beta times KL from predictions of generated features is the code's. Labels, noise and the order of
the examples that they meet are the engine's draws.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, logits, mean_by_layer, owned, played
from potluck.core.ground.rng import Key, fold_in
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedgen import FedGen
from potluck.parts.sharing import Sharing
from potluck.testing.worlds import CLASSES, World

COHORTS = [[0, 1, 2], [0, 2], [1], [0, 1, 2]]
NOISE, SAMPLES, STEPS, RATE = 5, 24, 3, 0.2
BN = "layers.1."


def reference(
    run: Run, alpha: float, beta: float, share: bool, diversity: float, by_examples: bool
) -> tuple[list[Weights], list[Weights]]:
    """The weights theta and the generator's w, before the first round and after each."""
    theta, w, counts = dict(max(run.start.values(), key=len)), run.states[0].generator, torch.zeros(CLASSES)
    found, generators = [theta], [w]
    for t, cohort in enumerate(COHORTS, start=1):
        trained: list[Weights] = []
        for k in cohort:
            key = fold_in(0, "client", t, 1, k).fold("fit", 0)
            weights = (alpha, beta) if t > 1 else (0.0, 0.0)
            trained.append(local(run, k, theta, w, counts, weights, key))
        n = torch.stack([torch.bincount(run.clients[k].y, minlength=CLASSES) for k in cohort]).double()
        w, counts = taught(w, trained, n, share, diversity, fold_in(0, "server", t)), n.sum(0)
        theta = mean_by_layer(trained, n.sum(1).tolist() if by_examples else [1.0] * len(cohort), theta)
        found.append(theta)
        generators.append(w)
    return found, generators


def local(run: Run, k: int, theta: Weights, w: Weights, p: Tensor, weights: tuple[float, float], key: Key) -> Weights:
    """A client's weights after learning from its examples and from generated features."""
    data, draws = run.clients[k], key.fold("forward").generator()
    v, (alpha, beta) = owned(theta, run.start[data.architecture]), weights
    for step in range(3):
        order = torch.randperm(data.n, generator=key.fold("order", step).generator())
        x, y = data.x[order], data.y[order]
        terms: list[Callable[[Weights], Tensor]] = [partial(supervised, x, y)]
        if alpha or beta:
            y_hat = torch.multinomial(p.float(), data.n, replacement=True, generator=draws)
            z = generated(w, y_hat, torch.randn(data.n, NOISE, generator=draws), running=True)
            terms.append(partial(recognised, alpha, z, y_hat))
        if beta:
            z_y = generated(w, y, torch.randn(data.n, NOISE, generator=draws), running=True)
            terms.append(partial(drawn_to, beta, torch.softmax(head(v, z_y), 1), x))
        v = descended(lambda v, terms=terms: torch.stack([term(v) for term in terms]).sum(), v, 1)
    return v


def supervised(x: Tensor, y: Tensor, v: Weights) -> Tensor:
    """Cross-entropy on own examples."""
    return cross_entropy(logits(v, x), y)


def recognised(alpha: float, z: Tensor, y_hat: Tensor, v: Weights) -> Tensor:
    """The second term of eq. 5, on generated features."""
    return alpha * cross_entropy(head(v, z), y_hat)


def drawn_to(beta: float, q: Tensor, x: Tensor, v: Weights) -> Tensor:
    """The code's term: beta KL of the predictions of generated features from the client's."""
    return beta * (q * (q.log() - F.log_softmax(logits(v, x), 1))).sum(1).mean()


def taught(w: Weights, trained: list[Weights], n: Tensor, share: bool, diversity: float, key: Key) -> Weights:
    """The generator's weights after some steps on labels from p(y), on the last layers that the clients sent."""
    drawn = torch.multinomial(n.sum(0).float(), SAMPLES, replacement=True, generator=key.generator())
    # In single precision, as the method has them.
    shares = (n.float() / n.sum(0).float().clamp(min=1)).double() if share else None
    key = key.fold("fit", 1)
    draws = key.fold("forward").generator()
    for step in range(STEPS):
        y = drawn[torch.randperm(SAMPLES, generator=key.fold("order", step).generator())]
        eps = torch.randn(SAMPLES, NOISE, generator=draws)
        h = hidden(w, y, eps)
        seen = {"running_mean": h.mean(0), "running_var": h.var(0)}
        learnt = {name: w[name] for name in w if "running" not in name and "batches" not in name}
        loss = partial(eq_4, trained, shares, diversity, y, eps)
        w = w | descended(loss, learnt, 1, RATE)
        w |= {BN + name: 0.9 * w[BN + name] + 0.1 * value for name, value in seen.items()}
        w[f"{BN}num_batches_tracked"] = w[f"{BN}num_batches_tracked"] + 1
    return w


def eq_4(trained: list[Weights], shares: Tensor | None, diversity: float, y: Tensor, eps: Tensor, w: Weights) -> Tensor:
    """The generator's loss: that of the mean logits, or of each client's by its share of the class."""
    z = generated(w, y, eps)
    each = torch.stack([head(v, z) for v in trained])
    if shares is None:
        total = cross_entropy(each.mean(0), y)
    else:
        total = (shares[:, y] * -F.log_softmax(each, 2)[:, torch.arange(SAMPLES), y]).sum(0).mean()
    apart = (z[:, None] - z).abs().mean(2) * (eps[:, None] - eps).square().mean(2)
    return total + diversity * torch.exp(-apart.mean())


def hidden(w: Weights, y: Tensor, eps: Tensor) -> Tensor:
    """What the generator normalises."""
    return torch.cat([eps, F.one_hot(y, CLASSES)], 1) @ w["layers.0.weight"].T + w["layers.0.bias"]


def generated(w: Weights, y: Tensor, eps: Tensor, running: bool = False) -> Tensor:
    """G(y, eps): a hidden layer, normalised by the batch's statistics or the running ones."""
    h = hidden(w, y, eps)
    m = w[f"{BN}running_mean"] if running else h.mean(0)
    v = w[f"{BN}running_var"] if running else h.var(0, correction=0)
    h = ((h - m) / (v + 1e-5).sqrt() * w[f"{BN}weight"] + w[f"{BN}bias"]).clamp(min=0)
    return h @ w["layers.3.weight"].T + w["layers.3.bias"]


def head(v: Weights, z: Tensor) -> Tensor:
    """What a client's last layer makes of features."""
    return z @ v["head.weight"].T + v["head.bias"]


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    training = LocalTraining("sgd", lr=RATE, epochs=STEPS, batch_size=SAMPLES)
    for what, alpha, beta, ensemble, diversity, weighting in (
        ("by examples", 1.0, 0.0, "mean", 1.0, "samples"),
        ("by shares of classes, with beta, equally", 0.6, 0.7, "share", 0.4, "uniform"),
    ):
        sizes = {"samples": SAMPLES, "noise": NOISE, "hidden": 8, "sharing": Sharing(weighting=weighting)}
        method = FedGen(SGD, training, alpha, beta, ensemble, diversity, **sizes)
        run = played(method, 4, World(clients=3, labels=3), COHORTS)
        theta, w = reference(run, alpha, beta, ensemble == "share", diversity, weighting == "samples")
        yield f"weights of four rounds, {what}", gap([state.weights["all"] for state in run.states], theta)
        yield f"w of four rounds, {what}", gap([state.generator for state in run.states], w)
