"""Whether any network can be split: tries those of four libraries and some as users write them, and writes the table.

    make zoo
    .venv-zoo/bin/python benchmarks/any_module/run.py [--htfllib CHECKOUT] [--only NAME ...] [--show]

The first makes an environment with timm and transformers, and calls the second there. No net has weights from anywhere:
all are drawn. CHECKOUT is a copy of https://github.com/TsingZ0/HtFLlib, which is read and not changed; without it,
HtFLlib's nets and torchvision's are left out. What a net gave goes to results/any_module.json when it is done; --only
tries these nets or groups again, --show none. All write results/any_module.md; what is not tried again stays as it was.
"""

import argparse
import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import own
import torch
from torchvision_ops import stand_in
from trying import Case, Row, tried

sys.path.insert(0, str(Path(__file__).parents[1] / "speed"))
from machine import describe

RESULTS = Path(__file__).parents[1] / "results"
SLOW = 5.0  # seconds

PAGE = """\
# Any network, split

Each network is looked at once and cut by its dataflow into extractor, intermediate layers and classifier, as `fl.split`
does it for methods. *Places*: where all flows through one tensor, with a row for each example; *stages*: those with a
matrix of weights on both sides. *Extractor* and *head* say at which the extractor ends and what the head reads, and the
shape of one example there: `conv` is what that module puts out, `<conv` what it reads, `conv#2` its second call. *Head
alone*: whether the head is one module that a method may take out, average or replace. The last columns are the largest
absolute differences between the network as a whole and its parts one after the other, on five examples: in training
mode, from the same seed, of the outputs, of all gradients and of all buffers afterwards; and of the outputs in
evaluation mode, where the network is also taken up from the end of each stage. 0 is bit for bit. All weights were moved
after the plan was made, since it has to hold for any. *Seconds*: to make the plan, once for an architecture.

    make zoo

or, with the nets of [HtFLlib](https://github.com/TsingZ0/HtFLlib), `.venv-zoo/bin/python benchmarks/any_module/run.py
--htfllib CHECKOUT`. Nothing is downloaded; weights are drawn.

{about}.

"""
HEAD = """\
| net | places, stages | extractor | head reads | head alone | training | gradients | buffers | evaluation | seconds |
|---|--:|---|---|---|--:|--:|--:|--:|--:|
"""


def cases(checkout: Path | None) -> Iterator[Case]:
    """All nets; those of a library that is not there are left out with a word."""
    yield from own.cases()
    try:
        import zoo_hf
        import zoo_timm
    except ImportError as error:
        print(f"{error}: left out; `make zoo` installs it")
    else:
        yield from zoo_hf.cases()
        yield from zoo_timm.cases()
    if checkout is None:
        print("HtFLlib and torchvision: left out; --htfllib CHECKOUT tries them")
    else:
        import zoo_htfllib

        yield from zoo_htfllib.cases(checkout)


def versions() -> dict[str, str]:
    """Of what is installed of the libraries."""
    found = dict[str, str]()
    for name in ("torch", "timm", "transformers", "torchvision"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def place(one: tuple[str, list[int]]) -> str:
    """A place and its shape."""
    name, shape = one
    return f"`{name}` {' x '.join(map(str, shape))}"


def shown(gap: float | str) -> str:
    """A difference."""
    return gap if isinstance(gap, str) else f"{gap:.0e}" if gap else "0"


def said(reason: str) -> str:
    """A reason inside a table: with nothing that Markdown reads."""
    return re.sub(r"([<|*_\[\]])", r"\\\1", reason)


def line(row: Row) -> str:
    """A net's row."""
    if row.outcome != "split":
        return f"| {row.name} | | {row.outcome}: {said(row.reason)} | | | | | | | {row.seconds:.1f} |"
    gaps = [shown(row.gaps[name]) for name in ("training", "gradients", "buffers", "evaluation")]
    if not row.draws:
        gaps[0] += ", other draws"
    alone = said(f"no: {row.head}") if row.head else "yes"
    cells = [f"{row.places}, {row.stages}", place(row.ends), place(row.reads), alone, *gaps, f"{row.seconds:.1f}"]
    return f"| {row.name} | {' | '.join(cells)} |"


def page(found: dict[str, Any]) -> str:
    """The results as Markdown."""
    rows = [Row(**{field.name: one[field.name] for field in fields(Row)}) for one in found["rows"]]
    machine, commits = found["machine"], sorted({one["commit"] for one in found["rows"]})
    libraries = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    about = (
        f"{machine['cpu']}, one thread beside other work (load {machine['load_average_before'][0]:.1f} on"
        f" {machine['cores']} cores), {machine['system']}, Python {machine['python']}, {libraries}; commit"
        f" {', '.join(commits)}"
    )
    text = (
        PAGE.format(about=about) + "| | nets | split | of these head alone | all differences 0 | refused | failed |\n"
    )
    text += "|---|--:|--:|--:|--:|--:|--:|\n"
    groups = {row.group: [one for one in rows if one.group == row.group] for row in rows}
    for group, mine in {**groups, "all": rows}.items():
        counts, split = Counter(row.outcome for row in mine), [row for row in mine if row.outcome == "split"]
        alone, exact = sum(not row.head for row in split), sum(not any(row.gaps.values()) for row in split)
        cells = (len(mine), counts["split"], alone, exact, counts["refused"], counts["failed"])
        text += f"| {group} | {' | '.join(map(str, cells))} |\n"
    if slow := [f"{row.name} {row.seconds:.1f}" for row in rows if row.seconds > SLOW]:
        text += f"\nAbove {SLOW:g} seconds: {', '.join(slow)}.\n"
    for group, mine in groups.items():
        text += f"\n## {group[0].upper()}{group[1:]}\n\n{HEAD}" + "\n".join(map(line, mine)) + "\n"
    return text


def asked(
    parser: argparse.ArgumentParser, name: str, only: str, entry: str
) -> tuple[argparse.Namespace, Path, dict[str, Any]]:
    """What the caller asks for, the file of what was observed, and what is in it.

    Args:
        parser: has the options of this table alone.
        name: of the files with the results, without their endings.
        only: what `--only` takes.
        entry: under which the file has what was observed.
    """
    parser.add_argument("--only", nargs="+", metavar="NAME", help=only)
    parser.add_argument("--show", action="store_true", help="try nothing, and write the table of what was observed")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"folder of {name}.json and {name}.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of the libraries, about arguments that they will no longer take
    stand_in()
    store = options.results / f"{name}.json"
    return options, store, json.loads(store.read_text()) if store.exists() else {entry: []}


def main() -> None:
    """Try, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--htfllib", type=Path, metavar="CHECKOUT", help="a copy of HtFLlib, whose nets to try, too")
    options, store, found = asked(parser, "any_module", "these nets or groups alone", "rows")
    machine = describe()
    if not options.show:
        found |= {"machine": machine, "versions": versions()}
        tried(next(own.cases()))  # torch imports much when it is first used
        known = {(one["group"], one["name"]): one for one in found["rows"]}
        for case in cases(options.htfllib):
            if options.only and not {case.name, case.group} & set(options.only):
                continue
            row = tried(case)
            known[case.group, case.name] = {**asdict(row), "commit": machine["commit"]}
            found["rows"] = list(known.values())
            store.write_text(json.dumps(found, indent=1) + "\n")
            print(f"{case.name}: {row.outcome} {row.reason} ({row.seconds:.1f} s)", flush=True)
    text = page(found)
    (options.results / "any_module.md").write_text(text)
    print(text[text.index("| | nets") : text.index("\n## ")].strip())


if __name__ == "__main__":
    main()
