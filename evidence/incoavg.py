"""InCoAvg, from eq. 2 and Algorithm 1 of Chan et al. (ICLR 2024), and by the rule of the authors' code.

No code was read: what the code has of its own, theta's sign, its limits and 1e-7, is as in the method's departures.
A toy network's stages of one shape are paired with the first of them, tensor by tensor; in a network of convolutions
each kernel is mixed by itself. Averages are equal, layer by layer.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, logits, mean_by_layer, owned, played
from potluck.methods.incoavg import InCoAvg
from potluck.parts.crosslayer import CrossLayer
from potluck.testing.worlds import CLASSES, World, toy_federation

COHORTS = [[0, 1, 2], [0, 2], [1, 2]]
PAIRS = {f"stages.hidden{i}.0.weight": "stages.hidden1.0.weight" for i in (2, 3)} | {"c3.weight": "c2.weight"}
EPS = 1e-7


def reference(run: Run, inco: CrossLayer) -> list[Weights]:
    """The server's weights before the first round and after each."""
    w = dict(run.start["toy2"])
    found = [w]
    for cohort in COHORTS:
        trained: list[Weights] = []
        for k in cohort:
            data = run.clients[k]
            sent = owned(w, run.start[data.architecture])
            trained.append(descended(lambda v, d=data: cross_entropy(outputs(v, d.x), d.y), sent))
        mean = mean_by_layer(trained, [1.0] * len(cohort), w)
        g = {n: mean[n] - w[n] for n in w if any(n in own for own in trained)}
        mixed = {n: mix(g[n], g[PAIRS[n]], inco) if n in PAIRS else g[n] for n in g}
        w = {n: w[n] + mixed[n] if n in g else w[n] for n in w}
        found.append(w)
    return found


def mix(g_k: Tensor, g_0: Tensor, inco: CrossLayer) -> Tensor:
    """An update of a deep layer with its shallow one, of each kernel of a convolution by itself."""
    if g_k.dim() == 4 and inco.granularity == "kernel":
        pairs = zip(g_k.flatten(0, 1), g_0.flatten(0, 1), strict=True)
        return torch.stack([mix(deep, shallow, inco) for deep, shallow in pairs]).view_as(g_k)
    alpha, beta = (g_0 * g_0).sum(), (g_0 * g_k).sum()
    theta = {
        "released": (beta.abs() / (alpha + EPS)).clamp(max=inco.cap),
        "paper": -beta / alpha,  # Algorithm 1
        "theorem": torch.zeros(()) if beta >= 0 else -beta / alpha,  # eq. 2
        "sum": torch.ones(()),
    }[inco.rule]
    g = g_k + theta * g_0
    if inco.normalise:
        N_k, N_0 = g_k.norm(), g_0.norm()
        g = (g_k / (N_k + EPS) + theta * g_0 / (N_0 + EPS)) * (N_k + N_0) / 2
    return g.clamp(-inco.clip, inco.clip)


def outputs(w: Weights, x: Tensor) -> Tensor:
    """Of a toy network, or of one of convolutions."""
    if "c1.weight" not in w:
        return logits(w, x)
    x = x.view(-1, 1, 2, 5)
    for layer in ("c1", "c2", "c3"):
        if f"{layer}.weight" in w:
            x = F.conv2d(x, w[f"{layer}.weight"], w[f"{layer}.bias"], padding=1).clamp(min=0)
    return x.flatten(1) @ w["head.weight"].T + w["head.bias"]


def convolutions(depth: int) -> nn.Module:
    """A network of so many convolutions of 3 channels, on the ten inputs as an image of 2 x 5."""
    layers = OrderedDict[str, nn.Module](image=nn.Unflatten(1, (1, 2, 5)))
    for i in range(1, depth + 1):
        layers |= {f"c{i}": nn.Conv2d(1 if i == 1 else 3, 3, 3, padding=1), f"relu{i}": nn.ReLU()}
    return nn.Sequential(layers | {"flat": nn.Flatten(), "head": nn.Linear(30, CLASSES)})


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    world = World(clients=3, depth=2)
    images = replace(
        toy_federation(world), architectures={"toy1": lambda: convolutions(2), "toy2": lambda: convolutions(3)}
    )
    for what, inco, federation in (
        ("the code's rule", CrossLayer(cap=0.01, clip=0.002), None),
        ("Algorithm 1", CrossLayer("paper", clip=10.0), None),
        ("eq. 2", CrossLayer("theorem", normalise=False, clip=10.0), None),
        ("sums", CrossLayer("sum", clip=10.0), None),
        ("the code's rule, by kernel", CrossLayer(cap=0.3, clip=0.002), images),
        ("the code's rule, convolutions as tensors", CrossLayer(granularity="tensor"), images),
    ):
        run = played(InCoAvg(SGD, inco=inco), world=world, cohorts=COHORTS, federation=federation)
        yield f"weights of three rounds, {what}", gap([s.weights["all"] for s in run.states], reference(run, inco))
