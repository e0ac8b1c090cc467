"""Links without parameters: a block's output in the shape of another block's, so that what reads one can read both.

Zhang et al. 2023. https://arxiv.org/abs/2303.04887: Pi_j of FeDepth, see departure 6 of `potluck.methods.fedepth`.
"""

from typing import Literal

import torch
from torch import Size, Tensor, nn
from torch.nn import functional as F

Link = Literal["subsample", "average"]


class SkipLink(nn.Module):
    """Pi_j without parameters: a block's output in the shape that the classifier reads.

    Rows and columns are sampled at equal distances, or averaged. Channels are filled up with zeros on both sides,
    and the outer ones dropped if there are too many. Before flat features an image becomes its mean over positions.

    Args:
        features: shape of one example at the classifier.
        link: "subsample" or "average".
    """

    def __init__(self, features: Size, link: Link) -> None:
        super().__init__()
        self.features = features
        self.link = link

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (batch, channels, ...) of a block to (batch, *features)."""
        found = tuple(x.shape[1:])
        if found == self.features:
            return x
        if x.dim() == 4 and len(self.features) == 1:
            x = x.mean((2, 3))
        if x.dim() != 1 + len(self.features) or x.dim() == 3:
            raise ValueError(f"block's output {found}: no skip link leads to features {tuple(self.features)}")
        if x.dim() == 4:
            height, width = self.features[1:]
            x = sampled(x, height, width) if self.link == "subsample" else F.adaptive_avg_pool2d(x, (height, width))
        lacking = self.features[0] - x.shape[1]
        positions = [0] * 2 * (x.dim() - 2)
        return F.pad(x, (*positions, lacking // 2, lacking - lacking // 2))


def sampled(x: Tensor, height: int, width: int) -> Tensor:
    """Rows and columns of x (batch, channels, ...) at equal distances: every s-th where s divides the size."""
    rows, columns = (torch.arange(n) * of // n for n, of in ((height, x.shape[2]), (width, x.shape[3])))
    return x[:, :, rows][..., columns]
