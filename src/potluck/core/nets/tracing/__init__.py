"""Which channels of a net's layers belong together, found by running the net once.

Every element of what flows through the net carries a label: the channel that it is of. A layer that writes channels
gives them new labels. Operations that move elements (flatten, view, concatenation, transposition, padding) move the
labels the same way, and operations that combine elements (a residual sum, a product, attention's scores) say that
their channels are one and the same. A layer that reads channels ties its weights to them. What is left are classes of
channels that can only be kept or dropped together, whatever names or shapes the layers have.

The forward pass runs as the user wrote it, with Python's control flow, so nothing has to be rewritten for tracing. An
operation that is not known here is refused, by its name and that of the layer.
"""

from potluck.core.nets.tracing.found import FIXED, Multiple, Runs, Trace, Unfollowed, Written
from potluck.core.nets.tracing.tracer import trace

__all__ = ["FIXED", "Multiple", "Runs", "Trace", "Unfollowed", "Written", "trace"]
