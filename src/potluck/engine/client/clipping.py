"""A client clips its own update before it leaves, so that it moves no sum further than was agreed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from potluck.core.ground.errors import ConfigError, DivergenceError
from potluck.core.message import Message
from potluck.core.schema import Path
from potluck.core.summed import ToSum, tensor_at, with_tensors


@dataclass(frozen=True)
class Clipping:
    """How clients clip what they send.

    Attributes:
        most: the largest L2 norm of an update, over all its tensors together.
        summed: whether the server is told sums of it alone: a client then notes whether it has clipped, and not by how
            much, which would tell its norm.
        private: whether noise is added to the sums: then it notes nothing, and its reply counts as a private release.
    """

    most: float
    summed: bool = False
    private: bool = False

    def applied(self, reply: Message, of: ToSum) -> tuple[Message, dict[str, float]]:
        """The reply as it leaves, and what the client notes of it.

        Args:
            reply: what the handler returned.
            of: what of it is summed.

        Raises:
            DivergenceError: the update is not finite.
            ConfigError: what cannot be private is among what would leave.
        """
        if self.private and (why := not_private(reply, of)):
            raise ConfigError(f"run.private_weights: {why}")
        reply, scale = clipped_update(reply, of, self.most)
        if self.private or not _sent_before(of):
            return reply, {}
        return reply, {"update_clipped": float(scale < 1)} if self.summed else {"update_scale": scale}


def clipped_update(reply: Message, of: ToSum, most: float) -> tuple[Message, float]:
    """The reply with an update no longer than `most`, and what it was multiplied by, 1 if it was not longer.

    The update is what tensors that are summed differ by from what stands for them, `Summed.keep`: what was sent, or
    zeros where they are differences. Its norm is that after rounding to the tensors' own precision. What is measured
    and not learnt, of which `keep` is a function, is no update, and stays.

    Args:
        reply: what the handler returned.
        of: what of it is summed.
        most: above 0.

    Raises:
        DivergenceError: the update is not finite.
    """
    kept = _sent_before(of)
    own = {path: tensor_at(reply, path) for path in kept}
    length = _length(own, kept)
    if not math.isfinite(length):
        raise DivergenceError("its update is NaN or infinite, and cannot be clipped")
    if length <= most:
        return reply, 1.0
    goal, more = most, 2.0
    while True:
        scale = goal / length
        moved = {path: _towards(kept[path], tensor, scale) for path, tensor in own.items()}
        if (over := _length(moved, kept) - most) <= 0 or not goal:
            return with_tensors(reply, moved), scale
        goal, more = max(0.0, goal - more * over), 2 * more  # rounding has made it too long


def not_private(reply: Message, of: ToSum) -> str:
    """Why noise in sums would not make a reply of this form private; empty if it would."""
    measured = [one.name for one in of.tensors.values() if not isinstance(one.keep, Tensor)]
    if measured:
        return f"found {measured[0]}, which is measured and no update, so that nothing bounds it; expected none with it"
    weighed = [one.name for one in of.tensors.values() if one.weighing != "one"]
    if weighed:
        return (
            f"found {weighed[0]} weighed by examples, so that a client with many moves the sum further; expected each"
            " client to count once: method.sharing.weighting = 'uniform', or the like"
        )
    spread = [one.name for one in of.tensors.values() if one.name.endswith(".running_var")]
    if spread:
        return (
            f"found {spread[0]}, a variance that noise may make negative; expected networks without BatchNorm, or"
            " method.sharing.buffers = 'local'"
        )
    clear = [
        ".".join(path) for path, tensor in _tensors(reply) if path not in of.tensors and tensor.is_floating_point()
    ]
    if clear:
        return f"found {clear[0]}, which is sent and in no sum, and would have no noise; expected none with it"
    return ""


def _sent_before(of: ToSum) -> dict[Path, Tensor]:
    """What stands for the tensors of an update: what was sent, or zeros."""
    return {path: one.keep for path, one in of.tensors.items() if isinstance(one.keep, Tensor)}


def _length(own: Mapping[Path, Tensor], kept: Mapping[Path, Tensor]) -> float:
    """The L2 norm of what the tensors differ by, all together."""
    gaps = (tensor.double() - kept[path].double() for path, tensor in own.items())
    return math.sqrt(sum(float(gap.square().sum()) for gap in gaps))


def _towards(kept: Tensor, own: Tensor, scale: float) -> Tensor:
    """As far from one to the other as the scale says, in the other's precision."""
    start = kept.double()
    return (start + scale * (own.double() - start)).to(own.dtype)


def _tensors(reply: Mapping[str, Any], above: Path = ()) -> list[tuple[Path, Tensor]]:
    """All tensors of a reply, by the names that lead to them."""
    found: list[tuple[Path, Tensor]] = []
    for name, value in reply.items():
        if isinstance(value, Tensor):
            found.append(((*above, name), value))
        elif isinstance(value, Mapping):
            found += _tensors(cast(Mapping[str, Any], value), (*above, name))
    return found
