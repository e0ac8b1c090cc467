"""Training in which single weights of a tensor move and the others stay."""

from collections.abc import Mapping

import torch
from torch import Tensor

from potluck.core.nets.weights import Weights
from potluck.core.requests.fit import Extras


def put_back(weights: Mapping[str, Tensor], extras: Extras, lr: float = 0.0) -> Weights:
    """After a step, a `Fit`'s `after_step`: the weights that do not move, as they were at its start.

    The extras have, by name, the boolean masks "moving" and the weights "start". So neither momentum nor decay moves
    what stays; its bits are those of the start.
    """
    moving, start = extras["moving"], extras["start"]
    return {name: torch.where(moving[name], weight, start[name]) for name, weight in weights.items()}
