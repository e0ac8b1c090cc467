"""Heads and features that clients have in common, whatever networks they have before them.

Methods that exchange heads, or train one for everybody, need heads of one shape; methods that exchange what heads read
need features of one width. The networks before the heads may differ in anything.
"""

from torch import nn

from potluck.core.needs import Need, Offer, split_problem
from potluck.core.nets.batchnorm import batch_norms
from potluck.core.nets.weights import parameters_of, weights_of
from potluck.core.roles import Server
from potluck.models.contract import StagedNet, staged


def head_of(net: nn.Module) -> nn.Module:
    """The head of a staged network, from features (batch, width) to outputs; its tensors have names of their own.

    Raises:
        TypeError: `net` cannot be split.
    """
    return staged(net).head


def client_net(server: Server) -> nn.Module:
    """A network of the first client's architecture with the run's initial weights, for what all clients have alike."""
    return server.build(next(iter(server.roster.values())).architecture)


def _whole(offer: Offer) -> dict[str, StagedNet]:
    """The nets that can be split; `Need.SPLIT_MODEL` names the others."""
    return {name: staged(net) for name, net in offer.nets.items() if split_problem(net) is None}


def _different_widths(offer: Offer) -> str | None:
    widths = {name: net.num_features for name, net in _whole(offer).items()}
    if len(set(widths.values())) < 2:
        return None
    found = ", ".join(f"{name} {width}" for name, width in widths.items())
    return f"it compares features of one client with those of others, and their widths differ: {found}"


def _head_shapes(net: StagedNet) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in weights_of(net.head).items()}


def _different_heads(offer: Offer) -> str | None:
    heads = {name: _head_shapes(net) for name, net in _whole(offer).items()}
    for name, shapes in heads.items():
        first, expected = next(iter(heads.items()))
        if shapes != expected:
            return f"all clients get one head, but that of {first} has {expected} and that of {name} {shapes}"
    return None


def _servers_other_head(offer: Offer) -> str | None:
    """Of a server's architecture that no client has; `_different_heads` compares those of clients."""
    name, clients = offer.server_architecture, _whole(offer)
    if name in offer.nets:
        return None
    net = offer.build(name)
    if problem := split_problem(net):
        return f"the server's model gets the clients' head, but {name} has none: {problem}"
    found = _head_shapes(staged(net))
    other = next((theirs for theirs in clients if _head_shapes(clients[theirs]) != found), None)
    return other and (
        f"the server's model gets the clients' head, but that of {name} has {found} and that of {other}"
        f" {_head_shapes(clients[other])}"
    )


def _normalising_heads(offer: Offer) -> str | None:
    norms = {name: batch_norms(net.head) for name, net in _whole(offer).items()}
    return next(
        (f"the server trains the head, and that of {name} has BatchNorm" for name in norms if norms[name]), None
    )


def _frozen_heads(offer: Offer) -> str | None:
    frozen = (name for name, net in _whole(offer).items() if not parameters_of(net.head))
    return next((f"the server trains the head, and that of {name} is frozen" for name in frozen), None)


COMMON_WIDTH = Need(
    "features of one width at all clients",
    _different_widths,
    "choose models whose heads read features of one width, or end their stages in a layer that makes it one",
)
COMMON_HEAD = Need(
    "heads of one shape at all clients",
    _different_heads,
    "choose models whose heads have the same layers and read features of one width",
)
SERVERS_HEAD = Need(
    "a server's model whose head has the shape of the clients'",
    _servers_other_head,
    "choose a federation.server_model whose head has the same layers and reads features of the clients' width",
)
PLAIN_HEAD = Need(
    "heads without BatchNorm",
    _normalising_heads,
    "choose heads without it: means of classes have other statistics than examples",
)
TRAINED_HEAD = Need(
    "heads that are not frozen",
    _frozen_heads,
    "leave requires_grad of the head's parameters as it is, or use a method that trains no head on the server, such as"
    " fedproto",
)
