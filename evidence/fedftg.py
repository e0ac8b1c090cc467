"""FedFTG, from the fine-tuning by hard samples of Zhang et al. (CVPR 2022) and of the authors' code.

Of the code `train_gan_fn.py` and the loop of `local_fn_gan.py` were read: a client's logits are constant in the
disagreement, the term for diversity is divided among clients, and G is in evaluation mode where students learn. As the
method's departures say, each sample's cross-entropy weighs by its own share, students are by architecture, and samples
that are no images come from one hidden layer. Noise, labels and the order of the examples are the engine's draws.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, logits, mean_by_layer, played
from potluck.core.ground.rng import fold_in
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedftg import FedFTG
from potluck.testing.worlds import CLASSES, World

COHORTS = [[0, 1, 2, 3], [0, 2], [1, 3]]  # a client alone is its own student, and |0| has no gradient
NOISE, BATCH, STEPS, STUDENT_STEPS = 6, 20, 2, 2
ETA, ETA_G = 0.2, 0.3
LAMBDA_ADV, LAMBDA_CLS, LAMBDA_DIV = 1.5, 0.7, 0.8
L = "layers.layers."
Pool = dict[str, Weights]


def reference(run: Run, by_sample: bool, over_classes: bool) -> tuple[list[Pool], list[Weights]]:
    """The students and G's weights, before the first round and after each."""
    w, G = dict(run.start), run.states[0].generator
    found, generators = [w], [G]
    for t, cohort in enumerate(COHORTS, start=1):
        trained = {
            k: descended(partial(supervised, run.clients[k].x, run.clients[k].y), w[run.clients[k].architecture])
            for k in cohort
        }
        students: Pool = {}
        for p in w:
            mine = [k for k in cohort if run.clients[k].architecture == p]
            if mine:
                students[p] = mean_by_layer([trained[k] for k in mine], [run.clients[k].n for k in mine], w[p])
        n = torch.stack([torch.bincount(run.clients[k].y, minlength=CLASSES) for k in cohort]).float()
        students, G = tuned(students, G, [*trained.values()], n, t, by_sample, over_classes)
        w = w | students
        found.append(w)
        generators.append(G)
    return found, generators


def supervised(x: Tensor, y: Tensor, v: Weights) -> Tensor:
    """A client's loss."""
    return cross_entropy(logits(v, x), y)


def tuned(
    students: Pool, G: Weights, clients: list[Weights], n: Tensor, t: int, by_sample: bool, over_classes: bool
) -> tuple[Pool, Weights]:
    """The students and G after their turns; n are numbers of examples (clients, classes)."""
    key = fold_in(0, "server", t)
    draws, size = key.generator(), STEPS * BATCH
    noise = torch.randn(size, NOISE, generator=draws)
    labels = torch.multinomial(n.sum(0), size, replacement=True, generator=draws)
    order = torch.randperm(size, generator=key.fold("fit", 1, "order", 0).generator())
    alpha = (n / n.sum(0).clamp(min=1)).double()  # in single precision, as the method has them
    for rows in order.split(BATCH):
        z, y = noise[rows], labels[rows]
        for client, share in zip(clients, alpha[:, y], strict=True):
            learnt = {name: G[name] for name in G if "running" not in name and "batches" not in name}
            after = seen(G, z, y)
            loss = partial(hardness, students, client, share, z, y, len(clients), by_sample)
            G = G | after | descended(loss, learnt, 1, ETA_G)
        x, _ = generated(G, z, y, running=True)
        taught = (alpha[:, y, None] * torch.stack([torch.softmax(logits(v, x), 1) for v in clients])).sum(0)
        learn = partial(taught_loss, taught, x, over_classes)
        students = {p: descended(learn, v, STUDENT_STEPS, ETA) for p, v in students.items()}
    return students, G


def hardness(
    students: Pool, client: Weights, share: Tensor, z: Tensor, y: Tensor, clients: int, by_sample: bool, G: Weights
) -> Tensor:
    """The loss of G by one client."""
    x, _ = generated(G, z, y)
    of_client = logits(client, x)
    apart = torch.stack([(logits(v, x) - of_client.detach()).abs().mean(1) for v in students.values()]).mean(0)
    missed = -F.log_softmax(of_client, 1)[torch.arange(len(y)), y]
    cls = (share * missed).mean() if by_sample else share.float().mean() * missed.mean()
    distance = (x[:, None] - x).abs().mean(2) * (z[:, None] - z).square().mean(2)
    return LAMBDA_CLS * cls + LAMBDA_DIV * torch.exp(-distance.mean()) / clients - LAMBDA_ADV * (share * apart).mean()


def taught_loss(taught: Tensor, x: Tensor, over_classes: bool, v: Weights) -> Tensor:
    """Cross-entropy to what the clients predict together."""
    return -(taught * F.log_softmax(logits(v, x), 1)).sum(1).mean() / (CLASSES if over_classes else 1)


def generated(G: Weights, z: Tensor, y: Tensor, running: bool = False) -> tuple[Tensor, list[Tensor]]:
    """Samples, and what the two normalisations read."""
    h = torch.cat([z, F.one_hot(y, CLASSES)], 1) @ G[f"{L}0.weight"].T + G[f"{L}0.bias"]
    h = h, normalised(G, f"{L}1.", h, running) * G[f"{L}1.weight"] + G[f"{L}1.bias"]
    out = F.leaky_relu(h[1], 0.2) @ G[f"{L}3.weight"].T + G[f"{L}3.bias"]
    return normalised(G, f"{L}4.", out, running), [h[0], out]


def normalised(G: Weights, norm: str, h: Tensor, running: bool) -> Tensor:
    """By the running statistics or the batch's."""
    m = G[f"{norm}running_mean"] if running else h.mean(0)
    v = G[f"{norm}running_var"] if running else h.var(0, correction=0)
    return (h - m) / (v + 1e-5).sqrt()


def seen(G: Weights, z: Tensor, y: Tensor) -> Weights:
    """The running statistics after a batch."""
    found = Weights()
    for norm, h in zip((f"{L}1.", f"{L}4."), generated(G, z, y)[1], strict=True):
        found[f"{norm}running_mean"] = 0.9 * G[f"{norm}running_mean"] + 0.1 * h.mean(0)
        found[f"{norm}running_var"] = 0.9 * G[f"{norm}running_var"] + 0.1 * h.var(0)
        found[f"{norm}num_batches_tracked"] = G[f"{norm}num_batches_tracked"] + 1
    return found


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    server = LocalTraining("sgd", lr=ETA, steps=STEPS, batch_size=BATCH)
    weights = {"hardness": LAMBDA_ADV, "recognition": LAMBDA_CLS, "diversity": LAMBDA_DIV}
    sizes = {"student_steps": STUDENT_STEPS, "noise": NOISE, "width": 3}
    for what, class_weights, reduction in (
        ("by sample", "each", "batchmean"),
        ("by batch, as released", "batch", "mean"),
    ):
        options = {"class_weights": class_weights, "reduction": reduction}
        method = FedFTG(SGD, server, LocalTraining("sgd", lr=ETA_G), **weights, **sizes, **options)
        run = played(method, 3, World(clients=4, labels=3), COHORTS)
        w, G = reference(run, class_weights == "each", reduction == "mean")
        yield f"students of three rounds, {what}", gap([state.weights for state in run.states], w)
        yield f"G of three rounds, {what}", gap([state.generator for state in run.states], G)
