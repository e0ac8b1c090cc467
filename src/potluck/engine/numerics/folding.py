"""A network as it is evaluated: each BatchNorm folded into the convolution before it."""

from collections import Counter
from copy import deepcopy

from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from potluck.core.modes import mode


def folded(net: nn.Module) -> nn.Module:
    """A copy of `net` in evaluation mode, without the BatchNorm layers that read a convolution and nothing else does.

    A net whose forward function cannot be traced comes back as it is.
    """
    pairs = _pairs(net)
    if not pairs:
        return net
    with mode(net, training=False):
        copy = deepcopy(net)
    layers = dict(copy.named_modules())
    for convolution, norm in pairs:
        copy.set_submodule(convolution, fuse_conv_bn_eval(layers[convolution], layers[norm]))  # pyright: ignore
        copy.set_submodule(norm, nn.Identity())
    return copy


def _pairs(net: nn.Module) -> list[tuple[str, str]]:
    """Names of convolutions and of the norms that alone read them, each called once."""
    from torch import fx  # a quarter of a second

    class Layers(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return not any(m.children())  # also our own layers without parts, which may look at shapes

    try:
        calls = [node for node in Layers().trace(net).nodes if node.op == "call_module"]
    except Exception:  # whatever a forward function does with what stands in for its input
        return []
    layers, times = dict(net.named_modules()), Counter(node.target for node in calls)

    def once(node: fx.Node, kind: type[nn.Module]) -> bool:
        return node in calls and times[node.target] == 1 and type(layers[str(node.target)]) is kind

    found: list[tuple[str, str]] = []
    for norm in calls:
        before = norm.args[0] if norm.args else None
        if not isinstance(before, fx.Node) or not (once(before, nn.Conv2d) and once(norm, nn.BatchNorm2d)):
            continue
        if len(before.users) == 1 and layers[str(norm.target)].track_running_stats:
            found.append((str(before.target), str(norm.target)))
    return found
