"""What a user of Potluck and of fluke does, step by step: lines written, commands typed, seconds, and what came out.

    python benchmarks/fluke_steps.py POTLUCK FLUKE [--repeats 3] [--to RESULTS.json] [--only STEP ...]

POTLUCK and FLUKE are the `bin` folders of two environments. Both train the same network on the same digits: ten
clients, Dirichlet 0.5, one local epoch of SGD, ten rounds. The files that a user writes are in `fluke_steps/`. The two
take turns, step by step; every repeat has a folder of its own. Seconds are of all commands of a step together.
"""

import argparse
import ctypes
import difflib
import json
import os
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

FILES = Path(__file__).with_name("fluke_steps")
SIDES = ("potluck", "fluke")
TEMPLATE = Path(__file__).parents[1] / "src/potluck/cli/templates/method.py"  # what `potluck new method` copies
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of Linux


@dataclass(frozen=True)
class Side:
    """How one of the two takes a step.

    Attributes:
        commands: of a shell, in the folder that holds the user's files and what earlier steps left.
        files: those that this step adds or changes, whose lines count, each with the file that it began as, if any.
        exits: what the last command should return.
    """

    commands: tuple[str, ...] = ()
    files: tuple[tuple[str, str | None], ...] = ()
    exits: int = 0

    def lines(self, name: str) -> int:
        """Lines that a user writes or changes, without empty ones."""
        return sum(_written(FILES / name / file, FILES / name / start if start else None) for file, start in self.files)


@dataclass(frozen=True)
class Step:
    """One thing that a user wants, and how it is done in both; None where one of them cannot."""

    name: str
    potluck: Side | None
    fluke: Side | None


@dataclass(frozen=True)
class Taken:
    """A step, who took it, seconds by the clock and of the processors, exit status, the end of the output."""

    step: str
    side: str
    wall: float
    processor: float
    status: int
    output: str


KILLED = "{command} >/dev/null 2>&1 & pid=$!; while [ ! -e {sign} ]; do sleep 0.05; done; kill -9 $pid; wait $pid; true"
STEPS = (
    Step(
        "first run, own data and network",
        Side(("potluck run exp.toml",), (("exp.toml", None), ("digits.py", None), ("nets.py", None))),
        Side(
            ("fluke federation exp.yaml fedavg.yaml",),
            (("exp.yaml", None), ("fedavg.yaml", None), ("digits.py", None), ("nets.py", None)),
        ),
    ),
    Step(
        "misspelt hyper-parameter",
        Side(("potluck run wrong.toml",), (), 2),
        Side(("fluke federation exp.yaml wrong.yaml",), (), 1),
    ),
    Step(
        "misspelt key",
        Side(("potluck run exp.toml run.round=10",), (), 2),
        Side(("fluke federation wrong_exp.yaml fedavg.yaml",), (), 1),
    ),
    Step(
        "own method",
        Side(("potluck run exp.toml method.name=prox.py",), (("prox.py", str(TEMPLATE)),)),
        Side(("fluke federation exp.yaml prox.yaml",), (("prox.py", None), ("prox.yaml", "fedavg.yaml"))),
    ),
    Step(
        "three methods, three seeds",
        Side(("potluck compare fedavg fedprox scaffold --on exp.toml --seeds 3",)),
        Side(
            ("fluke sweep seeds.yaml fedavg.yaml fedprox.yaml scaffold.yaml",),
            (("seeds.yaml", "exp.yaml"), ("fedprox.yaml", "fedavg.yaml"), ("scaffold.yaml", "fedavg.yaml")),
        ),
    ),
    Step(
        "tracking",
        Side(("potluck run exp.toml run.track=tensorboard run.seed=5", "ls -R runs | grep tfevents")),
        Side(("fluke federation board.yaml fedavg.yaml", "ls -R board | grep tfevents"), (("board.yaml", "exp.yaml"),)),
    ),
    Step("report", Side(("potluck report runs",)), None),
    Step(
        "networks that differ",
        Side(("potluck run exp.toml \"federation.models=['mlp2', 'mlp3', 'mlp4']\"",)),
        None,
    ),
    Step(
        "resumed after a kill",
        Side(
            (
                KILLED.format(command="potluck run exp.toml run.seed=7", sign="runs/*-s7-*/rounds.jsonl"),
                "potluck run --resume runs/*-s7-* | grep digest",
            ),
        ),
        Side(
            (
                KILLED.format(command="fluke federation saved.yaml fedavg.yaml", sign="saved/run_*/r0003_client_9.pth"),
                "fluke federation saved.yaml fedavg.yaml --resume=$(echo saved/run_*)",
            ),
            (("saved.yaml", "exp.yaml"),),
        ),
    ),
)


def _written(file: Path, start: Path | None) -> int:
    """The lines of a file that are not in the one that it began as."""
    lines = file.read_text().splitlines()
    before = start.read_text().replace("TemplateName", file.stem.capitalize()).splitlines() if start else []
    added = (line[2:] for line in difflib.ndiff(before, lines) if line.startswith("+ "))
    return sum(bool(line.strip()) for line in added)


def taken(step: Step, name: str, binaries: Path, folder: Path) -> Taken:
    """The step, taken in a folder by the commands of an environment, with one thread."""
    side: Side = getattr(step, name)
    path = f"{binaries}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    known = _children()
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    outputs: list[str] = []
    status = 0
    for command in side.commands:
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        status = done.returncode
        outputs += [f"$ {command}", done.stdout, done.stderr]
    wall = time.perf_counter() - begun
    _wait_for_all_but(known)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Taken(step.name, name, wall, processor, status, "\n".join(outputs)[-4000:])


def _adopt() -> None:
    """Become the parent of processes whose own has ended, so that their seconds count too."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def _children() -> set[int]:
    """The processes whose parent this one is."""
    lists = Path("/proc/self/task").glob("*/children")
    return {int(number) for listed in lists for number in listed.read_text().split()}


def _wait_for_all_but(known: set[int]) -> None:
    while new := _children() - known:
        for number in new:
            with suppress(ChildProcessError):
                os.waitpid(number, 0)


def table(found: Sequence[Taken]) -> str:
    """Markdown: a row a step, medians of the seconds over repeats."""
    rows = ["| step | | lines | commands | seconds | processor seconds | exit |", "|---|---|---|---|---|---|---|"]
    for step in STEPS:
        for name in SIDES:
            side: Side | None = getattr(step, name)
            times = [one for one in found if (one.step, one.side) == (step.name, name)]
            if side is None or not times:
                rows.append(f"| {step.name} | {name} | {'–' if side is None else side.lines(name)} | | | | |")
                continue
            wall, processor = median(one.wall for one in times), median(one.processor for one in times)
            exits = ", ".join(sorted({str(one.status) for one in times}))
            row = (step.name, name, side.lines(name), len(side.commands), f"{wall:.1f}", f"{processor:.1f}", exits)
            rows.append(f"| {' | '.join(map(str, row))} |")
    return "\n".join(rows)


def main() -> None:
    """Take all steps, alternating, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("potluck", type=Path)
    parser.add_argument("fluke", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--to", type=Path)
    parser.add_argument("--only", nargs="*", help="names of steps")
    given = parser.parse_args()
    _adopt()
    found: list[Taken] = []
    for repeat in range(given.repeats):
        with tempfile.TemporaryDirectory() as root:
            folders = {name: Path(root) / name for name in SIDES}
            for name, folder in folders.items():
                shutil.copytree(FILES / name, folder)
            for step in STEPS:
                for name in SIDES if repeat % 2 == 0 else reversed(SIDES):
                    if getattr(step, name) and (not given.only or step.name in given.only):
                        found.append(taken(step, name, getattr(given, name).absolute(), folders[name]))
                        if given.to:
                            given.to.write_text(json.dumps([asdict(one) for one in found], indent=1))
                        print(f"{step.name}, {name}: {found[-1].wall:.1f} s, exit {found[-1].status}", flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
