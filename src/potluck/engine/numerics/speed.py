"""This machine's speed in training, by which seconds are converted to those of another one: an estimate."""

import time

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from potluck.core.ground.rng import Key, isolated

_SECONDS = 0.3
_TRIES = 3
_GIGA = 1e9


def sustained_gflops() -> float:
    """Thousand million operations a second of training steps in fp32, as many threads as torch has.

    The best of a few tries with a convolution and a linear layer, since other processes use the machine too. It counts
    processor time where there is one thread.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    with isolated(Key(("speed",))):
        net = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 16 * 16, 64))
        images = torch.ones(16, 64, 16, 16)

    def step() -> None:
        net.zero_grad()
        net(images).sum().backward()

    with FlopCounterMode(display=False) as counter:
        step()
    best, spent = 0.0, 0.0
    tries = 0
    while tries < _TRIES or spent < _SECONDS:
        started = clock()
        step()
        taken = max(clock() - started, 1e-9)
        best, spent, tries = max(best, counter.get_total_flops() / taken / _GIGA), spent + taken, tries + 1
    return best
