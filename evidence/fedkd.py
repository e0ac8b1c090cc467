"""FedKD, from the losses of adaptive mutual distillation, the decomposition of updates and T(t) of Wu et al. (2022).

No code was read. As the method's departures say, an exchange is a round of local training, a matrix is sent as factors
only if these are smaller, T(t) reaches its end in a stated round, and each net takes the other's outputs and loss for
constants, or, as in the authors' code, none of it. The mentee's first weights are read from the messages, those of the
layer between the nets drawn again.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from evidence.ground import SGD, Run, Weights, cross_entropy, features, gap, gradient, logits, mean_by_layer, played
from potluck.core.ground.rng import fold_in, isolated
from potluck.methods.fedkd import FedKD

COHORTS = [[0, 1, 2], [0, 2], [1], [0, 1]]
LR, T_START, T_END, GROWTH = 0.1, 0.6, 0.9, 3
Nets = dict[str, Weights]


def reference(run: Run, joint: bool, hidden: float, compress: bool) -> tuple[list[Weights], list[dict[int, Weights]]]:
    """Theta^s before the first round and after each, and every mentor after each."""
    mentee: Weights = run.sent["local_update"][0][0]["common"]
    with isolated(fold_in(0, "module", "link")):
        W_h = {"W": nn.Linear(16, 16, bias=False).weight.detach()}
    nets = {k: {"t": run.start[data.architecture], "W": W_h} for k, data in run.clients.items()}
    found, models = [mentee], list[dict[int, Weights]]()
    for number, cohort in enumerate(COHORTS, 1):
        T = T_START + (T_END - T_START) * min(number / GROWTH, 1) if compress else 1.0
        updates: list[Weights] = []
        for k in cohort:
            trained = taught(run, k, {**nets[k], "s": mentee}, joint, hidden)
            nets[k] = {"t": trained["t"], "W": trained["W"]}
            updates.append(truncated({n: trained["s"][n] - mentee[n] for n in mentee}, T))
        update = truncated(mean_by_layer(updates, [1.0] * len(cohort), {}), T)
        mentee = {n: mentee[n] + update[n] for n in mentee}
        found.append(mentee)
        models.append({k: own["t"] for k, own in nets.items()})
    return found, models


def taught(run: Run, k: int, nets: Nets, joint: bool, hidden: float) -> Nets:
    """Mentor, mentee and the layer between them after three steps."""
    for _ in range(3):

        def moved(changed: Weights, fixed: Nets = nets) -> tuple[Tensor, Tensor]:
            now = {net: {n: changed.get(f"{net}/{n}", w) for n, w in all.items()} for net, all in fixed.items()}
            return losses(run.clients[k].x, run.clients[k].y, now, hidden)

        flat = {f"{net}/{n}": w for net, all in nets.items() for n, w in all.items()}
        if joint:
            g = gradient(lambda v: sum(moved(v), torch.zeros(())), flat)
        else:  # each net by its own loss, the layer between them by both
            g_t = gradient(lambda v: moved(v)[0], {n: w for n, w in flat.items() if not n.startswith("s/")})
            g_s = gradient(lambda v: moved(v)[1], {n: w for n, w in flat.items() if not n.startswith("t/")})
            g = {n: g_t.get(n, torch.zeros(())) + g_s.get(n, torch.zeros(())) for n in flat}
        nets = {net: {n: w - LR * g[f"{net}/{n}"] for n, w in all.items()} for net, all in nets.items()}
    return nets


def losses(x: Tensor, y: Tensor, nets: Nets, hidden: float) -> tuple[Tensor, Tensor]:
    """L_t and L_s."""
    z_t, z_s = logits(nets["t"], x), logits(nets["s"], x)
    task_t, task_s = cross_entropy(z_t, y), cross_entropy(z_s, y)
    L_h = (features(nets["t"], x) - features(nets["s"], x) @ nets["W"]["W"].T).square().mean()
    quality = task_t + task_s
    return task_t + (kl(z_s, z_t) + hidden * L_h) / quality, task_s + (kl(z_t, z_s) + hidden * L_h) / quality


def kl(z_p: Tensor, z_q: Tensor) -> Tensor:
    """KL(p || q), the mean over examples."""
    p, q = z_p.log_softmax(1), z_q.log_softmax(1)
    return (p.exp() * (p - q)).sum(1).mean()


def truncated(update: Weights, T: float) -> Weights:
    """U_K S_K V_K of each matrix, K the least that keeps more than T of the squared singular values."""
    found = dict(update)
    for n, g in update.items():
        if g.dim() == 2 and T < 1:
            U, S, V = torch.linalg.svd(g, full_matrices=False)
            K = next(K for K in range(1, len(S) + 1) if (S[:K] ** 2).sum() > T * (S**2).sum())
            if K * (g.shape[0] + g.shape[1]) < g.numel():
                found[n] = U[:, :K] @ torch.diag(S[:K]) @ V[:K]
    return found


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    for what, gradients, hidden, compress in (
        ("each by its own loss", "own", 1.0, True),
        ("both by the sum", "joint", 0.8, True),
        ("without hidden features", "own", 0.0, True),
        ("uncompressed", "own", 1.0, False),
    ):
        start, end = (T_START, T_END) if compress else (1.0, 1.0)
        run = played(FedKD(SGD, 1.0, hidden, start, end, GROWTH, gradients), 4, cohorts=COHORTS)
        mentees, mentors = reference(run, gradients == "joint", hidden, compress)
        yield f"the mentee of four rounds, {what}", gap([s.common for s in run.states], mentees)
        yield f"every mentor of four rounds, {what}", gap(run.models, mentors)
