"""The local training of contestants that leave it to their users: the loop of every PyTorch tutorial."""

from functools import cache

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from workloads import Workload, draw_data


@cache
def datasets(workload: Workload) -> list[TensorDataset]:
    """Every client's examples, made once a process."""
    return [TensorDataset(torch.from_numpy(x), torch.from_numpy(y)) for x, y in draw_data(workload)]


def train(net: nn.Module, batches: DataLoader, workload: Workload) -> int:
    """Train in place with a fresh Adam; how many steps that took."""
    optimizer = torch.optim.Adam(net.parameters(), lr=workload.lr)
    criterion = nn.CrossEntropyLoss()
    net.train()
    steps = 0
    for _ in range(workload.epochs):
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = criterion(net(inputs), targets)
            loss.backward()
            optimizer.step()
            steps += 1
    return steps
