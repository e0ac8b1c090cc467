"""FLANC, from the composition of Mei et al. (NeurIPS 2022) and the penalty and averages of the authors' code.

Of the paper only the abstract was read, and of the code a summary. Groups of a layer's inputs are convolved with one
bank of filters, and what comes out is mixed by a width's coefficients. By the method's departures what is not composed
belongs to its width, and a width that nobody has stays. Banks and coefficients begin as the engine drew them; widths
that are drawn are read from the messages. The network has three convolutions, of which the first is not composed.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, mean_by_layer, played
from potluck.core.nets.scale import FULL, Scale
from potluck.methods.flanc import FLANC
from potluck.models.contract import StagedNet
from potluck.testing.worlds import CLASSES, World, toy_federation

COHORTS = [[0, 1, 2], [1], [0, 2]]
UNITS = 8
CAPACITY = {0: 1.0, 1: 0.5, 2: 1.0}


def reference(run: Run, lam: float) -> tuple[list[Weights], list[Weights], list[dict[int, Weights]]]:
    """Banks and each width's own weights before the first round and after each, and every client's network."""
    B, A = run.states[0].banks, run.states[0].weights
    found, models = ([B], [A]), list[dict[int, Weights]]()
    for t, cohort in enumerate(COHORTS):
        banks, own = list[Weights](), list[Weights]()
        for k in cohort:
            p = float(run.sent["local_update"][t][k]["rate"])
            w = descended(lambda v, k=k: loss(v, run, k, lam), network(B, A, p))
            banks.append({n: w[n] for n in B})
            own.append({f"{p}/{n}": v for n, v in w.items() if n not in B})
        B = mean_by_layer(banks, [1.0] * len(cohort), B)
        A = mean_by_layer(own, [1.0] * len(cohort), A)
        found[0].append(B)
        found[1].append(A)
        models.append({k: network(B, A, p) for k, p in CAPACITY.items()})
    return *found, models


def network(B: Weights, A: Weights, p: float) -> Weights:
    """All that a network of width p has."""
    return {**B, **{n.removeprefix(f"{p}/"): v for n, v in A.items() if n.startswith(f"{p}/")}}


def loss(v: Weights, run: Run, k: int, lam: float) -> Tensor:
    """CE and lambda times the sum over banks of the mean square of B B^T - I."""
    data = run.clients[k]
    x = data.x.view(-1, 1, 2, 5)
    x = F.conv2d(x, v["stages.stem.1.weight"], v["stages.stem.1.bias"], padding=1).clamp(min=0)
    x = composed(v, "stages.body.0", x) + v["stages.body.0.bias"][:, None, None]
    x = composed(v, "stages.last.0", x.clamp(min=0)).clamp(min=0)
    total = cross_entropy(x.mean((2, 3)) @ v["head.weight"].T + v["head.bias"], data.y)
    for name in ("stages.body.0", "stages.last.0"):
        bank = v[f"{name}.bank.weight"].flatten(1)
        total = total + lam * ((bank @ bank.T - torch.eye(len(bank))) ** 2).mean()
    return total


def composed(v: Weights, name: str, x: Tensor) -> Tensor:
    """A layer: each group of channels through the bank, and then the coefficients of kernel 1."""
    bank = v[f"{name}.bank.weight"]
    maps = torch.cat([F.conv2d(group, bank, padding=1) for group in x.split(bank.shape[1], 1)], 1)
    return torch.einsum("oc,nchw->nohw", v[f"{name}.coefficients.weight"].flatten(1), maps)


def convolutions(scale: Scale = FULL) -> StagedNet:
    """Three convolutions on the ten inputs as an image of 2 x 5, and the mean over positions."""
    width = scale.of(UNITS)
    body = [nn.Conv2d(width, width, 3, padding=1, bias=bias) for bias in (True, False)]
    stages = {
        "stem": nn.Sequential(nn.Unflatten(1, (1, 2, 5)), nn.Conv2d(1, width, 3, padding=1), nn.ReLU()),
        "body": nn.Sequential(body[0], nn.ReLU()),
        "last": nn.Sequential(body[1], nn.ReLU()),
    }
    return StagedNet(stages, nn.Linear(width, CLASSES))


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    plain = toy_federation(World(clients=3, architectures=1))
    federation = replace(plain, architectures={"toy1": convolutions})
    for what, assignment, lam in (("by capacity", "capacity", 10.0), ("drawn widths, no penalty", "dynamic", 0.0)):
        method = FLANC(SGD, levels=(1.0, 0.5), assignment=assignment, filters=0.5, channels=0.25, penalty=lam)
        run = played(method, cohorts=COHORTS, federation=federation)
        B, A, models = reference(run, lam)
        yield f"banks of three rounds, {what}", gap([s.banks for s in run.states], B)
        yield f"weights of both widths, {what}", gap([s.weights for s in run.states], A)
        yield f"every client's network, {what}", gap(run.models, models)
