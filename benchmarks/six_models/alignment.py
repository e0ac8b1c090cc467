"""How far unlike networks see the same: common features of the clients of finished runs, on images that none has seen.

    POTLUCK_DATA=... .venv-zoo/bin/python benchmarks/six_models/alignment.py RUN ...

RUN is the folder of a finished run of `run.py`. The common features are fitted on half of the public images, in twenty
rounds of agreement, and everything is measured on 1,000 test images.
"""

from collections.abc import Iterator, Mapping
from itertools import permutations
from pathlib import Path
from statistics import fmean

import torch
from finished import print_each
from torch import Tensor

import potluck
from potluck.core.requests.fit import Observed
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.settings.tables import read_toml
from potluck.models.split import split
from potluck.parts import translation
from potluck.parts.features import PLACES, LinearMap
from potluck.parts.means import Aggregate

ANCHORS, TESTED, ROUNDS, RIDGE, TOGETHER = 400, 1000, 20, 1.0, 200
WIDTHS = {"s_in": 64, "s_out": 16}


def correlation(one: Tensor, other: Tensor) -> float:
    """Mean over the columns."""
    one, other = one - one.mean(0), other - other.mean(0)
    return float(((one * other).sum(0) / (one.norm(dim=0) * other.norm(dim=0)).clamp(min=1e-9)).mean())


def explained(found: Tensor, expected: Tensor) -> float:
    """The share of the variance that a prediction explains."""
    return float(1 - (found - expected).square().sum() / (expected - expected.mean(0)).square().sum())


def common_features(seen: Mapping[int, Observed]) -> dict[str, Tensor]:
    """T of both places, after rounds of agreement."""
    first = next(iter(seen.values()))
    common = {place: translation._components(first[place], width) for place, width in WIDTHS.items()}
    for _ in range(ROUNDS):
        said = [
            {place: translation._regression(common[place], mine[place], RIDGE)(mine[place]) for place in PLACES}
            for mine in seen.values()
        ]
        common = translation.agreed(common, said, Aggregate())
    return common


def measured(folder: Path) -> Iterator[tuple[str, float]]:
    """Numbers of a run."""
    run, federation = potluck.open_run(folder), assemble(resolve(read_toml(folder / "config.toml"))).federation
    assert federation.public is not None
    assert federation.test is not None
    nets = {id: run.model(id) for id in federation.sites}
    kinds = {id: site.architecture for id, site in federation.sites.items()}
    inputs = federation.public.batch(torch.arange(ANCHORS)).inputs, federation.test.batch(torch.arange(TESTED)).inputs
    with torch.no_grad():
        passed = {
            id: [[split(net).passed(part) for part in one.split(TOGETHER)] for one in inputs]
            for id, net in nets.items()
        }
        shapes = {id: parts[0][0].s_in.shape[1:] for id, parts in passed.items()}
        anchors, tested = (
            {
                id: {place: torch.cat([getattr(part, place).flatten(1) for part in parts[i]]) for place in PLACES}
                for id, parts in passed.items()
            }
            for i in (0, 1)
        )
        common = common_features(anchors)
        down = {
            id: {place: translation._regression(common[place], mine[place], RIDGE) for place in PLACES}
            for id, mine in anchors.items()
        }
        up = {id: translation._regression(mine["s_in"], common["s_in"], RIDGE) for id, mine in anchors.items()}
        told = {id: {place: down[id][place](mine[place]) for place in PLACES} for id, mine in tested.items()}
        pairs = list(permutations(nets, 2))
        unlike = [(i, j) for i, j in pairs if kinds[i] != kinds[j]]
        alike = [(i, j) for i, j in pairs if kinds[i] == kinds[j]]
        for place in PLACES:
            yield (
                f"{place}: correlation of unlike",
                fmean(correlation(told[i][place], told[j][place]) for i, j in unlike),
            )
            yield f"{place}: correlation of alike", fmean(correlation(told[i][place], told[j][place]) for i, j in alike)
        own = fmean(correlation(tested[i]["s_out"], tested[j]["s_out"]) for i, j in alike)
        yield "s_out as it is: correlation of alike, feature by feature", own
        yield "own s_in from another's", fmean(explained(up[i](told[j]["s_in"]), tested[i]["s_in"]) for i, j in unlike)

        def through(i: int, j: int, down_map: LinearMap) -> Tensor:
            s_in = up[i](told[j]["s_in"]).unflatten(1, shapes[i])
            return down_map(torch.cat([split(nets[i]).intermediate(part) for part in s_in.split(TOGETHER)]))

        yield (
            "another's s_out by the layers, from its s_in",
            fmean(explained(through(i, j, down[i]["s_out"]), told[j]["s_out"]) for i, j in unlike),
        )
        yield (
            "another's s_out by the own s_out",
            fmean(explained(told[i]["s_out"], told[j]["s_out"]) for i, j in unlike),
        )


def lines(folder: Path) -> Iterator[str]:
    """What is printed of a run."""
    return (f"{name}: {value:.2f}" for name, value in measured(folder))


if __name__ == "__main__":
    print_each(__doc__.splitlines()[0], lines)
