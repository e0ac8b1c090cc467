"""What is played: sizes, data and cohorts, the same for every contestant.

Needs numpy alone, so that it can be imported in the environment of any framework.
"""

from dataclasses import dataclass, replace
from functools import cache
from math import ceil

import numpy as np

ClientData = tuple[np.ndarray, np.ndarray]
"""Inputs (examples, channels, height, width) in float32, and targets (examples,) in int64."""


@dataclass(frozen=True)
class Workload:
    """One federated learning task; local training is always Adam that starts fresh.

    Attributes:
        nets: names in `nets.py`, dealt to the clients in turn.
        parameters: trained numbers that these nets have together.
        shape: of one input, channels first.
        clients: in the federation.
        cohort: clients that take part in a round.
        examples: of each client.
        batch_size: examples of a step; the last batch of an epoch holds what is left.
        epochs: of local training in a round.
        lr: Adam's learning rate.
        classes: that the targets are drawn from.
        seed: of data, cohorts and first weights.
    """

    nets: tuple[str, ...]
    parameters: int
    shape: tuple[int, int, int]
    clients: int
    cohort: int
    examples: int = 200
    batch_size: int = 16
    epochs: int = 1
    lr: float = 1e-3
    classes: int = 10
    seed: int = 0

    def net_of(self, client: int) -> str:
        """The name of a client's net."""
        return self.nets[client % len(self.nets)]

    def members(self, round_number: int) -> list[int]:
        """The clients of a round, ascending."""
        rng = np.random.default_rng([self.seed, round_number])
        return sorted(rng.choice(self.clients, self.cohort, replace=False).tolist())

    @property
    def steps(self) -> int:
        """Optimiser steps that all clients of a round take together."""
        return self.cohort * self.epochs * ceil(self.examples / self.batch_size)

    def smoke(self) -> "Workload":
        """The same in small, to see whether everything runs; a full batch and a last one that is not remain."""
        return replace(self, clients=max(4, len(self.nets)), cohort=2, examples=24)


WORKLOADS = {
    "mlp": Workload(("mlp",), 199_210, (1, 28, 28), clients=100, cohort=20),
    "resnet": Workload(("resnet10",), 308_826, (3, 32, 32), clients=20, cohort=4),
    "cnn": Workload(("cnn",), 1_199_882, (1, 28, 28), clients=100, cohort=20),
    "heterogeneous": Workload(
        ("resnet10", "resnet14", "resnet18", "resnet22", "resnet26"), 3_853_506, (3, 32, 32), clients=100, cohort=10
    ),
}


def chosen_workload(name: str, smoke: bool) -> Workload:
    """The workload of this name, or the same in small."""
    return WORKLOADS[name].smoke() if smoke else WORKLOADS[name]


@cache
def draw_data(workload: Workload) -> list[ClientData]:
    """Every client's data: noise, since nothing is learned here; kept, so that a process draws it once."""
    rng = np.random.default_rng(workload.seed)
    inputs = rng.standard_normal((workload.clients, workload.examples, *workload.shape), dtype=np.float32)
    targets = rng.integers(workload.classes, size=(workload.clients, workload.examples))
    return list(zip(inputs, targets, strict=True))
