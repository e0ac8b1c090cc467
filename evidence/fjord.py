"""FjORD, from sections 3 and 4 and Algorithm 1 of Horvath et al. (NeurIPS 2021), all widths drawn equally often.

No code was read. As the method's departures say of it, the widest network learns from labels and teaches the drawn one
with weight and temperature 1, and steps are plain gradient descent here. The same widths are drawn, one for each step,
from the key of the client's training.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, logits, played
from evidence.heterofl import COHORTS, RATES, federation, grid, leading, sliced
from potluck.core.ground.rng import fold_in, isolated
from potluck.methods.fjord import FjORD

P = tuple(RATES.values())
ALL = torch.arange(4)


def reference(run: Run, distil: bool) -> tuple[list[Weights], list[dict[int, Weights]]]:
    """W before the first round and after each, and every client's widest network after each."""
    w = run.start["toy1"]
    found, models = [w], list[dict[int, Weights]]()
    for number, cohort in enumerate(COHORTS, 1):
        total, examples = ({n: torch.zeros_like(t) for n, t in w.items()} for _ in range(2))
        for k in cohort:
            p_max = float(run.sent["local_update"][number - 1][k]["rate"])
            trained = local(run, k, number, sliced(w, leading(number, p_max)), p_max, distil)
            for n in w:
                at = grid(n, leading(number, p_max), ALL)
                total[n][at] += run.clients[k].n * trained[n]
                examples[n][at] += run.clients[k].n
        w = {n: torch.where(examples[n] > 0, total[n] / examples[n].clamp(min=1), w[n]) for n in w}
        found.append(w)
        models.append({k: sliced(w, leading(number, RATES[k])) for k in run.clients})
    return found, models


def local(run: Run, k: int, number: int, w: Weights, p_max: float, distil: bool) -> Weights:
    """A client's weights after three steps, each of another width."""
    x, y = run.clients[k].x, run.clients[k].y
    for p in drawn(k, number, [p for p in P if p <= p_max]):

        def loss(w: Weights, p: float = p) -> Tensor:
            z = logits(sliced(w, leading(number, p)), x)
            if not distil:
                return cross_entropy(z, y)
            widest = logits(w, x)
            taught = widest.detach().log_softmax(1)
            return cross_entropy(widest, y) + (taught.exp() * (taught - z.log_softmax(1))).sum(1).mean()

        w = descended(loss, w, 1)
    return w


def drawn(k: int, number: int, widths: list[float]) -> list[float]:
    """The widths of a client's three steps in a round; nothing is drawn of one."""
    with isolated(fold_in(0, "client", number, 1, k).fold("fit", 0).fold("forward")):
        return [widths[int(torch.randint(len(widths), ()))] if len(widths) > 1 else widths[0] for _ in range(3)]


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    for what, method, distil in (
        ("by capacity", FjORD(SGD, levels=P), True),
        ("without distillation", FjORD(SGD, levels=P, distil=False), False),
        ("largest widths drawn", FjORD(SGD, levels=P, assignment="dynamic"), True),
    ):
        run = played(method, 4, cohorts=COHORTS, federation=federation())
        weights, models = reference(run, distil)
        yield f"weights of four rounds, {what}", gap([s.weights for s in run.states], weights)
        if what == "by capacity":
            yield "every client's widest network in four rounds", gap(run.models, models)
