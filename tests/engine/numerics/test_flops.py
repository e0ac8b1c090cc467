"""Operations of a forward pass, counted a second time by hand: from the sizes of layers in the papers, not from nets.

A multiplication and an addition are two operations; a convolution that puts out `side` x `side` positions of `outputs`
channels, each from `inputs` channels at `kernel` x `kernel` places, has 2 side^2 outputs inputs kernel^2. Norms,
activations, biases and pooling are not counted.
"""

import gc
import weakref

import pytest
import torch

from potluck.core.ground.rng import Key, isolated
from potluck.engine.numerics.costs import CostMeter, forward_flops
from potluck.models import get_model


def conv(side, inputs, outputs, kernel):
    return 2 * side**2 * outputs * inputs * kernel**2


def mlp():
    """Four hidden layers of 64 units over 100 numbers, and 10 classes."""
    return 2 * (100 * 64 + 64 * 64 + 64 * 64 + 64 * 64 + 64 * 10)


def resnet10():
    """ImageNet's stem on 32 x 32: a 7 x 7 convolution with stride 2, pooling to 8 x 8; then a block for each stage."""
    total, inputs = conv(16, 3, 64, 7), 64
    for side, outputs in ((8, 64), (4, 128), (2, 256), (1, 512)):
        total += conv(side, inputs, outputs, 3) + conv(side, outputs, outputs, 3)
        total += conv(side, inputs, outputs, 1) if inputs != outputs else 0  # the shortcut
        inputs = outputs
    return total + 2 * 512 * 10


def resnet20():
    """He et al., section 4.2: three times three blocks of 16, 32 and 64 channels; shortcuts have no parameters."""
    total, inputs = conv(32, 3, 16, 3), 16
    for side, outputs in ((32, 16), (16, 32), (8, 64)):
        total += conv(side, inputs, outputs, 3) + 5 * conv(side, outputs, outputs, 3)
        inputs = outputs
    return total + 2 * 64 * 10


def wrn40_1():
    """Zagoruyko and Komodakis: six blocks for each of 16, 32, 64 channels; a 1 x 1 shortcut where they change."""
    total, inputs = conv(32, 3, 16, 3), 16
    for side, outputs in ((32, 16), (16, 32), (8, 64)):
        total += conv(side, inputs, outputs, 3) + 11 * conv(side, outputs, outputs, 3)
        total += conv(side, inputs, outputs, 1) if inputs != outputs else 0
        inputs = outputs
    return total + 2 * 64 * 10


def mobilenetv2():
    """Sandler et al., table 2, at the sizes of CIFAR; a 1 x 1 shortcut where channels change and the size stays."""
    total, inputs, side = conv(32, 3, 32, 3), 32, 32
    groups = [
        (1, 16, 1, 32),
        (6, 24, 2, 32),
        (6, 32, 3, 16),
        (6, 64, 4, 8),
        (6, 96, 3, 8),
        (6, 160, 3, 4),
        (6, 320, 1, 4),
    ]
    for widening, outputs, count, new_side in groups:
        for _ in range(count):
            wide = widening * inputs
            total += conv(side, inputs, wide, 1) + conv(new_side, 1, wide, 3) + conv(new_side, wide, outputs, 1)
            total += conv(side, inputs, outputs, 1) if new_side == side and inputs != outputs else 0
            inputs, side = outputs, new_side
    return total + conv(4, 320, 1280, 1) + 2 * 1280 * 10


def vit():
    """Dosovitskiy et al.: 8 x 8 patches of 4 x 4 and a class token, 192 channels, 12 blocks, heads of 64 channels."""
    tokens, width, heads = 65, 192, 3
    attention = 2 * tokens * width * 3 * width + 2 * 2 * heads * tokens**2 * (width // heads) + 2 * tokens * width**2
    mlp_of_block = 2 * 2 * tokens * width * 4 * width
    return conv(8, 3, width, 4) + 12 * (attention + mlp_of_block) + 2 * width * 10


@pytest.mark.parametrize(
    ("name", "by_hand", "shape", "options"),
    [
        ("mlp4", mlp, (100,), {"width": 64}),
        ("resnet10", resnet10, (3, 32, 32), {}),
        ("resnet20", resnet20, (3, 32, 32), {}),
        ("wrn40_1", wrn40_1, (3, 32, 32), {}),
        ("mobilenetv2", mobilenetv2, (3, 32, 32), {}),
        ("vit", vit, (3, 32, 32), {"patch": 4, "width": 192, "depth": 12, "heads": 3}),
    ],
)
def test_operations_are_those_counted_by_hand(name, by_hand, shape, options):
    with isolated(Key(("flops",))):
        net = get_model(name)(10, shape, **options)
    assert forward_flops(net, shape) == by_hand() + 1


def test_a_count_may_end_while_garbage_is_collected(monkeypatch):
    """Python collects when it likes; a count that failed then has made a client fail, or be trained alone."""
    detach = weakref.finalize.detach
    monkeypatch.setattr(weakref.finalize, "detach", lambda watch: (gc.collect(), detach(watch)))
    gc.disable()
    try:
        with CostMeter() as counting:
            held = torch.ones(4)
            for _ in range(3):
                ring = [torch.ones(2)]
                ring.append(ring)
            del ring
        assert counting.cost.memory == held.nbytes + 3 * 8
    finally:
        gc.enable()
