"""What lies behind the gains and losses of finished runs: clients' classes, their heads, and what they know together.

    POTLUCK_DATA=... .venv-zoo/bin/python benchmarks/six_models/causes.py RUN ...

RUN is the folder of a finished run of `run.py` whose clients predict with networks of their own. Of each, as means over
clients: *distance*, the total variation between the classes that a model predicts for 1,000 test images, in which all
are about as frequent, and those of its client's training part; *own*, the accuracy on own test parts; *epoch later*,
the same after one more epoch of local training, which fits a head that was replaced to its features; *ensemble*, the
accuracy of all models' mean probabilities on the same test images, and *alone*, the mean of their accuracies there.
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import torch
from finished import print_each
from torch import Tensor, nn
from torch.nn import functional as F

import potluck
from potluck.core.requests.examples import Examples
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.settings.tables import read_toml

TESTED, TOGETHER, BATCH, RATE = 1000, 200, 32, 0.001


def probabilities(net: nn.Module, inputs: Tensor) -> Tensor:
    """Of a network in evaluation mode."""
    net.eval()
    with torch.no_grad():
        return torch.cat([net(part).softmax(1) for part in inputs.split(TOGETHER)])


def accuracy(found: Tensor, targets: Tensor) -> float:
    """In percent."""
    return 100 * float((found.argmax(1) == targets).float().mean())


def train(net: nn.Module, examples: Examples) -> None:
    """One epoch."""
    torch.manual_seed(0)
    optimizer = torch.optim.Adam((weight for weight in net.parameters() if weight.requires_grad), RATE)
    net.train()
    for rows in torch.randperm(len(examples)).split(BATCH):
        batch = examples.batch(rows)
        optimizer.zero_grad()
        F.cross_entropy(net(batch.inputs), batch.targets).backward()
        optimizer.step()


def measured(folder: Path) -> dict[str, float]:
    """The numbers of a run."""
    run, federation = potluck.open_run(folder), assemble(resolve(read_toml(folder / "config.toml"))).federation
    assert federation.test is not None
    test, classes = federation.test.batch(torch.arange(TESTED)), federation.num_classes
    found, together = defaultdict[str, list[float]](list), torch.zeros(TESTED, classes)
    for id, site in federation.sites.items():
        net, own = run.model(id), site.test.batch(torch.arange(len(site.test)))
        p, mixture = probabilities(net, test.inputs), torch.bincount(site.train.labels, minlength=classes)
        together += p
        shares = torch.bincount(p.argmax(1), minlength=classes) / TESTED
        found["distance"].append(float((shares - mixture / len(site.train)).abs().sum() / 2))
        found["alone"].append(accuracy(p, test.targets))
        found["own"].append(accuracy(probabilities(net, own.inputs), own.targets))
        if any(weight.requires_grad for weight in net.parameters()):
            train(net, site.train)
            found["epoch later"].append(accuracy(probabilities(net, own.inputs), own.targets))
    return {"ensemble": accuracy(together, test.targets), **{name: fmean(values) for name, values in found.items()}}


def lines(folder: Path) -> Iterator[str]:
    """What is printed of a run."""
    return (f"{name}: {value:.2f}" for name, value in measured(folder).items())


if __name__ == "__main__":
    print_each(__doc__.splitlines()[0], lines)
