"""What a curious server learns of its clients, method by method, in one setting.

    OMP_NUM_THREADS=1 python benchmarks/attacks.py [--only 'fed*']

Every method is run on the digits of scikit-learn with five clients, one network and ten rounds, and attacked as
`potluck attack` does. FedIN is run with its noise and with its privacy, too, and drawn. What was attacked before is not
run again unless it is named; lines go to `benchmarks/results/attacks.csv` at once, the page is
`benchmarks/results/attacks.md`, and the picture `docs/images/inversion.png`.
"""

import argparse
import csv
import os
import platform
import time
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import torch

import potluck
from potluck.analysis.plots.curves import save
from potluck.analysis.plots.images import draw_images
from potluck.api.attack import Attack
from potluck.core.ground.errors import PotluckError
from potluck.methods import list_methods

ROOT = Path(__file__).parents[1]
CSV, PAGE, PICTURE = (
    ROOT / "benchmarks/results/attacks.csv",
    ROOT / "benchmarks/results/attacks.md",
    ROOT / "docs/images/inversion.png",
)
SETTING: dict[str, Any] = {
    "clients": 5,
    "models": [{"name": "cnn3", "width": 8}],
    "partition": {"name": "dirichlet", "alpha": 0.5},
    "public": "holdout",
    "rounds": 10,
    "seed": 0,
}
SETTINGS = {"federation.public_labels": True, "run.workers": 1}
TRAINED = {"method.training.lr": 0.01}
CANARIES, IMAGES, DRAWN = 1024, 20, 10
VARIANTS: dict[str, tuple[str, Mapping[str, Any], str]] = {
    "fedin, noise 0.8": ("fedin", {"method.noise": 0.8}, "with noise of 0.8 sigma"),
    "fedin, private": (
        "fedin",
        {"method.privacy": {"clip": 1.0, "epsilon": 4.0, "delta": 1e-5}},
        "private, epsilon 4 a release",
    ),
}
COLUMNS = (
    *("method", "classes from", "f1", "f1 of all", "distance", "distance of equal", "correlation"),
    *("members by", "auc", "auc low", "auc high"),
    *("features by", "ssim", "blind ssim", "mse", "psnr", "lower epsilon", "upper epsilon", "seconds", "remark"),
)
Line = dict[str, str]


def rows() -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """The name of each row, its method and its settings."""
    for name in list_methods():
        yield name, name, {}
        yield from ((row, method, settings) for row, (method, settings, _) in VARIANTS.items() if method == name)


def attacked(method: str, settings: Mapping[str, Any]) -> Attack:
    """A run and an attack on it."""
    known = {**SETTINGS, **settings}
    try:
        run = potluck.run(method, **SETTING, settings={**known, **TRAINED}, progress=False)
    except potluck.ConfigError as problem:
        if "method.training" not in str(problem):
            raise
        run = potluck.run(method, **SETTING, settings=known, progress=False)
    return run.attack(images=IMAGES, canaries=CANARIES)


def line_of(name: str, found: Attack, seconds: float) -> Line:
    """The means over clients and images, as text."""
    frames, line = found.frames, dict.fromkeys(COLUMNS, "")
    line |= {"method": name, "seconds": f"{seconds:.0f}", "remark": " ".join(found.found.remarks)}
    if "labels" in frames:
        table = frames["labels"]
        line["classes from"] = " and ".join(dict.fromkeys(table["from"]))
        for column in ("f1", "f1_of_all", "distance", "distance_of_equal", "correlation"):
            line[column.replace("_", " ")] = f"{table[column].astype(float).mean():.3f}"
    if "membership" in frames:
        table = frames["membership"]
        line["members by"] = " and ".join(dict.fromkeys(table["from"]))
        error = np.sqrt((((table["high"] - table["low"]) / 3.92) ** 2).sum()) / len(table)
        mean = table["auc"].mean()
        line |= {"auc": f"{mean:.3f}", "auc low": f"{mean - 1.96 * error:.3f}"}
        line["auc high"] = f"{min(1.0, mean + 1.96 * error):.3f}"
    if "inversion" in frames:
        table = frames["inversion"]
        line["features by"] = " and ".join(dict.fromkeys(table["from"]))
        for column in ("ssim", "blind_ssim", "mse", "psnr"):
            line[column.replace("_", " ")] = f"{table[column].mean():.3f}"
    if "audit" in frames:
        (row,) = frames["audit"].to_dict("records")
        line |= {"lower epsilon": f"{row['lower_epsilon']:.2f}", "upper epsilon": f"{row['upper_epsilon']:.2f}"}
    return line


def lines() -> dict[str, Line]:
    """What is known so far, by the row's name."""
    if not CSV.is_file():
        return {}
    with CSV.open(newline="", encoding="utf-8") as file:
        return {line["method"]: line for line in csv.DictReader(file)}


def write(known: Mapping[str, Line]) -> None:
    """All lines in the order of the rows."""
    order = [name for name, *_ in rows() if name in known]
    with CSV.open("w", newline="", encoding="utf-8") as file:
        out = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        out.writeheader()
        out.writerows(known[name] for name in order)
    PAGE.write_text(page([known[name] for name in order]), encoding="utf-8")


def page(known: list[Line]) -> str:
    """The page's text."""
    measured = [line for line in known if line["classes from"] or line["members by"] or line["features by"]]
    rest = [line for line in known if line not in measured]
    table = ["| method | classes told by | F1 | off by | members by | AUC | features by | SSIM |", "|---" * 8 + "|"]
    for line in measured:
        cells = (
            *(line["method"], line["classes from"], _two(line["f1"]), _two(line["distance"]), line["members by"]),
            *(_area(line), line["features by"], _two(line["ssim"])),
        )
        table.append(f"| {' | '.join(cell or '–' for cell in cells)} |")
    one = measured[0] if measured else dict.fromkeys(COLUMNS, "")
    audits = [line for line in measured if line["upper epsilon"]]
    said = [
        f"- *{line['method']}*: epsilon {line['upper epsilon']} is stated for one release, and the attack shows at"
        f" least {line['lower epsilon']} (95 %, {CANARIES} canaries)."
        for line in audits
    ]
    left = [f"- *{line['method']}*: {line['remark']}" for line in rest]
    blind = next((line["blind ssim"] for line in measured if line["blind ssim"]), "")
    return HEAD.format(
        machine=f"{platform.machine()}, {os.cpu_count()} cores; torch {torch.__version__}",
        all=_two(one["f1 of all"]),
        equal=_two(one["distance of equal"]),
        blind=_two(blind),
        images=IMAGES,
        table="\n".join(table),
        audits="\n".join(said) or "None.",
        rest="\n".join(left) or "None.",
    )


def _two(number: str) -> str:
    return f"{float(number):.2f}" if number else ""


def _area(line: Line) -> str:
    value, low, high = (_two(line[name]) for name in ("auc", "auc low", "auc high"))
    return f"{value} ({low} to {high})" if value else ""


HEAD = """# What a curious server learns

    OMP_NUM_THREADS=1 python benchmarks/attacks.py

Digits, five clients with one `cnn3` of width 8, Dirichlet 0.5, ten rounds, seed 0; then one more round, which is
attacked ([guide](../../docs/guides/attack.md)). {machine}. All numbers: [attacks.csv](attacks.csv).

- *F1*: of the classes that a client has, mean over clients. Taking all classes gives {all}.
- *off by*: total variation between guessed and true shares of classes, mean over clients. Equal shares are off by
  {equal}.
- *AUC*: of telling training examples from own test parts, mean over clients, with its interval of 95 % confidence;
  0.5 tells nothing.
- *SSIM*: of {images} images that were made of features, to the clients' examples. The mean image of a client has
  {blind}.

The round stands alone: a server that has listened from the first round on knows more. It knows each client's control in
SCAFFOLD, without which a change of weights says little of classes, and the examples of centralised training, which are
its first reply and no other.

{table}

## Private releases

{audits}

## Not attacked

{rest}
"""


def draw(images: Mapping[str, np.ndarray]) -> None:
    """The picture of the docs."""
    save(draw_images(images), PICTURE)


def main() -> None:
    """Attack, write, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="rows to attack again, such as 'fedin*'; by default those that are missing")
    parser.add_argument("--page", action="store_true", help="write the page from the lines that are there, and end")
    options = parser.parse_args()
    known, images = lines(), dict[str, np.ndarray]()
    if options.page:
        write(known)
        return
    for name, method, settings in rows():
        if fnmatch(name, options.only) if options.only else name not in known:
            began = time.process_time()
            try:
                found = attacked(method, settings)
                known[name] = line_of(name, found, time.process_time() - began)
                images |= pictures(name, found)
            except PotluckError as problem:
                known[name] = {**dict.fromkeys(COLUMNS, ""), "method": name, "remark": str(problem)}
            write(known)
            print(name, known[name]["seconds"], known[name]["remark"], flush=True)
    if len(images) == 2 * (1 + len(VARIANTS)):
        draw(images)


def pictures(name: str, found: Attack) -> dict[str, np.ndarray]:
    """The rows of the picture that a run of FedIN gives."""
    titles = {"fedin": "as they are", **{row: words for row, (*_, words) in VARIANTS.items()}}
    if name not in titles:
        return {}
    similar = found.frames["inversion"]["ssim"].mean()
    true, made = found.found.images.values()
    return {
        f"examples, whose features are sent {titles[name]}": true[:DRAWN],
        f"what was made of features {titles[name]}: SSIM {similar:.2f}": made[:DRAWN],
    }


if __name__ == "__main__":
    main()
