"""DS-FL, from the algorithm and the equations of ERA and of simple aggregation of Itahara et al. (IEEE TMC 2023).

No code was read. As the method's departures say, a client learns from a round's labels when it is next drawn, before
its own data, and the average is of those who were drawn. The average of logits is tried besides. The rows of the public
data are read from the messages.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, logits, played, public_data
from potluck.methods.dsfl import DSFL

COHORTS = [[0, 1, 2], [0, 2], [1], [0, 1]]
T = 0.2
Found = tuple[list[Weights], list[Tensor], list[dict[int, Weights]]]


def reference(run: Run, aggregation: str, average: str) -> Found:
    """After each round w_g, the labels t_g of its rows, and every client's weights."""
    x, _ = public_data(run)
    w = {k: run.start[data.architecture] for k, data in run.clients.items()}
    w_g, lesson = run.start["toy1"], None
    common, labels, models = list[Weights](), list[Tensor](), list[dict[int, Weights]]()
    for number, cohort in enumerate(COHORTS):
        o_r = x[run.sent["local_update"][number][cohort[0]]["rows"]]
        t: list[Tensor] = []
        for k in cohort:
            if lesson is not None:
                w[k] = distilled(w[k], *lesson)
            data = run.clients[k]
            w[k] = descended(lambda v, d=data: cross_entropy(logits(v, d.x), d.y), w[k])
            z = logits(w[k], o_r)
            t.append(z if average == "logits" else z.softmax(1))
        t_hat = torch.stack(t).mean(0)
        if average == "logits":
            t_hat = t_hat.softmax(1)
        t_g = (t_hat / T).softmax(1) if aggregation == "era" else t_hat
        lesson = (o_r, t_g)
        w_g = distilled(w_g, o_r, t_g)
        common.append(w_g)
        labels.append(t_g)
        models.append(dict(w))
    return common, labels, models


def distilled(w: Weights, x: Tensor, t: Tensor) -> Weights:
    """The weights after learning from labels t."""
    return descended(lambda v: -(t * logits(v, x).log_softmax(1)).sum(1).mean(), w)


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    for what, aggregation, average in (
        ("ERA", "era", "probabilities"),
        ("simple aggregation", "sa", "probabilities"),
        ("ERA of logits", "era", "logits"),
    ):
        method = DSFL(SGD, SGD, SGD, 24, aggregation=aggregation, temperature=T, average=average)
        run = played(method, 4, cohorts=COHORTS)
        common, labels, models = reference(run, aggregation, average)
        yield f"the server's model of four rounds, {what}", gap([s.common for s in run.states[1:]], common)
        yield f"the labels of four rounds, {what}", gap([s.lesson["labels"] for s in run.states[1:]], labels)
        yield f"every client's weights in four rounds, {what}", gap(run.models, models)
