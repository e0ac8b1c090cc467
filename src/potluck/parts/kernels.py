"""How far two samples are from one another, by kernels: FedKTL."""

import torch
from torch import Tensor

BANDWIDTHS = (10.0, 15.0, 20.0, 50.0)


def discrepancy(x: Tensor, y: Tensor) -> Tensor:
    """The squared maximum mean discrepancy of samples (n, width) and (m, width), with Gaussian kernels summed."""

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        squares = (a[:, None] - b).square().sum(2)
        return torch.stack([torch.exp(-squares / (2 * width)) for width in BANDWIDTHS]).sum(0).mean()

    return kernel(x, x) + kernel(y, y) - 2 * kernel(x, y)
