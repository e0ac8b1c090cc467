"""Places are proven: what a part of the net gives must be what the whole net has there, in both modes."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from potluck.core.ground.errors import explained
from potluck.core.ground.inputs import Inputs
from potluck.core.nets.modes import to_training
from potluck.core.nets.splitting.look import CannotSplit, Place
from potluck.core.nets.splitting.run import Course

_MOST = 3  # places of one tensor that are tried
_PASSES = 4
_RELATIVE, _ABSOLUTE = 1e-4, 1e-5


class Proven(NamedTuple):
    """The places from which a net can be run, in order, and why others were left out."""

    places: tuple[Place, ...]
    left_out: tuple[str, ...]


def prove(net: nn.Module, course: Course, candidates: Sequence[Sequence[Place]], inputs: Inputs) -> Proven:
    """Keep one place of each tensor from which the way to the next one gives what the whole net has there.

    Args:
        net: stays as it is; its draws come from torch's global generator.
        course: of the net.
        candidates: places in order, those of one tensor together, the preferred one first.
        inputs: (batch, ...), at least two.
    """
    candidates = always_reached(net, course, candidates, inputs)
    passes = [_pass(net, course, [places[0] for places in candidates], inputs, training) for training in (False, True)]
    kept, left_out, following, expected = list[Place](), list[str](), None, None
    for places in reversed(candidates):
        reasons = list[str]()
        for place in (*places[:_MOST], replace(places[0], by_value=True)):
            problems = (one.problem(place, places[0], following, expected) for one in passes)
            if (problem := next(filter(None, problems), None)) is None:
                kept.append(place)
                following, expected = place, places[0]
                break
            reasons.append(problem)
        else:
            left_out.append(f"{places[0]}: {reasons[0]}")
    return Proven(tuple(kept[::-1]), tuple(left_out))


@dataclass(frozen=True)
class _Pass:
    """The whole net once, in one mode: its tensors at the candidates and its outputs, and the draws that were left."""

    net: nn.Module
    course: Course
    tensors: Mapping[Place, Tensor]
    draws: Mapping[Place, Tensor]
    outputs: Tensor

    def problem(self, place: Place, first: Place, following: Place | None, expected: Place | None) -> str | None:
        """What goes wrong from a place to the next one; None if nothing does.

        Args:
            place: from where.
            first: the candidate of the same tensor at which it was noted.
            following: up to where.
            expected: the candidate at which that tensor was noted.
        """
        torch.default_generator.set_state(self.draws[first])
        try:
            with torch.no_grad():
                found = self.course.run(self.net, self.tensors[first].clone(), place, following)
            wanted = self.outputs if expected is None else self.tensors[expected]
            if found.shape == wanted.shape and torch.allclose(found, wanted, rtol=_RELATIVE, atol=_ABSOLUTE):
                return None
        except Exception as error:  # of the user's own forward, on shapes without numbers
            return explained(error)
        return f"what is computed from it differs in {'training' if self.net.training else 'evaluation'} mode"


def _pass(net: nn.Module, course: Course, places: Sequence[Place], inputs: Inputs, training: bool) -> _Pass:
    draws = dict[Place, Tensor]()
    net = copy.deepcopy(net)  # running statistics that training moves are its own
    net = to_training(net) if training else net.eval()

    def note(place: Place, x: Tensor) -> Tensor:
        draws[place] = torch.default_generator.get_state()
        return x.clone()

    with torch.no_grad():
        tensors, outputs = course.seen(net, inputs, places, note)
    if not isinstance(outputs, Tensor):
        when = "training" if training else "evaluation"
        raise CannotSplit(f"it puts out {type(outputs).__name__} in {when} mode; expected a tensor")
    return _Pass(net, course, tensors, draws, outputs)


def always_reached(
    net: nn.Module, course: Course, candidates: Sequence[Sequence[Place]], inputs: Inputs
) -> list[Sequence[Place]]:
    """The candidates that several passes in training mode all come to.

    A net that leaves out layers at random comes to some of them by chance, so with one that it leaves out go those of
    the modules beside it.
    """
    places, left_out, net = [places[0] for places in candidates], set[str](), to_training(copy.deepcopy(net))
    for _ in range(_PASSES):
        with torch.no_grad():
            reached, _ = course.seen(net, inputs, places, lambda place, x: x)
        left_out |= {place.path.rpartition(".")[0] or place.path for place in places if place not in reached}
    return [of for of in candidates if not any(f"{of[0].path}.".startswith(f"{name}.") for name in left_out)]
