"""Any network as extractor, intermediate layers and classifier, by its dataflow and without a line of it rewritten.

*Look*: the network runs twice, and it is noted which tensor every operation reads. A place, where a module puts out a
tensor or is given one, cuts the network if no edge of the dataflow jumps over it. *Run*: from place to place runs the
network's own `forward`; what lies before is answered with shapes. *Prove*: each place is tried, in evaluation and in
training mode, against the whole network. *SplitPlan*: of the proven places, where the extractor ends and what the head
reads.
"""

from potluck.core.nets.splitting.known import NotPlanned, Splits, is_planned, plan_of, split_problem, unplanned
from potluck.core.nets.splitting.look import CannotSplit, Place
from potluck.core.nets.splitting.plan import SplitPlan, Stage, make_plan
from potluck.core.nets.splitting.prune import pruned

__all__ = [
    "CannotSplit",
    "NotPlanned",
    "Place",
    "SplitPlan",
    "Splits",
    "Stage",
    "is_planned",
    "make_plan",
    "plan_of",
    "pruned",
    "split_problem",
    "unplanned",
]
