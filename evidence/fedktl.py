"""FedKTL, from the client's two tasks and the server's alignment of Zhang et al. (CVPR 2024).

The MMD's kernels are those of the authors' code; else none of it was read. By the method's departures the simplex is
not turned, the generator is a variational auto-encoder's decoder, fitted to the public data in the first round, and Q
are the means of F(P) before and after F is trained, or learnt only. First weights, noise, and the order in which a
client goes through the pairs are drawn here as by the engine; F and Q begin as the engine drew them.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, features, gap, gradient, logits, played
from potluck.core.ground.rng import Key, fold_in, isolated
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedktl import FedKTL
from potluck.testing.worlds import CLASSES, World

COHORTS = [[0, 1], [0, 2], [1, 2]]
LATENT, HIDDEN = 3, 6
GENERATOR, ALIGNMENT = (0.05, 4), (0.2, 3)  # rates and numbers of steps
Pairs = tuple[Tensor, Tensor]


def reference(run: Run, method: FedKTL) -> tuple[list[Weights], list[Weights], list[dict[int, Weights]]]:
    """F with Q before the first round and after each; and after each the pairs, and every client's model."""
    A, w = run.states[0].alignment, {k: run.start[data.architecture] for k, data in run.clients.items()}
    G, known, pairs = Weights(), set[int](), None
    found = [A], list[Weights](), list[dict[int, Weights]]()
    for t, cohort in enumerate(COHORTS, start=1):
        P, y = list[Tensor](), list[int]()
        for k in cohort:
            w[k] = local(run, k, t, w[k], pairs, method)
            directions = unit(logits(w[k], run.clients[k].x))
            for c in sorted(set(run.clients[k].y.tolist())):
                P.append(unit(directions[run.clients[k].y == c].mean(0)))
                y.append(c)
        key = fold_in(0, "server", t)
        A = aligned(A, torch.stack(P), torch.tensor(y), key.fold("fit", 1), method)
        G = G or generator(run, key.fold("fit", 2), method.kl_weight)
        known |= set(y)
        q = A["centres.weight"][sorted(known)]
        pairs = perceptron(G, q), q
        found[0].append(A)
        found[1].append({"images": pairs[0], "vectors": q})
        found[2].append({k: {f"net.{n}": p for n, p in own.items()} for k, own in w.items()})
    return found


def unit(x: Tensor) -> Tensor:
    """Rows of length 1."""
    return x / (x * x).sum(-1, keepdim=True).sqrt()


def local(run: Run, k: int, t: int, w: Weights, pairs: Pairs | None, method: FedKTL) -> Weights:
    """A client's weights after its own task and the transfer, whose linear layer begins anew."""
    data, h, image, q = run.clients[k], Weights(), torch.zeros(0), torch.zeros(0)
    v = (torch.eye(CLASSES) - 1 / CLASSES) * (CLASSES / (CLASSES - 1)) ** 0.5
    if pairs:
        with isolated(fold_in(0, "module", "projector")):
            linear = nn.Linear(w["head.weight"].shape[1], LATENT)
        h = {"h.weight": linear.weight.detach(), "h.bias": linear.bias.detach()}
        order = torch.randperm(len(pairs[0]), generator=fold_in(0, "client", t, 1, k, "client").generator())
        beside = order[torch.arange(data.n) % len(order)]
        image, q = pairs[0][beside], pairs[1][beside]

    def loss(u: Weights) -> Tensor:
        cosine = unit(logits(u, data.x)) @ v.T
        own = F.one_hot(data.y, CLASSES).bool()
        theta = torch.where(own, cosine, torch.zeros(())).acos()
        e = method.scale * torch.where(own, torch.cos(theta + method.margin), cosine)
        if not pairs:
            return cross_entropy(e, data.y)
        told = features(u, image) @ u["h.weight"].T + u["h.bias"]
        return cross_entropy(e, data.y) + method.transfer * ((told - q) ** 2).mean()

    return {n: p for n, p in descended(loss, {**w, **h}).items() if n in w}


def transformed(A: Weights, P: Tensor, training: bool) -> tuple[Tensor, Weights]:
    """F(P), and BatchNorm's running statistics after it."""
    x = P @ A["transformer.0.weight"].T
    m, s = A["transformer.1.running_mean"], A["transformer.1.running_var"]
    running = {
        "transformer.1.running_mean": 0.9 * m + 0.1 * x.mean(0).detach(),
        "transformer.1.running_var": 0.9 * s + 0.1 * x.var(0).detach(),
    }
    m, s = (x.mean(0), x.var(0, correction=0)) if training else (m, s)
    x = (x - m) / (s + 1e-5).sqrt() * A["transformer.1.weight"] + A["transformer.1.bias"]
    return x.clamp(min=0) @ A["transformer.3.weight"].T + A["transformer.3.bias"], running


def aligned(A: Weights, P: Tensor, y: Tensor, key: Key, method: FedKTL) -> Weights:
    """F and Q after steps down MMD(F(P), z) + lambda MSE(F(P), Q_y)."""
    A = centred(A, P, y, method)
    with isolated(key.fold("forward")):
        noise = [torch.randn(len(P), LATENT) for _ in range(ALIGNMENT[1])]
    for z in noise:

        def loss(v: Weights, A: Weights = A, z: Tensor = z) -> Tensor:
            found, _ = transformed({**A, **v}, P, training=True)
            return mmd(found, z) + method.centring * ((found - v["centres.weight"][y]) ** 2).mean()

        learnt = {n: p for n, p in A.items() if "running" not in n and p.is_floating_point()}
        g, running = gradient(loss, learnt), transformed(A, P, training=True)[1]
        A = {**A, **{n: learnt[n] - ALIGNMENT[0] * g[n] for n in learnt}, **running}
    return centred(A, P, y, method)


def centred(A: Weights, P: Tensor, y: Tensor, method: FedKTL) -> Weights:
    """Q of the classes of these prototypes as the means of F(P)."""
    if method.centres == "learnt":
        return A
    Q, found = A["centres.weight"].clone(), transformed(A, P, training=False)[0]
    for c in y.unique():
        Q[c] = found[y == c].mean(0)
    return {**A, "centres.weight": Q}


def mmd(x: Tensor, z: Tensor) -> Tensor:
    """The squared discrepancy, by Gaussian kernels of four widths."""

    def k(a: Tensor, b: Tensor) -> Tensor:
        squares = ((a[:, None] - b[None]) ** 2).sum(2)
        return sum((torch.exp(-squares / (2 * width)) for width in (10, 15, 20, 50)), torch.zeros(())).mean()

    return k(x, x) + k(z, z) - 2 * k(x, z)


def perceptron(v: Weights, x: Tensor, prefix: str = "") -> Tensor:
    """One hidden layer."""
    x = (x @ v[f"{prefix}1.weight"].T + v[f"{prefix}1.bias"]).clamp(min=0)
    return x @ v[f"{prefix}3.weight"].T + v[f"{prefix}3.bias"]


def generator(run: Run, key: Key, beta: float) -> Weights:
    """G: the decoder that is fitted to the public data with an encoder."""
    x, v = run.federation.public.batch(torch.arange(len(run.federation.public))).inputs.double(), Weights()
    for name, part, sizes in (
        ("encoder", "encoder", (x.shape[1], HIDDEN, 2 * LATENT)),
        ("generator", "decoder", (LATENT, HIDDEN, x.shape[1])),
    ):
        with isolated(fold_in(0, "module", name)):
            layers = {1: nn.Linear(*sizes[:2]), 3: nn.Linear(*sizes[1:])}
        v |= {f"{part}.{i}.{n}": p.detach() for i, layer in layers.items() for n, p in layer.named_parameters()}
    with isolated(key.fold("forward")):
        noise = [torch.randn(len(x), LATENT) for _ in range(GENERATOR[1])]
    for epoch, e in enumerate(noise):
        order = torch.randperm(len(x), generator=key.fold("order").fold(epoch).generator())

        def loss(v: Weights, x: Tensor = x[order], e: Tensor = e) -> Tensor:
            m, s = perceptron(v, x, "encoder.").chunk(2, 1)
            gaps = x - perceptron(v, m + (s / 2).exp() * e, "decoder.")
            return ((gaps**2).sum(1) / 2 + beta * ((s.exp() + m**2 - 1 - s) / 2).sum(1)).mean()

        v = descended(loss, v, 1, GENERATOR[0])
    return {n.removeprefix("decoder."): p for n, p in v.items() if n.startswith("decoder.")}


def numbers(w: Weights) -> Weights:
    """All but what BatchNorm counts."""
    return {n: p for n, p in w.items() if p.is_floating_point()}


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    decoder, server = (LocalTraining("sgd", lr=lr, epochs=n, batch_size=10**6) for lr, n in (GENERATOR, ALIGNMENT))
    for what, centres, margin, transfer in (
        ("means", "means", 0.4, 3.0),
        ("learnt centres, no margin", "learnt", 0.0, 1.5),
    ):
        options = {"centres": centres, "margin": margin, "transfer": transfer, "latent": LATENT, "hidden": HIDDEN}
        method = FedKTL(SGD, decoder, server, scale=6.0, centring=0.7, **options)
        run = played(method, world=World(clients=3, labels=2), cohorts=COHORTS)
        A, pairs, models = reference(run, method)
        yield f"F and Q in three rounds, {what}", gap([numbers(s.alignment) for s in run.states], [*map(numbers, A)])
        yield f"pairs, {what}", gap([s.pairs for s in run.states[1:]], pairs)
        yield f"every client's model, {what}", gap(run.models, models)
