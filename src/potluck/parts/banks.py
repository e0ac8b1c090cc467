"""Convolutions composed of banks of filters that every width shares: FLANC."""

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from potluck.core.ground.errors import ConfigError
from potluck.core.nets.weights import Weights, parameters_of
from potluck.models.contract import StagedNet

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
BANK = ".bank.weight"
LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Composed(nn.Module):
    """A convolution whose kernels are mixed from a bank: for output o and group g of input channels sum_j A_ogj B_j.

    It has the outputs of that convolution on inputs (batch, channels, ...).

    Args:
        layer: gives way to it, and keeps its bias.
        bank: (filters, channels of a group, ...).
    """

    bias: nn.Parameter | None

    def __init__(self, layer: Convolution, bank: Tensor) -> None:
        super().__init__()
        filters, channels = bank.shape[:2]
        form = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}
        form |= {"padding_mode": layer.padding_mode, "bias": False}
        self.groups = layer.in_channels // channels
        self.bank = _empty(type(layer), channels, filters, layer.kernel_size, **form)
        self.coefficients = _empty(type(layer), self.groups * filters, layer.out_channels, 1, bias=False)
        self.bias = cast("nn.Parameter | None", layer.bias)
        with torch.no_grad():
            self.bank.weight.copy_(bank)

    def forward(self, x: Tensor) -> Tensor:
        """One convolution with the bank for every group, and one of kernel 1 with the coefficients."""
        maps = self.bank(x.unflatten(1, (self.groups, -1)).flatten(0, 1))
        mixed = self.coefficients(maps.unflatten(0, (x.shape[0], self.groups)).flatten(1, 2))
        return mixed if self.bias is None else mixed + self.bias.view(-1, *[1] * (mixed.dim() - 2))


def blocks_to_compose(net: nn.Module) -> list[dict[str, Convolution]]:
    """The convolutions to compose, by name, those of one block together."""
    modules, found = dict(net.named_modules()), dict[str, dict[str, Convolution]]()
    head = {*net.head.modules()} if isinstance(net, StagedNet) else set[nn.Module]()
    convolutions = [(name, module) for name, module in modules.items() if isinstance(module, Convolution)]
    for name, layer in convolutions[1:]:
        plain = type(layer) in (nn.Conv1d, nn.Conv2d, nn.Conv3d) and layer.groups == 1 and layer not in head
        if plain and math.prod(layer.kernel_size) > 1 and layer.weight.requires_grad:
            parent = name.rpartition(".")[0]
            block = parent if parent and not isinstance(modules[parent], LISTS) else name
            found.setdefault(block, {})[name] = layer
    return list(found.values())


def composed(net: nn.Module, banks: Mapping[str, Tensor]) -> nn.Module:
    """The network with the layers composed of which these are the banks, wherever it has them.

    Raises:
        ConfigError: a layer's input channels cannot be divided into groups of the bank's.
    """
    new = dict[nn.Module, Composed]()
    for name, bank in ((name.removesuffix(BANK), bank) for name, bank in banks.items()):
        layer = net.get_submodule(name)
        assert isinstance(layer, Convolution)
        if layer.in_channels % bank.shape[1]:
            raise ConfigError(
                f"{name} has {layer.in_channels} input channels, which cannot be divided into groups of"
                f" {bank.shape[1]}, as its bank's filters read"
            )
        new[layer] = Composed(layer, bank)
    for parent in [*net.modules()]:
        for name, child in [*parent._modules.items()]:
            if child in new:
                setattr(parent, name, new[child])
    return net


def layers_of(net: nn.Module) -> dict[str, Composed]:
    """The composed layers by name."""
    return {name: layer for name, layer in net.named_modules() if isinstance(layer, Composed)}


def own_weights(net: nn.Module, banks: Mapping[str, Tensor]) -> Weights:
    """What is trained of a composed network beside the banks, once under its first name."""
    trained = parameters_of(net)
    return {name: trained[name] for name, _ in net.named_parameters() if name in trained and name not in banks}


def _empty(kind: type[Convolution], *sizes: Any, **form: Any) -> Convolution:
    """A convolution whose weights are to be loaded; none are drawn."""
    return cast(Convolution, nn.utils.skip_init(kind, *sizes, **form))
