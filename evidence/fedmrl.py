"""FedMRL, from the equations of section 4 and Algorithm 1 of Yi et al. (NeurIPS 2024).

No code was read. The common network is narrower than the clients', so that its head reads the leading part of what is
projected. Its weights and the projectors' begin as the engine drew them, the latter alike at all clients: they are seen
in the model of a client that is not drawn in the first round.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, features, gap, mean_by_layer, played
from potluck.methods.fedmrl import FedMRL
from potluck.testing.worlds import World, toy_federation, toy_net

COHORTS = [[0, 1], [0, 2], [1], [0, 1, 2]]
D_1 = 6


def reference(run: Run, m_G: float, m_F: float, by_examples: bool) -> tuple[list[Weights], list[dict[int, Weights]]]:
    """Theta before the first round and after each, and every client's networks and projector after each."""
    theta = run.states[0].common
    omega = {k: run.start[data.architecture] for k, data in run.clients.items()}
    phi = {k: under(run.models[0][2], "projector.") for k in run.clients}
    found, models = [theta], list[dict[int, Weights]]()
    for cohort in COHORTS:
        copies: list[Weights] = []
        for k in cohort:
            data = run.clients[k]

            def loss(v: Weights, d=data) -> Tensor:
                common, own = heads(under(v, "common."), under(v, "own."), under(v, "projector."), d.x)
                return m_G * cross_entropy(common, d.y) + m_F * cross_entropy(own, d.y)

            after = descended(loss, joined(theta, omega[k], phi[k]))
            omega[k], phi[k] = under(after, "own."), under(after, "projector.")
            copies.append(under(after, "common."))
        theta = mean_by_layer(copies, [run.clients[k].n if by_examples else 1 for k in cohort], theta)
        found.append(theta)
        models.append({k: joined(theta, omega[k], phi[k]) for k in run.clients})
    return found, models


def heads(theta: Weights, omega: Weights, phi: Weights, x: Tensor) -> tuple[Tensor, Tensor]:
    """What the common head and the client's put out: both read the projection of both representations."""
    R = torch.cat([features(theta, x), features(omega, x)], 1)
    R_f = R @ phi["weight"].T + phi["bias"]
    R_c = R_f[:, :D_1]
    return R_c @ theta["head.weight"].T + theta["head.bias"], R_f @ omega["head.weight"].T + omega["head.bias"]


def under(w: Weights, prefix: str) -> Weights:
    """The entries whose names begin so, without the prefix."""
    return {n.removeprefix(prefix): t for n, t in w.items() if n.startswith(prefix)}


def joined(theta: Weights, omega: Weights, phi: Weights) -> Weights:
    """All three in one dict."""
    parts = {"common": theta, "own": omega, "projector": phi}
    return {f"{part}.{n}": t for part, w in parts.items() for n, t in w.items()}


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    plain = toy_federation(World(clients=3))
    small = partial(toy_net, 1, False, width=D_1)
    federation = replace(plain, architectures={**plain.architectures, "small": small}, server_architecture="small")
    for what, m_G, m_F, by_examples in (("by examples", 1.0, 1.0, True), ("weighted losses, equally", 0.3, 1.6, False)):
        weighting = "samples" if by_examples else "uniform"
        method = FedMRL(SGD, common_weight=m_G, own_weight=m_F, weighting=weighting)
        run = played(method, len(COHORTS), cohorts=COHORTS, federation=federation)
        theta, models = reference(run, m_G, m_F, by_examples)
        yield f"theta of four rounds, {what}", gap([s.common for s in run.states], theta)
        yield f"every client's networks and projector, {what}", gap(run.models, models)
