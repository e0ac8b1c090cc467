"""What a reply gives away, by what is in it and not by which method sent it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from potluck.attacks.labels import ClassShares, as_probabilities, from_bias, from_outputs, shares_of
from potluck.attacks.overheard import Heard, Overheard
from potluck.core.ground.errors import ConfigError
from potluck.core.nets.splitting import split_problem
from potluck.core.nets.weights import learnt_of, load, parameters_of
from potluck.core.roles import Server
from potluck.models.split import split

_TOLD = {"counts": "counts", "shares": "shares of classes"}
_LABELS = {"labels": "labels", "targets": "labels", "studied": "classes of its gradients"}
_OUTPUTS = ("logits", "predictions")
_DEEPEST = 6  # blocks of a shallower network that is tried
_CHANGES = {"dy": 1.0, "d": -1.0}
"""Entries that are changes of the weights that were sent, and their sign."""


@dataclass(frozen=True)
class ClassEvidence:
    """A guess of a client's classes.

    Attributes:
        source: what it was made from, in words.
        shares: of each class.
        told: whether the reply says so, and nothing had to be inferred.
    """

    source: str
    shares: ClassShares
    told: bool = False


def class_evidence(heard: Heard, overheard: Overheard) -> ClassEvidence | None:
    """The best guess of a client's classes from its reply; None if nothing in it says anything of them.

    What the reply states comes before what training has done to its weights, and that before outputs.
    """
    reply, classes = heard.reply, overheard.engine.federation.num_classes
    for name, source in _TOLD.items():
        if isinstance(found := reply.get(name), Tensor) and found.numel() == classes:
            return ClassEvidence(source, shares_of(found.flatten().double().numpy()), told=True)
    for name, source in _LABELS.items():
        if isinstance(found := reply.get(name), Tensor):
            told = found.double() if found.dtype == torch.bool else found.flatten().bincount(minlength=classes).double()
            if len(told) == classes and told.sum() > 0:
                return ClassEvidence(source, shares_of(told.numpy()), told=True)
    change = _head_change(heard, overheard)
    if change is not None:
        return ClassEvidence("bias of the last layer", _of_all(from_bias(change.double().numpy()), heard, overheard))
    for name in _OUTPUTS:
        found = reply.get(name)
        if isinstance(found, Tensor) and found.dim() == 2 and found.shape[1] == classes and len(found):
            return ClassEvidence("outputs on public examples", from_outputs(found.double().numpy()))
    return None


def returned_net(heard: Heard, overheard: Overheard) -> nn.Module | None:
    """The network that a client has trained, if its reply has all of it; its own one, or the common one."""
    server = overheard.engine.server(0)
    for net in _nets(heard, server):
        names = parameters_of(net).keys()
        for weights in _weights(heard):
            if names <= weights.keys() and all(weights[name].shape == net.get_parameter(name).shape for name in names):
                known = {**_tensors(heard.sent), **_tensors(heard.reply), **weights}
                own = learnt_of(net)
                return load(net, {n: known[n] if _fits(known, n, t) else t for n, t in own.items()}).eval()
    return None


def extracting_net(heard: Heard, overheard: Overheard) -> tuple[nn.Module, str]:
    """The network that the server takes for the one which made a client's features, and what it is."""
    if (net := returned_net(heard, overheard)) is not None:
        return net, "weights that the client sent"
    net = overheard.engine.server(0).build(overheard.engine.federation.roster[heard.client].architecture)
    sent = _tensors(heard.sent)
    known = {name: sent[name] for name, tensor in learnt_of(net).items() if _fits(sent, name, tensor)}
    if known:
        return load(net, known, partial=True).eval(), "weights that the server sent"
    return net.eval(), "initial weights, which all know"


def outputs_on_public(heard: Heard, overheard: Overheard) -> tuple[Tensor, Tensor] | None:
    """Public inputs, and the probabilities that a client has put out for them; None if it has sent none."""
    public, classes = overheard.engine.federation.public, overheard.engine.federation.num_classes
    found = next((heard.reply[name] for name in _OUTPUTS if isinstance(heard.reply.get(name), Tensor)), None)
    rows = heard.sent.get("rows")
    if public is None or found is None or found.dim() != 2 or found.shape[1] != classes or not isinstance(rows, Tensor):
        return None
    if len(found) != len(rows):
        return None
    return public.batch(rows).inputs, torch.from_numpy(as_probabilities(found.double().numpy())).float()


def _nets(heard: Heard, server: Server) -> Iterator[nn.Module]:
    """New networks that the reply may be of: the client's or the common one, whole, narrower or shallower."""
    width, names = float(heard.sent.get("rate", 1.0)), (server.roster[heard.client].architecture, None)
    for name, depth in [*((name, None) for name in names), *product(names, range(_DEEPEST, 0, -1))]:
        try:
            yield server.build(name, width=width, depth=depth)
        except (ConfigError, ValueError, TypeError):
            continue


def _weights(heard: Heard) -> Iterator[dict[str, Tensor]]:
    """The entries of a reply that are weights, and those that say how weights were changed, as weights."""
    for name, entry in heard.reply.items():
        if not isinstance(entry, dict):
            continue
        tensors = {key: tensor for key, tensor in entry.items() if isinstance(tensor, Tensor)}
        if name in _CHANGES:
            sent, scale = heard.sent.get("weights", {}), _CHANGES[name] * float(heard.reply.get("steps", 1))
            yield {key: sent[key] + scale * moved for key, moved in tensors.items() if key in sent}
        else:
            yield tensors


def _tensors(message: Mapping[str, Any]) -> dict[str, Tensor]:
    """All tensors by name of those entries that are dicts of tensors; of equal names the first."""
    found: dict[str, Tensor] = {}
    for entry in message.values():
        if isinstance(entry, dict):
            found = {**{k: t for k, t in entry.items() if isinstance(t, Tensor)}, **found}
    return found


def _fits(known: Mapping[str, Tensor], name: str, like: Tensor) -> bool:
    return name in known and known[name].shape == like.shape


def _head_change(heard: Heard, overheard: Overheard) -> Tensor | None:
    """How far training has moved the last layer's bias; its weights, summed over inputs, if it has none."""
    others = [other for client, other in overheard.heard.items() if client != heard.client]
    own = overheard.engine.federation.classes_of(heard.client)
    widths = {overheard.engine.federation.num_classes} | (set[int]() if own is None else {len(own.numbers)})
    for net in _nets(heard, overheard.engine.server(0)):
        if split_problem(net) is not None or split(net).head_problem() is not None:
            continue
        prefix = split(net).head_prefix
        for name in (f"{prefix}bias", f"{prefix}weight"):
            parameter = parameters_of(net).get(name)
            if parameter is None or len(parameter) not in widths:
                continue  # a head of several layers may have one of this name that does not put out classes
            if (moved := _moved(heard, others, name)) is not None and len(moved) in widths:
                return moved.flatten(1).sum(1) if moved.dim() > 1 else moved
    return None


def _moved(heard: Heard, others: Sequence[Heard], name: str) -> Tensor | None:
    """How a tensor of a reply differs from what was sent, or from the other clients' mean where nothing was."""
    for entry, tensors in heard.reply.items():
        if not isinstance(tensors, dict) or not isinstance(tensors.get(name), Tensor):
            continue
        found = tensors[name].double()
        if entry in _CHANGES:
            return _CHANGES[entry] * found
        sent = heard.sent.get(entry)
        if isinstance(sent, dict) and isinstance(sent.get(name), Tensor) and sent[name].shape == found.shape:
            return found - sent[name].double()
        rest = [o.reply[entry][name].double() for o in others if _has(o, entry, name, found)]
        if rest:
            return found - torch.stack(rest).mean(0)
    return None


def _has(heard: Heard, entry: str, name: str, like: Tensor) -> bool:
    tensors = heard.reply.get(entry)
    return isinstance(tensors, dict) and isinstance(tensors.get(name), Tensor) and tensors[name].shape == like.shape


def _of_all(shares: ClassShares, heard: Heard, overheard: Overheard) -> ClassShares:
    """Shares of all the federation's classes, of a client whose network has outputs for its own alone."""
    federation = overheard.engine.federation
    own = federation.classes_of(heard.client)
    if own is None or len(shares) == federation.num_classes:
        return shares
    found = np.zeros(federation.num_classes)
    found[list(own.numbers)] = shares
    return found
