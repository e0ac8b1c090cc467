"""Parts of a loss that need more digits than a run's precision gives."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def unmixed(device: torch.device) -> AbstractContextManager[Any]:
    """Around what is to be computed in its tensors' own precision, whatever the run's (`run.precision`).

    Where nothing is mixed nothing is switched off, so that it works on devices that cannot mix at all.
    """
    mixes = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if mixes else nullcontext()
