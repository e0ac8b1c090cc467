"""Places are proven: what a part of the net gives must be what the whole net has there, in both modes."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from potluck.core.ground.errors import explained
from potluck.core.nets.modes import mode
from potluck.core.nets.splitting.look import Place
from potluck.core.nets.splitting.run import Course

_MOST = 3  # places of one tensor that are tried
_NEAR = {"rtol": 1e-4, "atol": 1e-5}


class Proven(NamedTuple):
    """The places from which a net can be run, in order, and why others were left out."""

    places: tuple[Place, ...]
    left_out: tuple[str, ...]


def prove(net: nn.Module, course: Course, candidates: Sequence[Sequence[Place]], inputs: Tensor) -> Proven:
    """Keep one place of each tensor from which the way to the next one gives what the whole net has there.

    Args:
        net: stays as it is; its draws come from torch's global generator.
        course: of the net.
        candidates: places in order, those of one tensor together, the preferred one first.
        inputs: (batch, ...), at least two.
    """
    passes = [_pass(net, course, [places[0] for places in candidates], inputs, training) for training in (False, True)]
    kept, left_out, following, until = list[Place](), list[str](), None, len(candidates)
    for position in reversed(range(len(candidates))):
        places = candidates[position][:_MOST]
        reasons = list[str]()
        for place in (*places, replace(places[0], by_value=True)):
            problem = next(filter(None, (one.problem(place, position, following, until) for one in passes)), None)
            if problem is None:
                kept.append(place)
                following, until = place, position
                break
            reasons.append(problem)
        else:
            left_out.append(f"{places[0]}: {reasons[0]}")
    return Proven(tuple(kept[::-1]), tuple(left_out))


@dataclass(frozen=True)
class _Pass:
    """The whole net once, in one mode: its tensors at the candidates and its outputs, and the draws that are left."""

    net: nn.Module
    course: Course
    training: bool
    tensors: tuple[Tensor, ...]
    draws: tuple[Tensor, ...]

    def problem(self, place: Place, position: int, following: Place | None, until: int) -> str | None:
        """What goes wrong from a place to the next one; None if nothing does."""
        expected = self.tensors[until]
        torch.default_generator.set_state(self.draws[position])
        try:
            with torch.no_grad(), mode(self.net, training=self.training):
                found = self.course.run(self.net, self.tensors[position].clone(), place, following)
        except Exception as error:  # of the user's own forward, on shapes without numbers
            return explained(error)
        if found.shape == expected.shape and torch.allclose(found, expected, **_NEAR, equal_nan=True):
            return None
        return f"what is computed from it differs in {'training' if self.training else 'evaluation'} mode"


def _pass(net: nn.Module, course: Course, places: Sequence[Place], inputs: Tensor, training: bool) -> _Pass:
    net, draws = copy.deepcopy(net), dict[Place, Tensor]()  # running statistics that training moves are its own

    def note(place: Place, x: Tensor) -> Tensor:
        draws[place] = torch.default_generator.get_state()
        return x.clone()

    with torch.no_grad(), mode(net, training=training):
        tensors = course.at(net, inputs, *places, keep=note)
    return _Pass(net, course, training, tensors, tuple(draws[place] for place in places))
