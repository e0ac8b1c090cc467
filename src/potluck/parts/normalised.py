"""The length of local training in plain gradient steps, by which SCAFFOLD and FedNova divide.

Wang, Liu, Liang, Joshi, Poor. NeurIPS 2020. https://arxiv.org/abs/2007.07481, section 4.
"""


def effective_steps(steps: int, momentum: float) -> float:
    """The number of plain gradient steps equivalent to `steps` steps with momentum."""
    if momentum == 0:
        return steps
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
