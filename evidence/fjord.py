"""FjORD, from sections 3 and 4 and Algorithm 1 of Horvath et al. (NeurIPS 2021), all widths drawn equally often.

No code was read. As the method's departures say of it, the widest network learns from labels and teaches the drawn one
with weight and temperature 1, and BatchNorm has running statistics for each width, averaged by examples over those who
have it. The same widths are drawn, one for each step, from the key of the client's training.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, mean_by_layer, played
from evidence.heterofl import COHORTS, RATES, compared, federation, grid, leading, passed, sliced, without_counts
from potluck.core.ground.rng import fold_in, isolated
from potluck.methods.fjord import FjORD

P = tuple(RATES.values())
ALL = torch.arange(4)


def reference(run: Run, distil: bool) -> tuple[list[Weights], list[dict[int, Weights]]]:
    """W and all statistics before the first round and after each, and every client's widest network after each."""
    begin = without_counts(run.start["toy1"])
    w = {n: t for n, t in begin.items() if ".running_" not in n}
    ran = {p: sliced({n: t for n, t in begin.items() if n not in w}, leading(1, p)) for p in P}
    found, models = [{**w, **named(ran)}], list[dict[int, Weights]]()
    for number, cohort in enumerate(COHORTS, 1):
        total, examples = ({n: torch.zeros_like(t) for n, t in w.items()} for _ in range(2))
        heard: dict[float, list[tuple[Weights, float]]] = {p: [] for p in P}
        for k in cohort:
            p_max, n_k = float(run.sent["local_update"][number - 1][k]["rate"]), run.clients[k].n
            slices = sliced(w, leading(number, p_max))
            trained, tracked = local(run, k, number, slices, {p: ran[p] for p in P if p <= p_max}, distil)
            for n in w:
                at = grid(n, leading(number, p_max), ALL)
                total[n][at] += n_k * trained[n]
                examples[n][at] += n_k
            for p, statistics in tracked.items():
                heard[p].append((statistics, n_k))
        w = {n: torch.where(examples[n] > 0, total[n] / examples[n].clamp(min=1), w[n]) for n in w}
        ran = {p: mean_by_layer([t for t, _ in heard[p]], [n for _, n in heard[p]], ran[p]) for p in P}
        found.append({**w, **named(ran)})
        models.append({k: {**sliced(w, leading(number, p)), **ran[p]} for k, p in RATES.items()})
    return found, models


def named(ran: dict[float, Weights]) -> Weights:
    """The statistics of all widths as the server names them."""
    return {f"{p}/{n}": t for p, statistics in ran.items() for n, t in statistics.items()}


def local(
    run: Run, k: int, number: int, w: Weights, ran: dict[float, Weights], distil: bool
) -> tuple[Weights, dict[float, Weights]]:
    """A client's weights, and its widths' statistics, after three steps, each of another width."""
    x, y, p_max = run.clients[k].x, run.clients[k].y, max(ran)
    for p in drawn(k, number, list(ran)):

        def loss(w: Weights, p: float = p) -> Tensor:
            z, _ = passed(sliced(w, leading(number, p)), x)
            if not distil:
                return cross_entropy(z, y)
            widest, _ = passed(w, x)
            taught = widest.detach().log_softmax(1)
            return cross_entropy(widest, y) + (taught.exp() * (taught - z.log_softmax(1))).sum(1).mean()

        for q in {p, p_max} if distil else {p}:
            seen = passed(sliced(w, leading(number, q)), x)[1]
            ran = {**ran, q: {n: 0.9 * t + 0.1 * seen[n] for n, t in ran[q].items()}}
        w = descended(loss, w, 1)
    return w, ran


def drawn(k: int, number: int, widths: list[float]) -> list[float]:
    """The widths of a client's three steps in a round; nothing is drawn of one."""
    with isolated(fold_in(0, "client", number, 1, k).fold("fit", 0).fold("forward")):
        return [widths[int(torch.randint(len(widths), ()))] if len(widths) > 1 else widths[0] for _ in range(3)]


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    method = FjORD(SGD, levels=P)
    for what, changes, distil in (
        ("BatchNorm", {}, True),
        ("BatchNorm without distillation", {"distil": False}, False),
        ("no norm, largest widths drawn", {"assignment": "dynamic"}, True),
    ):
        made = federation(batchnorm=what.startswith("BatchNorm"))
        run = played(replace(method, **changes), 4, cohorts=COHORTS, federation=made)
        weights, models = compared(run, reference(run, distil))
        yield f"weights of four rounds, {what}", weights
        yield f"every client's widest network in four rounds, {what}", models
