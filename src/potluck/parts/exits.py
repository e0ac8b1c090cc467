"""Exits that a method adds to nets: classifiers behind stages or blocks, alike on both sides.

They are the method's own modules, beside the model that a client evaluates: what is trained of them is sent, averaged
and kept by the method, and they never predict unless it says so (`Method.predicts_with_exits`). `with_exits` makes a
net of a model's layers and these.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Size, nn

from potluck.core.roles import Client, Server
from potluck.models.contract import StagedNet, blocks, linear_exit, of_depth, place_shapes, with_exits

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


def blocks_within(net: StagedNet, share: float) -> int:
    """How many of a net's blocks make up at most this share of them; at least one."""
    return max(1, math.floor(share * len(blocks(net)) + 1e-9))  # 0.29 * 100 is 28.999999999999996


def leading_share(
    party: Server | Client,
    net: StagedNet,
    input_shape: tuple[int, ...],
    share: float,
    exits_behind: Sequence[float],
    build: ExitBuilder = linear_exit,
) -> StagedNet:
    """The leading share of a net's blocks, with the exits that stand behind them.

    Its layers are those of the net. It ends in an exit, unless it has all blocks: then in the net's own head, behind
    which there is no other exit.

    Args:
        party: who makes it; all make the same exits.
        net: the full net.
        input_shape: of one example.
        share: of the blocks, see `blocks_within`.
        exits_behind: shares of the blocks behind which nets have exits; those beyond `share` are left out.
        build: makes an exit.
    """
    known, depth = blocks(net), blocks_within(net, share)
    reached = {blocks_within(net, each) for each in (*exits_behind, share)}
    shapes = place_shapes(net, input_shape)
    behind = [known[number - 1] for number in sorted(reached) if number <= depth and number < len(known)]
    exits = new_exits(party, net, {place: shapes[place] for place in behind}, build)
    return of_depth(with_exits(net, dict(exits.named_children())), depth, party.num_classes, input_shape)
