"""Figure 1 of FedORION: three clients, points in the plane, and a server that has none.

Each client holds mostly two of three classes, and its own perceptron; the server has a smaller one. In a few
rounds the server's model, distilled on N(0, 1) noise, learns all three. Writes `fedorion_toy.png`:

    python examples/fedorion_toy.py
"""

from functools import partial
from itertools import pairwise

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

from potluck import fl
from potluck.core.federation import Federation, Site, empty_like
from potluck.core.ground.rng import fold_in
from potluck.core.requests.examples import Examples
from potluck.core.requests.inference import predict
from potluck.engine.rounds.engine import Engine
from potluck.methods.fedorion import FedORION

ROUNDS = 15
COLOURS = ["tab:blue", "tab:orange", "tab:green"]
CENTRES = torch.tensor([[0.0, 1.4], [-1.2, -0.8], [1.2, -0.8]])
HIDDEN = {"16-16": (16, 16), "32": (32,), "8-8-8": (8, 8, 8), "server": (16,)}
AMOUNTS = {0: (60, 60, 4), 1: (4, 60, 60), 2: (60, 4, 60)}  # of each class, at each client


def perceptron(*hidden: int) -> nn.Sequential:
    """Fully connected layers, each but the last followed by ReLU and then BatchNorm, as in the paper's figure."""
    sizes = (2, *hidden)
    layers = [nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.BatchNorm1d(b)) for a, b in pairwise(sizes)]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 3))


def points(amounts: tuple[int, ...], name: int | str) -> Examples:
    """A cloud of points around the centre of each class."""
    targets = torch.arange(3).repeat_interleave(torch.tensor(amounts))
    spread = torch.randn(len(targets), 2, generator=fold_in(0, "points", name).generator())
    return Examples(CENTRES[targets] + 0.55 * spread, targets)


def federation() -> Federation:
    """Three clients of three architectures, none of which is the server's."""
    sites = {}
    for (client, amounts), architecture in zip(AMOUNTS.items(), HIDDEN, strict=False):
        train = points(amounts, client)
        sites[client] = Site(client, architecture, train, empty_like(train), empty_like(train))
    return Federation(
        sites,
        architectures={name: partial(perceptron, *hidden) for name, hidden in HIDDEN.items()},
        server_architecture="server",
        num_classes=3,
        test=points((300, 300, 300), "test"),
    )


def draw(axes: plt.Axes, net: nn.Module, examples: Examples, title: str) -> None:
    """The classes that a net gives to every place in the plane, under some examples."""
    line = torch.linspace(-3.2, 3.2, 200)
    plane = torch.cartesian_prod(line, line)
    classes = predict(net, Examples(plane, plane)).argmax(1).view(200, 200).T
    axes.contourf(line, line, classes, levels=[-0.5, 0.5, 1.5, 2.5], colors=COLOURS, alpha=0.3)
    axes.scatter(*examples.inputs.T, s=6, c=[COLOURS[label] for label in examples.labels])
    axes.set(title=title, xticks=[], yticks=[], aspect="equal")


def accuracy(net: nn.Module, examples: Examples) -> float:
    """Share of examples that a net gets right."""
    right: Tensor = predict(net, examples).argmax(1) == examples.labels
    return float(right.float().mean())


def main() -> None:
    """Play, print the accuracies on all three classes, draw."""
    world = federation()
    training = fl.LocalTraining("sgd", lr=0.05, epochs=3, batch_size=32, momentum=0.9)
    # Twenty batches of noise an epoch are plenty for a net of 131 weights.
    distillation = fl.LocalTraining("sgd", lr=0.01, epochs=2, batch_size=128, momentum=0.9)
    engine = Engine(FedORION(training, distillation, noise_batches=20), world)
    state = engine.start()
    for number in range(1, ROUNDS + 1):
        state, _ = engine.round(number, state, list(world.sites))
    models = {
        f"client {id}: {site.architecture}": (engine.inference_model(state, id), site.train)
        for id, site in world.sites.items()
    }
    models["server: 16, distilled on noise"] = (engine.global_model(state), world.test)
    figure, row = plt.subplots(1, len(models), figsize=(3.2 * len(models), 3.9), layout="constrained")
    for axes, (name, (net, examples)) in zip(row, models.items(), strict=True):
        share = accuracy(net, world.test)
        print(f"{name:32} {share:6.1%} of the test points")
        draw(axes, net, examples, f"{name}\n{share:.1%}")
    figure.savefig("fedorion_toy.png", dpi=110)
    print("wrote fedorion_toy.png")


if __name__ == "__main__":
    main()
