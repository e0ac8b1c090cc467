"""InclusiveFL of Liu et al. (KDD 2022), by the formula of its momentum, as the method's departures have it.

The paper's equations were not at hand. In every round each size's mean update g_i is mixed in its top block, by
beta m_i + (1 - beta) g_i, where m_i is the mean of g_(i+1) from that block to the next larger size's top; then layers
are averaged between sizes by their clients' examples. A toy network's blocks are its stages behind the stem.
"""

from collections.abc import Iterator

import torch

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, logits, mean_by_layer, owned, played
from potluck.methods.inclusivefl import InclusiveFL
from potluck.testing.worlds import World

COHORTS = [[0, 1, 2, 3, 4], [0, 1, 3], [1, 2], [0, 2, 4], [0, 2]]
SIZES = ["toy1", "toy2", "toy3"]  # with 1, 2 and 3 blocks
BETA = 0.3


def reference(run: Run, previous: bool, lower: bool) -> list[dict[str, Weights]]:
    """The model of each size before the first round and after each."""
    pool = dict(run.start["toy3"])
    own = {i: {n: t for n, t in pool.items() if lower and kept(n, i)} for i in SIZES}
    models = {i: {**owned(pool, run.start[i]), **own[i]} for i in SIZES}
    found, last = [models], dict[str, Weights]()
    for cohort in COHORTS:
        new, g, shares = dict[str, Weights](), dict[str, Weights](), dict[str, float]()
        for i in SIZES:
            members = [k for k in cohort if run.clients[k].architecture == i]
            if members:
                n_k = [run.clients[k].n for k in members]
                mean = mean_by_layer([trained(run, k, models[i]) for k in members], n_k, {})
                g[i], shares[i] = {n: mean[n] - models[i][n] for n in mean}, sum(n_k)
        for i in g:
            m = momentum(i, last if previous else g)
            mixed = {n: BETA * m[n] + (1 - BETA) * g[i][n] for n in m}
            new[i] = {n: models[i][n] + {**g[i], **mixed}[n] for n in g[i]}
        parts = [{n: t for n, t in new[i].items() if n not in own[i]} for i in new]
        pool = mean_by_layer(parts, [shares[i] for i in new], pool)
        own = {i: owned(new[i], own[i]) if i in new else own[i] for i in SIZES}
        models = {i: {**owned(pool, run.start[i]), **own[i]} for i in SIZES}
        found.append(models)
        last = g
    return found


def kept(name: str, i: str) -> bool:
    """Whether a size has this layer to itself, where it shares the lower ones: its top block and its head."""
    return name.startswith((f"stages.hidden{SIZES.index(i) + 1}.", "head."))


def trained(run: Run, k: int, w: Weights) -> Weights:
    """A client's weights after its local training."""
    data = run.clients[k]
    return descended(lambda v: cross_entropy(logits(v, data.x), data.y), w)


def momentum(i: str, g: dict[str, Weights]) -> Weights:
    """m_i of the top block's tensors, of the updates g of those larger ones that answered."""
    L = SIZES.index(i) + 1
    larger = g.get(f"toy{L + 1}")
    if larger is None:
        return {}
    names = ("stages.hidden{}.0.weight", "stages.hidden{}.0.bias")
    return {n.format(L): torch.stack([larger[n.format(j)] for j in (L, L + 1)]).mean(0) for n in names}


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    for what, momentum_of, shared in (
        ("all shared", "same", "all"),
        ("the lower ones shared", "same", "lower"),
        ("momentum of the round before", "previous", "lower"),
    ):
        method = InclusiveFL(SGD, beta=BETA, momentum=momentum_of, shared=shared)
        run = played(method, len(COHORTS), World(clients=5, architectures=3), COHORTS)
        theirs = reference(run, momentum_of == "previous", shared == "lower")
        ours = [
            {i: {**owned(state.weights["all"], run.start[i]), **state.own.get(i, {})} for i in SIZES}
            for state in run.states
        ]
        yield f"each size's model in five rounds, {what}", gap(ours, theirs)
        models = [{k: by_size[data.architecture] for k, data in run.clients.items()} for by_size in theirs[1:]]
        yield f"every client's model, {what}", gap(run.models, models)
