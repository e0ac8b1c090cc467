"""Whether every option of every method does what it says: tries them on toy federations, and writes the table.

    python benchmarks/options/run.py [--only METHOD ...] [--show]

Three clients, three rounds, one core. Options of local training are compared with a second reading of `Fit`
(reference.py), which takes the place of the engine's training while all else of a method runs as it is; where that
cannot tell, runs are compared that must come to the same (arithmetic.py). Of each method's own options (own.py) every
other word and a few other numbers have to change the clients' models or the global one, or be refused before anything
is trained, or stand among the reasons (reasons.py). Anything else is a finding, and the command then exits with 1.

What was observed goes to results/options.json, each method's when it is done; --only tries those methods again, --show
none, so that a reason can be added without trying anything again. Both write results/options.md.
"""

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from arithmetic import hold_properties, try_trainings
from own import try_own
from reasons import reason_for
from trying import Trials, Tried

from potluck.methods import list_methods

sys.path.insert(0, str(Path(__file__).parents[1] / "speed"))
from machine import describe

RESULTS = Path(__file__).parents[1] / "results"

PAGE = """\
# What every option does

Every switch is a claim. Each method's options are tried on a toy federation: three clients with unequally many
examples, of which none has all classes, with two architectures unless a method wants one, for three rounds. *Changed*:
the clients' models or the global one differ bit for bit from those of the run without the option. *Like the reference*:
they, and the method's state, are those of the same run with the training of `Fit` carried out by a second, independent
reading of its documentation, with torch's own optimisers, schedules and clipping; the largest difference of a number is
given, in double precision and relative to numbers above 1. *Refused*: in one line before anything was trained. *No
effect*: bit for bit the run without it, for a reason that is given below. *Holds*: runs that must come to the same do,
such as with a schedule and with each round's rate given by hand, with `persist` and plain SGD and without it, with any
rule of combination and three clients that are copies of one another, in bf16 and in single precision. A *finding* is
anything else.

    python benchmarks/options/run.py

{machine}.

| method | tried | like the reference | largest difference | changed | refused | no effect | holds | findings |
|---|--:|--:|--:|--:|--:|--:|--:|--:|
"""


def judged(method: str, tried: Tried) -> tuple[str, str]:
    """The column of a trial, and what is to be said of it."""
    if tried.outcome in ("changed", "holds", "refused"):
        return tried.outcome, tried.text
    reason = None if tried.outcome == "failed" else reason_for(method, tried.option)
    if reason is not None:
        return ("no effect" if tried.outcome == "same" else "holds"), reason
    return "finding", "no effect: look" if tried.outcome == "same" else f"{tried.outcome} {tried.text}"


def row(method: str, trials: list[Tried]) -> str:
    """A method's row."""
    counts = Counter(judged(method, tried)[0] for tried in trials)
    gaps = [tried.gap for tried in trials if tried.gap is not None]
    largest = f"{max(gaps):.0e}" if gaps else ""
    columns = [
        len(trials),
        len(gaps),
        largest,
        *(counts[name] for name in ("changed", "refused", "no effect", "holds")),
    ]
    return f"| {method} | {' | '.join(map(str, columns))} | {counts['finding'] or ''} |"


def page(found: dict[str, Any]) -> str:
    """The results as Markdown."""
    machine, commits = found["machine"], sorted({entry["commit"] for entry in found["methods"].values()})
    about = (
        f"{machine['cpu']}, {machine['system']}, Python {machine['python']}, torch {torch.__version__}; commit"
        f" {', '.join(commits)}"
    )
    trials = {name: [Tried(**one) for one in entry["tried"]] for name, entry in sorted(found["methods"].items())}
    said: dict[str, dict[str, list[str]]] = {"finding": {}, "no effect": {}, "holds": {}, "refused": {}}
    for name, tried in ((name, one) for name, several in trials.items() for one in several):
        kind, text = judged(name, tried)
        if text and kind in said:
            said[kind].setdefault(text, []).append(f"{name}: `{tried.option}`")
    lines = [row(name, several) for name, several in trials.items()]
    lines += ["", f"## Findings ({sum(map(len, said['finding'].values()))})", ""]
    lines += sorted(f"- {which}: {text}" for text, several in said["finding"].items() for which in several)
    for kind, title in (("no effect", "Without effect, and why"), ("holds", "Different, and why it may be")):
        lines += ["", f"## {title}", ""]
        lines += [f"- {text}: {'; '.join(several)}." for text, several in said[kind].items()]
    lines += ["", "## Refused", ""]
    lines += [f"- {'; '.join(several)}: {text}" for text, several in said["refused"].items()]
    return PAGE.format(machine=about) + "\n".join(lines) + "\n"


def tried(method: str) -> list[Tried]:
    """All trials of a method."""
    trials = Trials(method)
    for part in (try_own, try_trainings, hold_properties):
        part(trials)
    return trials.tried


def main() -> None:
    """Try, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="METHOD", choices=list_methods(), help="these methods alone")
    parser.add_argument("--show", action="store_true", help="try nothing, and write the table of what was observed")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of options.json and options.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    store, machine = options.results / "options.json", describe()
    known = json.loads(store.read_text()) if store.exists() else {"methods": {}}
    found: dict[str, Any] = known if options.show else {**known, "machine": machine}
    for name in [] if options.show else options.only or list_methods():
        started = time.process_time()
        found["methods"][name] = {"commit": machine["commit"], "tried": [asdict(one) for one in tried(name)]}
        store.write_text(json.dumps(found, indent=1))
        print(f"{name}: {time.process_time() - started:.0f} s", flush=True)
    text = page(found)
    (options.results / "options.md").write_text(text)
    print(text[text.index("## Findings") : text.index("## Without effect")].strip())
    sys.exit(int("## Findings (0)" not in text))


if __name__ == "__main__":
    main()
