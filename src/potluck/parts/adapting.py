"""Adapting a model to a client's data where it is evaluated: a few steps of gradient descent, and nothing is kept.

In `inference_model` a client may ask for gradients but not train, and changes that it makes there are discarded.
"""

from collections.abc import Collection, Generator

import torch
from torch import nn

from potluck.core.nets.weights import Weights
from potluck.core.requests.beside_training import Gradient
from potluck.core.requests.examples import Examples
from potluck.core.roles import Client


def adapted(
    client: Client, data: Examples, lr: float, epochs: int, batch_size: int, names: Collection[str] | None = None
) -> Generator[Gradient, Weights, nn.Module]:
    """The client's model after plain gradient descent on its task's loss; its running statistics do not change.

    Args:
        client: its model is changed in place.
        data: the examples, which are not augmented.
        lr: the learning rate.
        epochs: passes over the data.
        batch_size: examples in a step; all of them if there are no more.
        names: of the parameters that move; all by default.
    """
    net = client.model
    for _ in range(epochs):
        for piece in data.pieces(batch_size, client.rng):
            found = yield Gradient(net, client.objective, piece, batch_size=len(piece))
            with torch.no_grad():
                for name, weight in net.named_parameters():  # others than before, where the net was on a device
                    if name in found and (names is None or name in names):
                        weight.sub_(lr * found[name])
    return net
