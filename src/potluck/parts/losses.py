"""Losses that several methods share, each with its reduction, temperature and gradient path explicit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from potluck.core.federation import Criterion
from potluck.core.requests.examples import Batch
from potluck.core.requests.fit import Extras


def squared_distance(net: nn.Module, anchor: Mapping[str, Tensor]) -> Tensor:
    """Squared Euclidean distance between the net's parameters and `anchor`; a scalar.

    Parameters that the anchor lacks, such as frozen ones, do not count.

    FedProx and FedIN (eq. 3 of the revision) add (mu / 2) times this to the local loss.
    """
    gaps = [(parameter - anchor[name]).square().sum() for name, parameter in net.named_parameters() if name in anchor]
    return torch.stack(gaps).sum()


@dataclass(frozen=True)
class ProximalLoss:
    """FedProx's local loss h_k(w; w^t) = F_k(w) + (mu / 2) |w - w^t|^2 (Li et al. 2020, eq. 2).

    The extras have w^t as "sent".

    Attributes:
        criterion: the task's loss, of which F_k is the mean over the client's examples.
        mu: with 0 the loss is F_k, bit for bit.
    """

    criterion: Criterion
    mu: float

    def __call__(self, net: nn.Module, batch: Batch, extras: Extras) -> Tensor:
        """Of one batch."""
        loss = self.criterion(net(batch.inputs), batch.targets)
        return loss + self.mu / 2 * squared_distance(net, extras["sent"]) if self.mu else loss


@dataclass(frozen=True)
class DynamicLoss:
    """FedDyn's local loss L_k(theta) - <g_k, theta> + (alpha / 2) |theta - theta^(t-1)|^2 (Acar et al. 2021, Alg. 1).

    The extras have g_k as "g" and theta^(t-1) as "sent".

    Attributes:
        objective: L_k, without observations.
        alpha: with 0 the loss is L_k, bit for bit.
    """

    objective: Callable[[nn.Module, Batch, Extras], Tensor]
    alpha: float

    def __call__(self, net: nn.Module, batch: Batch, extras: Extras) -> Tensor:
        """Of one batch."""
        loss = self.objective(net, batch, extras)
        if not self.alpha:
            return loss
        g = extras["g"]
        linear = torch.stack([(g[name] * weight).sum() for name, weight in net.named_parameters() if name in g]).sum()
        return loss - linear + self.alpha / 2 * squared_distance(net, extras["sent"])


def masked_cross_entropy(logits: Tensor, targets: Tensor, present: Tensor) -> Tensor:
    """Cross-entropy in which the logits of absent classes are set to 0 (HeteroFL, section 4.2).

    Zero, not minus infinity: an absent class still counts in the normaliser but receives no gradient. One that the
    network has no output for does not count.

    Args:
        logits: (batch, classes).
        targets: int64 (batch,).
        present: bool (classes,), the classes this client holds.
    """
    return F.cross_entropy(logits.masked_fill(~present & ~logits.isneginf(), 0.0), targets)


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of a student to a teacher's probabilities, mean over the batch.

    Its gradient in the student is that of KL(teacher || student); the value differs by the teacher's entropy. What the
    teacher says of classes that the student has no output for does not count, so an example weighs as much as the
    teacher takes it for one of the student's classes.

    Args:
        logits: the student's, (batch, classes).
        targets: the teacher's probabilities, (batch, classes); no gradient flows into them.
    """
    products = targets.detach() * F.log_softmax(_exact(logits), 1)
    return -products.masked_fill(logits.detach() == -torch.inf, 0.0).sum(1).mean()


def distillation(
    logits: Tensor, teacher_logits: Tensor, temperature: float = 1.0, *, teacher_learns: bool = False
) -> Tensor:
    """KL(teacher || student) of softened predictions, times temperature squared; mean over the batch, sum over classes.

    The square keeps the gradient's size as the temperature grows (Hinton, Vinyals, Dean 2015, section 2). Only classes
    that both have outputs for count.

    Args:
        logits: the student's, (batch, classes).
        teacher_logits: the teacher's, (batch, classes).
        temperature: both are divided by it before the softmax.
        teacher_learns: whether a gradient flows into the teacher's logits.
    """
    target = teacher_logits if teacher_learns else teacher_logits.detach()
    lacking = (logits.detach() + target.detach()) == -torch.inf  # only one of them, or neither, has an output for these
    student = F.log_softmax(_exact(logits).masked_fill(lacking, -torch.inf) / temperature, 1)
    teacher = F.log_softmax(_exact(target).masked_fill(lacking, -torch.inf) / temperature, 1)
    gaps = (teacher - student).masked_fill(lacking, 0.0)
    divergence = (teacher.exp() * gaps).sum(1).mean()  # F.kl_div has no rule for stacked clients
    return temperature**2 * divergence


def difference(logits: Tensor, targets: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """A mean over examples and classes, such as `F.mse_loss`, of the classes that both have outputs for.

    Args:
        logits: (batch, classes).
        targets: (batch, classes), such as a teacher's.
        loss: the mean, over all numbers, of something that is 0 where both are equal.
    """
    lacking = (logits.detach() + targets.detach()) == -torch.inf
    share = (~lacking).sum() / lacking.numel()  # exactly 1 where all have all classes
    return loss(logits.masked_fill(lacking, 0.0), targets.masked_fill(lacking, 0.0)) / share


def _exact(logits: Tensor) -> Tensor:
    """Logits of a lower precision converted to float32, as by torch's own losses."""
    return logits.float() if logits.dtype == torch.bfloat16 else logits
