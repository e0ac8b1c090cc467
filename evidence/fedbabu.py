"""FedBABU, from Algorithm 1 of Oh et al. (ICLR 2022): only the body learns; fine-tuned for two epochs of whole batches.

No code was read.
"""

from collections.abc import Iterator

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, logits, mean_by_layer, owned, played
from potluck.methods.fedbabu import FedBABU

COHORTS = [[0, 1, 2], [0, 2], [1], [0, 1, 2]]
TUNED, RATE = 2, 0.05


def reference(run: Run, tuned: str) -> tuple[list[Weights], list[dict[int, Weights]]]:
    """The weights before the first round and after each, and every client's model, fine-tuned."""
    w = dict(max(run.start.values(), key=len))
    found, models = [w], list[dict[int, Weights]]()
    for cohort in COHORTS:
        parts: list[Weights] = []
        for k in cohort:
            net = owned(w, run.start[run.clients[k].architecture])
            parts.append(part(run, k, net, lambda n: not n.startswith("head."), 3, 0.1))
        w = mean_by_layer(parts, [run.clients[k].n for k in cohort], w)
        found.append(w)
        tuning = {k: owned(w, run.start[data.architecture]) for k, data in run.clients.items()}
        moves = (lambda n: True) if tuned == "all" else (lambda n: n.startswith("head."))
        models.append({k: {**net, **part(run, k, net, moves, TUNED, RATE)} for k, net in tuning.items()})
    return found, models


def part(run: Run, k: int, net: Weights, moves, steps: int, lr: float) -> Weights:
    """The layers of a client's network that move, after some steps."""
    data = run.clients[k]
    moving = {n: w for n, w in net.items() if moves(n)}
    return descended(lambda v: cross_entropy(logits({**net, **v}, data.x), data.y), moving, steps, lr)


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    for tuned in ("all", "head"):
        method = FedBABU(SGD, tuned=tuned, tuning_epochs=TUNED, tuning_lr=RATE, tuning_batch=10**6)
        run = played(method, 4, cohorts=COHORTS)
        w, models = reference(run, tuned)
        yield f"weights of four rounds, tuned: {tuned}", gap([s.weights["all"] for s in run.states], w)
        yield f"every client's model, tuned: {tuned}", gap(run.models, models)
