"""Classes of clients' own: rows of tensors and numbers for classes that only some clients have.

A client whose network has outputs for some classes alone has those rows of the head that belong to them, and says
nothing of the other classes. What is averaged is averaged class by class, over those who have the class. The papers
have all classes at all clients.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Size, Tensor, nn

from potluck.core.federation import Member, Roster
from potluck.core.nets.classes import OwnClasses
from potluck.core.nets.classes import OwnHead as OwnHead
from potluck.core.nets.weights import RunningMean, Weights, check_same_shapes
from potluck.core.roles import Client, Replies
from potluck.parts.means import Aggregate, Gathered
from potluck.parts.submodels import SubModel, SubmodelPlace

P = TypeVar("P", bound=SubmodelPlace)


def owned_part(weights: Mapping[str, Tensor], member: Member) -> Mapping[str, Tensor]:
    """Of the tensors of a network with all classes, those that a client's network has, with its own classes' rows."""
    return rows_for({name: tensor for name, tensor in weights.items() if name in member.shapes}, member)


def rows_for(weights: Mapping[str, Tensor], member: Member, prefix: str = "") -> Mapping[str, Tensor]:
    """Of the tensors of a head with all classes, what a client's own has.

    Args:
        weights: by their names in the head.
        member: the client.
        prefix: what these names begin with in its network.
    """
    return weights if member.head is None else member.head.part_of(weights, lambda name: prefix + name)


def own_rows(submodel: Mapping[str, P], member: Member, named: Callable[[str], str] = str) -> Mapping[str, P]:
    """Where a client's tensors lie in those with all classes: of the places of a network with all, its classes' rows.

    Args:
        submodel: index sets for every dimension, by name.
        member: the client.
        named: what a tensor of this name is called in the client's network.
    """
    if member.head is None:
        return submodel
    found, numbers = dict(submodel), torch.tensor(member.head.classes.numbers)
    for name, place in submodel.items():
        if (axis := member.head.axes.get(named(name))) is not None:
            assert isinstance(place, tuple)
            found[name] = cast(P, (*place[:axis], numbers, *place[axis + 1 :]))
    return found


def of_all_classes(
    values: Mapping[str, Tensor], submodel: SubModel, member: Member
) -> tuple[Mapping[str, Tensor], SubModel]:
    """A client's tensors, and where they lie, as those of a network with all classes.

    Args:
        values: of a sub-model of its network.
        submodel: where they lie in that, by name index sets or a mask.
        member: the client.
    """
    if member.head is None:
        return values, submodel
    masks = {n: place for n in member.head.axes if isinstance(place := submodel.get(n), Tensor)}
    found, places = dict(values), own_rows({n: place for n, place in submodel.items() if n not in masks}, member)
    for name, mask in masks.items():
        own = values[name].new_zeros(mask.shape)
        own[mask] = values[name]
        whole, covered = (_among_all(tensor, member.head, name) for tensor in (own, mask))
        found[name], places = whole[covered], {**places, name: covered}
    return found, places


def _among_all(tensor: Tensor, head: OwnHead, name: str) -> Tensor:
    """A tensor of this name with all classes, that is zero for those of others."""
    axis, width = head.axes[name], head.classes.width
    whole = tensor.new_zeros((*tensor.shape[:axis], width, *tensor.shape[axis + 1 :]))
    return whole.index_copy(axis, torch.tensor(head.classes.numbers), tensor)


def mean_of_rows(
    replies: Replies,
    entry: str,
    roster: Roster,
    shares: Sequence[float],
    rule: Aggregate,
    keep: Weights,
    prefix: Callable[[Member], str],
) -> Weights:
    """What clients sent of one head, as `rows_for` divides it, combined name by name and class by class.

    Args:
        replies: of the clients.
        entry: the name of their tensors.
        roster: of the federation.
        shares: the clients' weights.
        rule: how several clients' tensors become one.
        keep: the head before, whose rows those classes keep that nobody has.
        prefix: of a client, what the tensors' names begin with in its network.
    """
    by_class, found = axes_of(roster), dict(keep)
    for name in keep:
        places = {by_class.get((roster[id].base, prefix(roster[id]) + name)) for id in replies}
        if places == {None}:
            found[name] = rule([reply[entry][name] for reply in replies.values()], shares)
            continue
        mean = MeanByClass(rule, *next(place for place in places if place is not None))
        for (id, reply), share in zip(replies.items(), shares, strict=True):
            head = roster[id].head
            mean.add(reply[entry][name], share, None if head is None else head.classes)
        found[name] = mean.value(keep[name])
    return found


class MeanByClass:
    """Class by class, the combination of tensors along one of whose axes each has classes of its own.

    Under the plain mean it holds a running mean, under other rules all that was added.

    Attributes:
        weight: the sum of the shares.

    Args:
        rule: how several clients' values of a class become one.
        axis: along which the tensors have classes.
        width: how many classes there are.
    """

    def __init__(self, rule: Aggregate, axis: int, width: int) -> None:
        self.weight = 0.0
        self._rule, self._axis, self._width = rule, axis, width
        self._mean: Tensor | None = None
        self._held = torch.zeros(width, dtype=torch.float64)
        self._gathered: list[tuple[Tensor, Tensor, float]] = []

    def add(self, tensor: Tensor, share: float, own: OwnClasses | None) -> None:
        """Add a client's tensor; `own` are the classes that it has in order, None all.

        Raises:
            ValueError: it has another shape than those before, the axis of classes aside.
        """
        at = torch.arange(self._width) if own is None else torch.tensor(own.numbers)
        if self._mean is None:
            self._mean = tensor.new_zeros(self._whole(tensor.shape))
        check_same_shapes("with rows of classes", [self._mean.shape, self._whole(tensor.shape)])
        self.weight += share
        if self._rule.rule != "mean":
            self._gathered.append((tensor, at, share))
        elif tensor.is_floating_point():
            self._held[at] += share
            parts = torch.where(self._held[at] > 0, share / self._held[at], 0.0).to(tensor.dtype)
            before = self._mean.index_select(self._axis, at)
            self._mean.index_copy_(self._axis, at, before.lerp(tensor, self._along(parts).expand_as(tensor)))
            return
        else:  # counters
            before = self._mean.index_select(self._axis, at)
            self._mean.index_copy_(self._axis, at, torch.maximum(before, tensor))
        self._held[at] += share

    @property
    def held(self) -> Tensor:
        """Of each class the sum of the shares of those who have it, to be combined with the tensors."""
        return self._along(self._held)

    def value(self, keep: Tensor | None = None) -> Tensor:
        """The combination; classes that nobody had are those of `keep`, or zero."""
        assert self._mean is not None
        found = self._mean if self._rule.rule == "mean" else self._combined(self._mean)
        nobody = self._along(self._held == 0)
        return torch.where(nobody, torch.zeros_like(found) if keep is None else keep, found)

    def _combined(self, like: Tensor) -> Tensor:
        stack = torch.full((len(self._gathered), *like.shape), torch.nan, dtype=like.dtype)
        for place, (tensor, at, _) in enumerate(self._gathered):
            stack[place].index_copy_(self._axis, at, tensor)
        return self._rule.of_covered(stack, [share for *_, share in self._gathered]).nan_to_num()

    def _whole(self, shape: Size) -> Size:
        return Size((*shape[: self._axis], self._width, *shape[self._axis + 1 :]))

    def _along(self, row: Tensor) -> Tensor:
        """A row of numbers for classes, to be combined with tensors."""
        axes = [1] * len(self._mean.shape if self._mean is not None else ())
        axes[self._axis] = -1
        return row.view(axes)


def axes_of(roster: Roster) -> dict[tuple[str, str], tuple[int, int]]:
    """Of every tensor with rows of classes, by the architecture with all classes and its name, axis and classes."""
    heads = [member.head for member in roster.values() if member.head is not None]
    return {(head.base, name): (axis, head.classes.width) for head in heads for name, axis in head.axes.items()}


def known_classes(predictions: Tensor) -> OwnClasses | None:
    """The classes that logits (rows, classes) are of, which are minus infinity for others; None if all."""
    has = predictions[0] != -torch.inf
    return None if bool(has.all()) else OwnClasses(tuple(has.nonzero().flatten().tolist()), len(has))


def only_own(predictions: Tensor, member: Member) -> Tensor:
    """What a client says of classes (rows, classes), minus infinity for those that it has no outputs for."""
    return predictions if member.head is None else member.head.classes.only(predictions)


class MeanOfPredictions:
    """Class by class, the combination of numbers (rows, classes) over those that are not minus infinity.

    Args:
        rule: how several clients' numbers become one.
    """

    def __init__(self, rule: Aggregate) -> None:
        self._rule = rule
        self._found: MeanByClass | None = None

    def add(self, predictions: Tensor, share: float = 1.0) -> None:
        """Add a client's."""
        own, width = known_classes(predictions), predictions.shape[1]
        self._found = self._found or MeanByClass(self._rule, 1, width)
        self._found.add(predictions if own is None else own.rows_of(predictions, 1), share, own)

    def value(self) -> Tensor:
        """The combination, minus infinity for classes that nobody has."""
        assert self._found is not None
        return self._found.value(torch.tensor(-torch.inf))


def running(rule: Aggregate, roster: Roster) -> RunningMean | Gathered | MeanOfPredictions:
    """An accumulator of clients' numbers for classes (rows, classes), see `averaged`."""
    return MeanOfPredictions(rule) if any(member.head for member in roster.values()) else rule.running()


class OwnClassesOnly(nn.Module):
    """A network with all classes that says nothing, minus infinity, of those that a client lacks.

    Args:
        net: puts out (batch, classes).
        lacking: those classes, bool (classes,).
    """

    lacking: Tensor

    def __init__(self, net: nn.Module, lacking: Tensor) -> None:
        super().__init__()
        self.net = net
        self.training = net.training  # else layers of a net in evaluation mode would seem to be held in it
        self.register_buffer("lacking", lacking)

    def forward(self, x: Any) -> Tensor:
        """Inputs (batch, ...) to outputs (batch, classes)."""
        return self.net(x).masked_fill(self.lacking, -torch.inf)


def own_classes_only(net: nn.Module, client: Client) -> nn.Module:
    """What a client predicts with that was sent a network with all classes: the network, for its own classes."""
    return net if client.classes is None else OwnClassesOnly(net, client.classes.lacking)


def held(members: Sequence[Member], classes: int) -> Tensor:
    """Which classes each client has outputs for, bool (clients, classes)."""
    found = torch.ones(len(members), classes, dtype=torch.bool)
    for row, member in zip(found, members, strict=True):
        if member.head is not None:
            row.logical_and_(~member.head.classes.lacking)
    return found


def averaged(rule: Aggregate, predictions: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Clients' logits (rows, classes), combined class by class over those who have the class.

    Returns:
        (rows, classes), minus infinity for classes that none of them has.
    """
    if all(known_classes(one) is None for one in predictions):
        return rule(predictions, shares)
    mean = MeanOfPredictions(rule)
    for one, share in zip(predictions, shares, strict=True):
        mean.add(one, share)
    return mean.value()
