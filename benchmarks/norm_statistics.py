"""Finished runs, evaluated once as they are and once with BatchNorm's statistics of everybody's examples.

    POTLUCK_DATA=... python benchmarks/norm_statistics.py RUN [RUN ...] [--examples 2000]

Many sub-model methods let each client measure the statistics of its part on its own examples, whose classes are not
mixed as those of the common test set are. How much of a client's loss on that set is due to this? Prints for each run
the mean accuracy of the clients' models on the common test set, with their own statistics, and with those measured on
examples of all clients.
"""

import argparse
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn

from potluck.core.nets.batchnorm import measure_statistics
from potluck.core.requests.examples import Examples
from potluck.core.requests.inference import predict
from potluck.experiment.folder.trained import Trained, trained_in

BATCH = 64


def mixture_of(trained: Trained, count: int) -> Tensor:
    """Training inputs (count, ...) of all clients, drawn without replacement."""
    inputs = torch.cat([site.train.batch(torch.arange(len(site.train))).inputs for site in _sites(trained)])
    return inputs[torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))[:count]]


def _sites(trained: Trained):
    return [site for _, site in sorted(trained.federation.sites.items())]


def accuracy_of(net: nn.Module, test: Examples) -> float:
    """Share of the test examples that the model has right."""
    return float((predict(net, test).argmax(1) == test.labels).float().mean())


def accuracies(folder: Path, count: int) -> tuple[float, float]:
    """Mean over clients, with their own statistics and with everybody's."""
    trained = trained_in(folder)
    test, inputs = trained.federation.test, mixture_of(trained, count)
    assert test is not None
    own, common = list[float](), list[float]()
    for client in sorted(trained.federation.sites):
        net = trained.model(client)
        own.append(accuracy_of(net, test))
        measure_statistics(net, inputs.split(BATCH))
        common.append(accuracy_of(net, test))
    return fmean(own), fmean(common)


def main() -> None:
    """Evaluate and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="folders of finished runs")
    parser.add_argument("--examples", type=int, default=2000, help="on which everybody's statistics are measured")
    options = parser.parse_args()
    print("| run | own statistics | everybody's |\n|---|---|---|")
    for folder in options.runs:
        own, common = accuracies(folder, options.examples)
        print(f"| {folder.name} | {100 * own:.1f} | {100 * common:.1f} |", flush=True)


if __name__ == "__main__":
    main()
