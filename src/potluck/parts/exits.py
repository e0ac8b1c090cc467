"""Exits that a method adds to nets: classifiers behind stages or blocks, alike on both sides.

They are the method's own modules, beside the model that a client evaluates: what is trained of them is sent, averaged
and kept by the method, and they never predict unless it says so (`Method.predicts_with_exits`). `with_exits` makes a
net of a model's layers and these.
"""

from collections.abc import Callable, Mapping
from functools import partial

from torch import Size, nn

from potluck.core.roles import Client, Server
from potluck.models.contract import StagedNet, linear_exit

ExitBuilder = Callable[[StagedNet, Size, int], nn.Module]
"""Makes of a net, the shape of one example's features at an exit, and the number of outputs, that exit."""


def new_exits(
    party: Server | Client, net: StagedNet, behind: Mapping[str, Size], build: ExitBuilder = linear_exit
) -> nn.ModuleDict:
    """By place, an exit of a net, with initial weights drawn from the run's seed and the place's name.

    So an exit is the same in every net that has one there, of whatever depth, and whichever others that has.

    Args:
        party: who makes them; all make the same.
        net: that they are for.
        behind: the places, see `potluck.models.contract.places`, and the shape of one example's features at each.
        build: makes one.
    """
    found = nn.ModuleDict()
    for place, features in behind.items():
        made = partial(build, net, features, party.num_classes)
        name = f"exit {place}"
        found[place] = party.module(name, made) if isinstance(party, Server) else party.module(name, made, keep=False)
    return found
