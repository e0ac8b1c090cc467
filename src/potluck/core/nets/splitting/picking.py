"""Heads that are applied at every position of a text, of whose outputs one position's are picked.

So do GPT-like classifiers, which pick the last token that is none of the padding. What belongs to the example is what
the head has read there, and not the whole text, from which the words could be found again.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from potluck.core.ground.inputs import Inputs
from potluck.core.nets.classes import spread_outputs
from potluck.core.nets.modes import mode

_ALIKE = 1e-5  # in evaluation of one row and of many, a matrix product has other last digits


@contextmanager
def numbered(net: nn.Module, head: str) -> Generator[Callable[[Tensor], tuple[Tensor, Tensor]]]:
    """Inside the block a position's number stands behind the head's outputs there, and is picked with them.

    Yields:
        of what the net has put out in the block, what the head has read where it was picked, (batch, width), and the
        outputs (batch, ...) themselves.
    """
    read, kinds = list[Tensor](), list[torch.dtype]()

    def number(module: nn.Module, args: tuple[Tensor, ...], outputs: Tensor) -> Tensor:
        read.append(args[0])
        kinds.append(outputs.dtype)
        numbers = torch.arange(
            outputs.shape[1], device=outputs.device, dtype=torch.promote_types(kinds[-1], torch.float)
        )
        return torch.cat([outputs.to(numbers), numbers[:, None].expand(len(outputs), -1, 1)], -1)

    def picked(outputs: Tensor) -> tuple[Tensor, Tensor]:
        at = outputs[:, -1].detach().long()
        features = read[-1].gather(1, at[:, None, None].expand(-1, 1, read[-1].shape[-1])).squeeze(1)
        return features, spread_outputs(net, outputs[:, :-1].to(kinds[-1]))

    handle = net.get_submodule(head).register_forward_hook(number)
    try:
        yield picked
    finally:
        handle.remove()


def is_picked(net: nn.Module, head: str, inputs: Inputs) -> bool:
    """Whether, in both modes, outputs are what the head makes of what it has read at one position of each example."""
    found = list[bool]()
    for training in (False, True):
        with torch.no_grad(), mode(net, training=training):
            before = torch.get_rng_state()
            expected: Tensor = net(inputs)
            torch.set_rng_state(before)
            try:
                with numbered(net, head) as picked:
                    features, outputs = picked(net(inputs))
                again: Tensor = net.get_submodule(head)(features)
            except Exception:  # of the user's own forward, which may do more with the head's outputs
                return False
        found += [torch.equal(outputs, expected), again.shape == outputs.shape]
        found += [found[-1] and torch.allclose(again, outputs, rtol=_ALIKE, atol=_ALIKE)]
    return all(found)
