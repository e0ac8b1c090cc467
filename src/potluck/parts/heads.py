"""Heads and features that clients have in common, whatever networks they have before them.

Methods that exchange heads, or train one for everybody, need heads of one shape; methods that exchange what heads read
need features of one width. The networks before the heads may differ in anything.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from potluck.core.federation import Member
from potluck.core.ground.inputs import InputShape
from potluck.core.needs import Need, Offer, Problem
from potluck.core.nets.batchnorm import batch_norms
from potluck.core.nets.splitting import split_problem
from potluck.core.nets.weights import parameters_of, weights_of
from potluck.core.roles import Server
from potluck.models.fitting import takes_fit
from potluck.models.split import Split, split
from potluck.parts.classes import rows_for


def client_net(server: Server) -> nn.Module:
    """A network of the first client's architecture with the run's initial weights, for what all clients have alike."""
    return server.build(next(iter(server.roster.values())).base)


def head_prefix(net: nn.Module, input_shape: InputShape) -> str:
    """What the names of the head's tensors begin with in a network."""
    return split(net).head_prefix


def head_for(head: Mapping[str, Tensor], member: Member, server: Server) -> Mapping[str, Tensor]:
    """Of a head with all classes, by names in it, what a client's own has."""
    if member.head is None:
        return head
    return rows_for(head, member, server.about(member.base, head_prefix))


def _parts(offer: Offer) -> dict[str, Split]:
    """The nets that can be split; `Need.SPLIT_MODEL` names the others."""
    return {name: split(net) for name, net in offer.nets.items() if split_problem(net) is None}


def _heads(offer: Offer) -> dict[str, nn.Module]:
    """The heads of those nets that have one to take out; `WHOLE_HEAD` names the others."""
    return {name: parts.head for name, parts in _parts(offer).items() if parts.head_problem() is None}


def _no_whole_head(offer: Offer) -> str | None:
    problems = ((name, parts.head_problem()) for name, parts in _parts(offer).items())
    return next((f"the head of {name} cannot be taken out: {problem}" for name, problem in problems if problem), None)


_OF_ONE_WIDTH = "whose heads read features of one width"
_OF_ONE_SHAPE = "whose heads have the same layers and read features of one width"


def _where_none_fits(problem: str, heads: str, offer: Offer) -> Problem:
    """The problem, and what to choose where `federation.feature_width` refuses a network, too."""
    name = next((name for name in offer.nets if not takes_fit(offer.architectures[name], offer.input_shape)), None)
    advice = f"choose models {heads}; federation.feature_width cannot bring features of {name} to another"
    return problem if name is None else (problem, advice)


def _different_widths(offer: Offer) -> Problem | None:
    widths = {name: parts.num_features for name, parts in _parts(offer).items()}
    if len(set(widths.values())) < 2:
        return None
    found = ", ".join(f"{name} {width}" for name, width in widths.items())
    problem = f"it compares features of one client with those of others, and their widths differ: {found}"
    return _where_none_fits(problem, _OF_ONE_WIDTH, offer)


def _shapes(head: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in weights_of(head).items()}


def _different_heads(offer: Offer) -> Problem | None:
    heads = {name: _shapes(head) for name, head in _heads(offer).items()}
    for name, shapes in heads.items():
        first, expected = next(iter(heads.items()))
        if shapes != expected:
            problem = f"all clients get one head, but that of {first} has {expected} and that of {name} {shapes}"
            return _where_none_fits(problem, _OF_ONE_SHAPE, offer)
    return None


def _servers_other_head(offer: Offer) -> str | None:
    """Of a server's architecture that no client has; `_different_heads` compares those of clients."""
    name, clients = offer.server_architecture, _heads(offer)
    if name in offer.nets:
        return None
    net = offer.build(name)
    if problem := split_problem(net):
        return f"the server's model gets the clients' head, but {name} has none: {problem}"
    if problem := split(net).head_problem():
        return f"the server's model gets the clients' head, and that of {name} cannot be taken out: {problem}"
    found = _shapes(split(net).head)
    other = next((theirs for theirs in clients if _shapes(clients[theirs]) != found), None)
    return other and (
        f"the server's model gets the clients' head, but that of {name} has {found} and that of {other}"
        f" {_shapes(clients[other])}"
    )


def _normalising_heads(offer: Offer) -> str | None:
    norms = {name: batch_norms(head) for name, head in _heads(offer).items()}
    return next(
        (f"the server trains the head, and that of {name} has BatchNorm" for name in norms if norms[name]), None
    )


def _frozen_heads(offer: Offer) -> str | None:
    frozen = (name for name, head in _heads(offer).items() if not parameters_of(head))
    return next((f"the server trains the head, and that of {name} is frozen" for name in frozen), None)


def _frozen_bodies(offer: Offer) -> str | None:
    nets = ((name, net) for name, net in offer.nets.items() if split_problem(net) is None)
    frozen = (name for name, net in nets if not parameters_of(net).keys() - split(net).last_names())
    return next((f"it trains all but the head, and of {name} all but the head is frozen" for name in frozen), None)


COMMON_WIDTH = Need(
    "features of one width at all clients",
    _different_widths,
    f"choose models {_OF_ONE_WIDTH}, or set federation.feature_width, which adds a layer",
)
TRAINED_BODY = Need(
    "networks of which more is trained than the head",
    _frozen_bodies,
    "let more of it be trained, or use a method that trains the head, such as fedper",
)
WHOLE_HEAD = Need(
    "heads that read a row of numbers",
    _no_whole_head,
    "give what the head reads, in a row for each example, to a module of the network, such as an nn.Linear or an"
    " nn.Identity, or use a method that takes no head out",
)
COMMON_HEAD = Need(
    "heads of one shape at all clients",
    _different_heads,
    f"choose models {_OF_ONE_SHAPE}, or set federation.feature_width",
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
