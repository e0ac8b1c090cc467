"""FedOpt, from Algorithm 2 of Reddi et al. (ICLR 2021), and FedAvgM from section 4 of Hsu et al. (2019).

No code was read. A layer that some clients lack has the mean update of those that own it, and rests where none was
drawn (departure 1 of the method).
"""

from collections.abc import Iterator

import torch

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, logits, mean_by_layer, owned, played
from potluck.methods.fedopt import FedOpt

COHORTS = [[0, 1, 2], [0, 2], [1], [0, 1, 2]]
ETA, BETA_1, BETA_2, TAU = 0.03, 0.8, 0.95, 0.01


def reference(run: Run, rule: str) -> list[Weights]:
    """X before the first round and after each."""
    x = dict(max(run.start.values(), key=len))
    m = {n: torch.zeros_like(w) for n, w in x.items()}
    v = {n: torch.full_like(w, TAU**2) for n, w in x.items()}
    found = [x]
    for cohort in COHORTS:
        updates: list[Weights] = []
        for k in cohort:
            data = run.clients[k]
            start = owned(x, run.start[data.architecture])
            trained = descended(lambda w, d=data: cross_entropy(logits(w, d.x), d.y), start)
            updates.append({n: trained[n] - start[n] for n in start})
        delta = mean_by_layer(updates, [run.clients[k].n for k in cohort], {})
        x = dict(x)
        for n, d in delta.items():
            if rule == "momentum":
                m[n] = BETA_1 * m[n] + d
                x[n] = x[n] + ETA * m[n]
                continue
            m[n] = BETA_1 * m[n] + (1 - BETA_1) * d
            if rule == "adagrad":
                v[n] = v[n] + d**2
            if rule == "yogi":
                v[n] = v[n] - (1 - BETA_2) * d**2 * torch.sign(v[n] - d**2)
            if rule == "adam":
                v[n] = BETA_2 * v[n] + (1 - BETA_2) * d**2
            x[n] = x[n] + ETA * m[n] / (torch.sqrt(v[n]) + TAU)
        found.append(x)
    return found


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    for rule in ("adam", "yogi", "adagrad", "momentum"):
        run = played(FedOpt(SGD, rule, ETA, BETA_1, BETA_2, TAU), 4, cohorts=COHORTS)
        yield f"x of four rounds, {rule}", gap([s.weights["all"] for s in run.states], reference(run, rule))
