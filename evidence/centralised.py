"""Centralised training: gradient descent on the pooled data of all clients that were drawn so far, by architecture.

There is no paper, and no code was read.
"""

from collections.abc import Iterator

import torch

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, logits, played
from potluck.methods.centralised import Centralised

COHORTS = [[0, 2], [0], [1, 2]]


def reference(run: Run) -> list[dict[str, Weights]]:
    """The weights of each architecture, before the first round and after each."""
    weights, heard = dict(run.start), list[int]()
    found = [weights]
    for cohort in COHORTS:
        heard += [k for k in cohort if k not in heard]
        x, y = (torch.cat([getattr(run.clients[k], part) for k in heard]) for part in ("x", "y"))
        weights = {
            name: descended(lambda v, x=x, y=y: cross_entropy(logits(v, x), y), w) for name, w in weights.items()
        }
        found.append(weights)
    return found


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    run = played(Centralised(SGD), cohorts=COHORTS)
    yield "weights of three rounds", gap([state.weights for state in run.states], reference(run))
