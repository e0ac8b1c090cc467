"""Nets that teach nets by their predictions on the same batch: two that teach each other, and many that teach one.

Zhang, Xiang, Hospedales, Lu. "Deep Mutual Learning", CVPR 2018. https://arxiv.org/abs/1706.00384. Equations are those
of FedORION, https://openreview.net/forum?id=ZzeXjCQ5CK.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from potluck.core.federation import Criterion
from potluck.core.nets.batchnorm import batch_norms, keep_statistics
from potluck.core.requests.examples import Batch
from potluck.core.requests.fit import Extras
from potluck.parts.classes import averaged
from potluck.parts.losses import soft_cross_entropy
from potluck.parts.means import Aggregate
from potluck.parts.public import as_distributions


@dataclass(frozen=True)
class MutualLoss:
    """A net's loss by labels, and by its peer's predictions on the same batch (eq. 1, 2).

    The net that is trained is an `nn.ModuleDict` of both. The peer has no gradient and keeps its running statistics.

    Attributes:
        learner: name of the net that learns.
        peer: name of the net that teaches it.
        criterion: the loss by labels; None leaves it out.
    """

    learner: str
    peer: str
    criterion: Criterion | None

    def __call__(self, net: nn.Module, batch: Batch, extras: Extras) -> Tensor:
        """Of one batch."""
        logits = net.get_submodule(self.learner)(batch.inputs)
        loss = soft_cross_entropy(logits, probabilities(net.get_submodule(self.peer), batch.inputs))
        return loss if self.criterion is None else self.criterion(logits, batch.targets) + loss


@dataclass(frozen=True)
class EnsembleLoss:
    """The loss by the predictions of many (eq. 3): being linear in their probabilities, it is the loss by their mean.

    The extras have the "teachers", a list of nets, and their "shares", a weight each.

    Attributes:
        keep: whether the student's running statistics stay as they are.
    """

    keep: bool

    def __call__(self, net: nn.Module, batch: Batch, extras: Extras) -> Tensor:
        """Of one batch, whose targets are not read."""
        with keep_statistics(net) if self.keep else nullcontext():
            logits = net(batch.inputs)
        with torch.no_grad():
            taught = ensemble([teacher(batch.inputs) for teacher in extras["teachers"]], extras["shares"])
        return soft_cross_entropy(logits, taught)


def ensemble(outputs: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """The mean of several nets' predictions, distributions (batch, classes): of a class, over the nets that have it.

    Args:
        outputs: of each net (batch, classes), minus infinity for classes that it has no output for.
        shares: the nets' weights.
    """
    lacking = [logits == -torch.inf for logits in outputs]
    known = [z.softmax(1).masked_fill(lacks, -torch.inf) for z, lacks in zip(outputs, lacking, strict=True)]
    found = averaged(Aggregate(), known, shares)
    return as_distributions(found) if any(bool(lacks.any()) for lacks in lacking) else found


def probabilities(net: nn.Module, inputs: Tensor) -> Tensor:
    """Softmax of the net's outputs (batch, classes), without a gradient or a trace in running statistics."""
    with torch.no_grad(), keep_statistics(net):
        return net(inputs).softmax(1)


def by_batch_statistics(net: nn.Module) -> nn.Module:
    """The net in evaluation mode, its BatchNorm with the batch's own statistics; frozen layers keep theirs."""
    for layer in batch_norms(net).values():
        if layer.training:
            layer.running_mean = layer.running_var = None
    return net.eval()
