"""What every net has to keep to: any number of examples at once, and the same outputs of the same inputs."""

import copy

import torch
from torch import Tensor, nn

from potluck.core.ground.inputs import Inputs, count_of, first_of, rows_of

COUNTS = (1, 2, 3, 4, 5, 8, 10, 16, 20, 25, 32, 50, 64, 100, 128, 200, 256)
"""Numbers of examples that are likely to be written into a forward."""

UNREPEATED = (
    "puts out something else when it is called again with the same inputs in evaluation mode; expected outputs that"
    " follow from weights and inputs: count calls, or draw by other means than torch's, where self.training alone"
)


def advice_on_size(net: nn.Module, inputs: Inputs) -> str:
    """What to do if a net that fails on these inputs takes another number of examples; empty if it takes none.

    Args:
        net: stays as it is.
        inputs: (batch, ...).
    """
    examples = count_of(inputs)
    try:
        net = copy.deepcopy(net).to(first_of(inputs).device).eval()
    except Exception:  # such as of tensors that are no parameters
        return ""
    for count in COUNTS:
        if count != examples and _runs(net, rows_of(inputs, torch.arange(count) % examples), count):
            return (
                f"; its forward takes {count} examples at once and not {examples}: write x.shape[0] in place of {count}"
            )
    return ""


def _runs(net: nn.Module, inputs: Inputs, count: int) -> bool:
    try:
        with torch.no_grad():
            outputs: object = net(inputs)
    except Exception:  # of the user's own forward
        return False
    return isinstance(outputs, Tensor) and outputs.dim() > 0 and len(outputs) == count


def repeats(net: nn.Module, inputs: Inputs) -> bool:
    """Whether a net, in evaluation mode, gives the same outputs twice, after the same state of torch's draws."""
    found, state = list[object](), torch.get_rng_state()
    for _ in range(2):
        torch.set_rng_state(state)
        with torch.no_grad():
            found.append(net(inputs))
    one, other = found
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return True  # which is refused elsewhere
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)
