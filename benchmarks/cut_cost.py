"""What it costs that a network is cut by its dataflow: a step of it beside one of the same layers in a StagedNet.

    OMP_NUM_THREADS=1 python benchmarks/cut_cost.py [--steps 30] [--model resnet18]

Both networks have the same weights and take turns, step by step, with batches of 16 images of 3 x 32 x 32. The losses:
FedProto's, which reads features on the way of one pass; FedIN's with noise on them, for which extractor, intermediate
layers and classifier run one after the other; and FedIN's of features that were received, for which the intermediate
layers run alone. A step is loss and gradients, without an optimiser. Printed are medians over the steps, and the median
and the range of the quotient within a step.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from potluck import fl
from potluck.core.nets.splitting import Splits, plan_of
from potluck.models import get_model
from potluck.testing.checks.networks import unstaged

BATCH, CLASSES, SHAPE, WIDTH = 16, 10, (3, 32, 32), 64


def losses(staged: nn.Module) -> Mapping[str, Callable[[nn.Module], Tensor]]:
    """By name, the loss of a network on one batch."""
    batch = fl.Batch(torch.randn(BATCH, *SHAPE), torch.arange(BATCH) % CLASSES, {})
    parts = fl.split(staged)
    with torch.no_grad():
        s_in = parts.extractor(batch.inputs)
        s_out = parts.intermediate(s_in)
    table = {"means": torch.zeros(CLASSES, parts.num_features), "known": torch.ones(CLASSES, dtype=torch.bool)}
    tables = {"features": table, "logits": None}
    features = {"features": {"s_in": s_in, "s_out": s_out}}
    prototypes = fl.prototypes.PrototypeLoss(nn.functional.cross_entropy, 1.0)
    noisy = fl.features.ObservingLoss(nn.functional.cross_entropy, 0.0, noise=0.1)
    return {
        "FedProto, one pass": lambda net: prototypes(net, batch, tables)[0],
        "FedIN with noise, three parts": lambda net: noisy(net, batch, {})[0],
        "FedIN of received features, one part": lambda net: fl.features.FeatureLoss(BATCH)(net, batch, features),
    }


def seconds(net: nn.Module, loss: Callable[[nn.Module], Tensor]) -> float:
    """How long a step takes."""
    begun = time.perf_counter()
    loss(net).backward()
    return time.perf_counter() - begun


def main() -> None:
    """Time both networks, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet18", help="of `potluck list models`")
    parser.add_argument("--width", type=int, default=WIDTH, help="of its first stage")
    parser.add_argument("--steps", type=int, default=30, help="of each loss")
    options = parser.parse_args()
    torch.manual_seed(0)
    build = partial(get_model(options.model), CLASSES, SHAPE, width=options.width)
    staged = build()
    cut = Splits(SHAPE, real_inputs=True).remember(unstaged(build), (options.model,))
    cut.load_state_dict(staged.state_dict())
    begun = time.perf_counter()
    plan = plan_of(cut)
    print(f"{options.model}: a plan in {time.perf_counter() - begun:.1f} s; the extractor ends at {plan.extractor}")
    print("| step | staged, ms | cut by its dataflow, ms | quotient |\n|---|--:|--:|--:|")
    for name, loss in losses(staged).items():
        pairs = [(seconds(staged, loss), seconds(cut, loss)) for _ in range(options.steps + 2)][2:]
        first, second = (1000 * statistics.median(each) for each in zip(*pairs, strict=True))
        quotients = sorted(b / a for a, b in pairs)
        among = f"{statistics.median(quotients):.3f} ({quotients[0]:.2f} to {quotients[-1]:.2f})"
        print(f"| {name} | {first:.1f} | {second:.1f} | {among} |")


if __name__ == "__main__":
    main()
