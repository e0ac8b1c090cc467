"""What a fifth of liars does to methods under each rule, in one setting.

    OMP_NUM_THREADS=1 python benchmarks/robust.py [--methods fedavg fedproto]

Ten clients with the digits of scikit-learn, one network, fifteen rounds. Two of them lie (`run.attackers`). The number
is the mean accuracy of the other eight on their own test parts after the last round, beside the same run without liars;
of "backdoor" also the share of the common test images with the square, of other classes, that they take for its class.
What is known is not run again: lines go to `benchmarks/results/robust.csv` at once, the page is
`benchmarks/results/robust.md`.

FD and DS-FL refuse what is no probability, and that is what `sign_flip`, `noise`, `free_rider` and `scaled` make of it:
there these four are two clients that never reply. `alie` is made of the liars' replies of one shape; where the two have
different classes, as the replies of FedProto and FD show, each tells the truth. Cells were run on processors of several
kinds, whose last bits differ: that alone may move one by a point or two.
"""

import argparse
import csv
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

import torch

from potluck.attackers.data import with_square
from potluck.attackers.settings import Attackers, AttackKind
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.running.run import Run
from potluck.experiment.settings.resolve import resolve
from potluck.parts.means import MeanRule

ROOT = Path(__file__).parents[1]
CSV, PAGE = ROOT / "benchmarks/results/robust.csv", ROOT / "benchmarks/results/robust.md"
METHODS: Mapping[str, str] = {
    "fedavg": "sharing.combine",
    "fedprox": "sharing.combine",
    "scaffold": "sharing.combine",
    "fedin": "sharing.combine",
    "lgfedavg": "combine",
    "fml": "combine",
    "fedproto": "combine",
    "fd": "combine",
    "fedmd": "combine",
    "dsfl": "combine",
}
"""Ten methods, and where each has its rule."""
RULES: tuple[str, ...] = get_args(MeanRule)
KINDS: tuple[str, ...] = ("none", *get_args(AttackKind))
SHARE, TARGET = 0.2, 0
Line = dict[str, str]


def tree(method: str, rule: str, kind: str) -> dict[str, Any]:
    """The configuration of a cell."""
    federation = {
        "dataset": "digits",
        "clients": 10,
        "models": [{"name": "cnn2", "width": 8}],
        "partition": {"name": "dirichlet", "alpha": 1.0},
        "public": "holdout",
    }
    run: dict[str, Any] = {
        "rounds": 15,
        "evaluate_every": 15,
        "common_test": False,
        "executor": "stacked",
        "workers": 1,
    }
    if kind != "none":
        run |= {"attackers": {"kind": kind, "share": SHARE}, "tolerate_failures": True}
    hyper: dict[str, Any] = {"name": method, "training": {"optimizer": "sgd", "lr": 0.1, "epochs": 3}}
    node = hyper
    for key in METHODS[method].split("."):
        node = node.setdefault(key, {})
    node["rule"] = rule
    return {"federation": federation, "method": hyper, "run": run}


def cell(method: str, rule: str, kind: str) -> Line:
    """Accuracy of the honest clients, and of a backdoor how often it opens."""
    experiment = resolve(tree(method, rule, kind))
    assembly = assemble(experiment)
    run = Run(experiment.method, assembly.federation, experiment.run)
    run.load()
    result = run.run()
    liars = Attackers(share=SHARE).among(range(10), experiment.run.seed)
    honest = [score for score in result.evaluation.scores if score.client not in liars]  # without an attack too
    found = {"method": method, "rule": rule, "attack": kind, "opens": ""}
    found["accuracy"] = f"{fmean(score.accuracy_personal or 0.0 for score in honest):.4f}"
    if kind == "backdoor":
        test = assembly.federation.test
        assert test is not None
        others = test.take((test.labels != TARGET).nonzero().flatten())
        marked = with_square(others, Attackers("backdoor", target=TARGET))
        trained = run.trained()
        opened = [
            float((torch.cat([trained.model(score.client)(b.inputs) for b in marked.batches(256)]).argmax(1) == TARGET)
                  .float().mean())
            for score in honest
        ]  # fmt: skip
        found["opens"] = f"{fmean(opened):.4f}"
    return found


def known() -> dict[tuple[str, str, str], Line]:
    """What was run so far."""
    if not CSV.is_file():
        return {}
    with CSV.open(newline="", encoding="utf-8") as file:
        return {(line["method"], line["rule"], line["attack"]): line for line in csv.DictReader(file)}


def cells(methods: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """All of them."""
    return ((method, rule, kind) for method in methods for rule in RULES for kind in KINDS)


def page(lines: Mapping[tuple[str, str, str], Line]) -> str:
    """The table, a row for each method and rule."""
    _, _, told = (__doc__ or "").strip().split("\n\n", 2)
    shown = ["# What a fifth of liars does", "", *told.splitlines(), ""]
    if (left := len([place for place in cells(list(METHODS)) if place not in lines])) > 0:
        shown += [f"Of {len(lines) + left} cells {left} are not measured yet.", ""]
    shown.append(f"torch {torch.__version__}, {platform.processor() or platform.machine()}, {os.cpu_count()} cores.")
    shown += ["", f"| method | rule | {' | '.join(KINDS)} | backdoor opens |", f"|---|---|{'--:|' * (len(KINDS) + 1)}"]
    for method in METHODS:
        for rule in RULES:
            row = [lines.get((method, rule, kind)) for kind in KINDS]
            if not any(row):
                continue
            texts = ["" if line is None else f"{100 * float(line['accuracy']):.1f}" for line in row]
            opens = lines.get((method, rule, "backdoor"), {}).get("opens", "")
            last = f"{100 * float(opens):.0f} %" if opens else ""
            shown.append(f"| {method} | {rule} | {' | '.join(texts)} | {last} |")
    return "\n".join(shown) + "\n"


def main() -> None:
    """Run what is not known, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    lines = known()
    for place in cells(parser.parse_args().methods):
        if place not in lines:
            lines[place] = cell(*place)
            print(lines[place], flush=True)
            with CSV.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, ["method", "rule", "attack", "accuracy", "opens"])
                writer.writeheader()
                writer.writerows(lines.values())
    PAGE.write_text(page(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
