"""What is left of runs that are killed: of all methods, on all executors, at random moments and at every single write.

    python benchmarks/kills.py --kills 1000 --faults fedavg fedin

Plays tiny runs through the command line's own code, each in a process group of its own, and ends them with SIGKILL at
a moment drawn uniformly from the making of its folder to its end: the whole group, or, where there are workers, the
first process alone or one worker alone. `compare` and `sweep`, which begin runs, are killed too, and typed again. With
--faults, each run and each resume is also played once for every step that changes a file, and killed before that step,
or told there that the disk is full. Then the run is resumed, and its digest compared with that of a run that nobody
disturbed.

Every trial is noted when it is done, so that a command that was interrupted goes on where it was.
"""

import argparse
import json
import os
import random
import re
import shlex
import shutil
import signal
import sys
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass
from functools import partial
from importlib import import_module
from itertools import chain, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NoReturn

import torch

from potluck.cli import main as potluck
from potluck.core.ground.errors import CheckpointError
from potluck.engine.disk.files import using
from potluck.engine.executors.workers import import_optimizers
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.folder.folder import run_digest
from potluck.experiment.settings.presets import experiment_for
from potluck.methods import get_method, list_methods
from potluck.records import CONFIG
from potluck.testing.faults import Faulty, Killed
from potluck.testing.worlds import federation_table

sys.path.insert(0, str(Path(__file__).parent / "speed"))
from machine import describe

HERE = Path(__file__).parent
PATIENCE = 120.0  # seconds until a run counts as hanging

Disturbance = Literal["all processes", "the first process", "one worker", "kill at a write", "full disk at a write"]
Outcome = Literal["same bytes", "one line", "before it began", "lost"]
OUTCOMES: tuple[Outcome, ...] = ("same bytes", "one line", "before it began", "lost")

EXECUTORS = {
    "sequential": ["run.executor=sequential"],
    "workers": ["run.executor=workers", "run.workers=2"],
    "stacked": ["run.executor=stacked"],  # on one core
    "stacked, workers": ["run.executor=stacked", "run.workers=2"],
    "ray": ["run.executor=ray", "run.workers=2"],
}
SEVERAL = ("compare", "sweep")  # commands that begin runs, each in a process of its own
WHEREVER = ("sequential", "workers", "stacked", "stacked, workers")  # every method is tried there; elsewhere these:
FEW = ("fedavg", "scaffold", "fedproto", "fedmd")
SETTINGS = ["federation.clients=4", "federation.train_fraction=0.15", "run.common_test=false"]
SMALL = [{"name": "cnn2", "width": 2}, {"name": "cnn3", "width": 2}]
MORE = {
    "fedepth": ["federation.capacities=[1.0,0.75]"],
    "mfedepth": ["federation.capacities=[1.0,0.75]"],
    "fedorion": ["method.noise_batches=1", "method.server_training.epochs=1"],
}


@dataclass(frozen=True)
class Cell:
    """One kind of run: a method and its executor, or the command that begins two runs of it."""

    method: str
    executor: str

    @property
    def arguments(self) -> list[str]:
        """Of `potluck`, but for the sweep's file, the number of rounds and the folder."""
        if self.executor == "sweep":
            return ["sweep"]
        if self.executor == "compare":
            return ["compare", *self.experiment, "--seeds", "2", "--processes", "2"]
        return ["run", *self.experiment, *EXECUTORS[self.executor]]

    @property
    def experiment(self) -> list[str]:
        """The method and its settings."""
        federation = {"models": SMALL} | federation_table(get_method(self.method)())
        keys = [f"federation.{key}={in_toml(value)}" for key, value in federation.items()]
        return [self.method, *SETTINGS, *keys, *MORE.get(self.method, [])]

    @property
    def swept(self) -> str:
        """The file that `potluck sweep` reads."""
        target, *assignments = self.experiment
        return f"{experiment_for(target, assignments).toml()}\n[sweep]\nseeds = 2\n"


def in_toml(value: Any) -> str:
    """A value as it is typed behind a key."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {in_toml(inner)}" for key, inner in value.items()) + "}"
    return "[" + ", ".join(map(in_toml, value)) + "]" if isinstance(value, list) else json.dumps(value)


@dataclass(frozen=True)
class Trial:
    """What was done to a run, and what became of it.

    Attributes:
        when: seconds since the folder was made, or the number of the step that changes a file.
        resumed: whether it was done to the resume of a run that had been killed.
        detail: the line that a user reads; of a loss, what was found.
    """

    method: str
    executor: str
    what: Disturbance
    when: float
    resumed: bool
    outcome: Outcome
    detail: str = ""


@dataclass(frozen=True)
class Ended:
    """How a process ended; its code is negative if by a signal, None if it had to be ended."""

    code: int | None
    said: str

    @property
    def complaint(self) -> str | None:
        """The one line that a user reads; None if there is none, or more."""
        lines = [line for line in self.said.splitlines() if not re.match(r"round \d|potluck: worker process", line)]
        return lines[0] if self.code == 2 and len(lines) == 1 and lines[0].startswith("potluck: ") else None


@dataclass
class Process:
    """The command line in a fork of this process, which has imported everything, in a group of its own."""

    pid: int
    output: Path

    def wait(self, patience: float = PATIENCE) -> Ended:
        """Until it ends by itself."""
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                return Ended(os.waitstatus_to_exitcode(status), self.output.read_text())
            time.sleep(0.002)
        self.end()
        return Ended(None, self.output.read_text())

    def end(self) -> None:
        """Kill whatever is left of the group."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    @property
    def workers(self) -> list[int]:
        """Processes that it has forked."""
        try:
            return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]
        except OSError:
            return []


def start(arguments: Sequence[str], output: Path, cores: int | None = None, disk: Faulty | None = None) -> Process:
    """`potluck` with these arguments."""
    pid = os.fork()
    if pid == 0:
        _be_potluck(arguments, output, cores, disk)
    with suppress(PermissionError, ProcessLookupError):  # whichever of the two is first
        os.setpgid(pid, pid)
    return Process(pid, output)


def steps_of(output: Path) -> Path:
    """Where a process that said this leaves how many steps have changed a file."""
    return output.with_name(f"{output.name}-steps")


def _be_potluck(arguments: Sequence[str], output: Path, cores: int | None, disk: Faulty | None) -> NoReturn:
    """The rest of a forked process's life."""
    code, disk = 70, disk or Faulty()
    try:
        with suppress(PermissionError):
            os.setpgid(0, 0)
        for number in (1, 2):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        if cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
        sys.argv = ["potluck", *arguments]
        with using(disk):
            potluck()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    except Killed:
        os.kill(os.getpid(), signal.SIGKILL)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        steps_of(output).write_text(str(len(disk.steps)))
        os._exit(code)


class Ground:
    """A folder in which one run is played, disturbed and resumed."""

    def __init__(self, place: Path, cell: Cell, rounds: int) -> None:
        self.place = place
        self._cell = cell
        self._rounds = rounds
        self._outputs = 0

    def run(self, disk: Faulty | None = None) -> Process:
        """The run, or the command, from its start."""
        words = [*self._cell.arguments]
        if self._cell.executor == "sweep":
            (file := self.place / "sweep.toml").write_text(self._cell.swept)
            words.append(str(file))
        return self._start([*words, f"run.rounds={self._rounds}", "--to", str(self.place / "runs")], disk)

    def resume(self, disk: Faulty | None = None) -> Process:
        """The run from where it stands; a command of several is typed again."""
        if self._cell.executor in SEVERAL:
            return self.run(disk)
        assert self.folder is not None
        return self._start(["run", "--resume", str(self.folder), f"run.rounds={self._rounds}"], disk)

    @property
    def folder(self) -> Path | None:
        """The run's, if it has made one; of several the first."""
        return next(iter(self.folders), None)

    @property
    def folders(self) -> list[Path]:
        """Those of all runs that have begun."""
        return sorted(self.place.glob("runs/[!.]*"))

    def wait_for_folder(self) -> None:
        """Until the run has made its folder."""
        deadline = time.monotonic() + PATIENCE
        while self.folder is None and time.monotonic() < deadline:
            time.sleep(0.001)

    def digest(self) -> dict[str, str] | None:
        """Of the run, or of each run by its seed; None if there is none."""
        digests: dict[str, str] = {}
        for folder in self.folders:
            # One that was killed before its first round, or before it had a configuration, and begun anew beside it.
            with suppress(CheckpointError, FileNotFoundError):
                seed = tomllib.loads((folder / CONFIG).read_text())["run"]["seed"]
                digests |= {f"{seed} {name}": content for name, content in run_digest(folder).items()}
        return digests or None

    def _start(self, arguments: Sequence[str], disk: Faulty | None) -> Process:
        self._outputs += 1
        cores = 1 if self._cell.executor == "stacked" else None
        return start(arguments, self.place / f"said-{self._outputs}", cores, disk)


@contextmanager
def ground(cell: Cell, rounds: int = 3, like: Path | None = None) -> Iterator[Ground]:
    """A ground that is cleared afterwards; with a copy of another's run, if one is given."""
    with TemporaryDirectory(prefix="kills-", ignore_cleanup_errors=True) as place:
        if like is not None:
            shutil.copytree(like / "runs", Path(place) / "runs")
        yield Ground(Path(place), cell, rounds)


@dataclass(frozen=True)
class Undisturbed:
    """What a kind of run gives, and how long it takes once it has made its folder."""

    digest: dict[str, str]
    seconds: float

    @classmethod
    def of(cls, cell: Cell, rounds: int = 3) -> "Undisturbed":
        """Measured; twice, since the first one reads files that are not in memory."""
        for _ in range(2):
            with ground(cell, rounds) as here:
                process = here.run()
                here.wait_for_folder()
                started = time.monotonic()
                ended = process.wait()
                seconds, digest = time.monotonic() - started, here.digest()
        if ended.code != 0 or digest is None:
            raise SystemExit(f"{cell} does not run: {ended}")
        return cls(digest, seconds)


def kill_at_random(cell: Cell, whole: Undisturbed, draws: random.Random) -> Trial:
    """Disturb one run at a random moment and see what becomes of it."""
    what: Disturbance = "all processes"
    if "workers" in cell.executor:
        what = draws.choice(("all processes", "the first process", "one worker"))
    elif cell.executor in (*SEVERAL, "ray"):  # their other processes are runs, or Ray's
        what = draws.choice(("all processes", "the first process"))
    moment = draws.uniform(0, whole.seconds)
    with ground(cell) as here:
        process = here.run()
        here.wait_for_folder()
        time.sleep(moment)
        workers = process.workers
        if what == "one worker" and workers:
            with suppress(ProcessLookupError):
                os.kill(draws.choice(workers), signal.SIGKILL)
            ended = process.wait()
        else:
            what = "all processes" if what == "one worker" else what
            end = partial(os.kill, process.pid) if what == "the first process" else partial(os.killpg, process.pid)
            with suppress(ProcessLookupError):
                end(signal.SIGKILL)
            ended = process.wait()
        outcome, detail = aftermath(here, ended, whole)
        process.end()
    return Trial(cell.method, cell.executor, what, round(moment, 3), False, outcome, detail)


def aftermath(here: Ground, ended: Ended, whole: Undisturbed) -> tuple[Outcome, str]:
    """What is left of a run that was disturbed, once it was resumed."""
    told = ended.complaint
    if ended.code != 0 and ended.code != -signal.SIGKILL and told is None:
        return "lost", f"ended with {ended.code}: {ended.said[-500:]}"
    if ended.code == 0:
        same = here.digest() == whole.digest
        return ("same bytes", "") if same else ("lost", f"finished with other bytes: {ended.said[-500:]}")
    if here.folder is None:
        return "before it began", told or ""
    again = here.resume().wait()
    if again.code == 0 and here.digest() == whole.digest:
        return ("one line", told) if told else ("same bytes", "")
    computed = any((here.folder / name).exists() for name in ("rounds.jsonl", "checkpoint/last.json"))
    if again.complaint and not computed:
        return "before it began", again.complaint
    return "lost", f"resumed with {again.code} to {'other bytes' if again.code == 0 else ''}: {again.said[-500:]}"


FAULTS: dict[Disturbance, Literal["kill", "full"]] = {"kill at a write": "kill", "full disk at a write": "full"}


def _steps(cell: Cell, begun: Path | None) -> int:
    """How many steps change a file where nothing fails."""
    with ground(cell, 2, begun) as here:
        _disturbed(here, begun, Faulty())
        return int(steps_of(here.place / "said-1").read_text())


def _disturbed(here: Ground, begun: Path | None, disk: Faulty) -> Ended:
    process = here.run(disk) if begun is None else here.resume(disk)
    ended = process.wait()
    process.end()
    return ended


def fault(cell: Cell, whole: Undisturbed, what: Disturbance, step: int, begun: Path | None) -> Trial:
    """Have one step of a run, or of the resume of one that was begun, fail, and see what becomes of it."""
    with ground(cell, 2, begun) as here:
        ended = _disturbed(here, begun, Faulty(step, FAULTS[what]))
        outcome, detail = aftermath(here, ended, whole)
    return Trial(cell.method, cell.executor, what, step, begun is not None, outcome, detail)


def table(trials: Sequence[Trial], machine: dict[str, object], command: str) -> str:
    """The results as Markdown."""
    lines = [
        "# Runs that are killed",
        "",
        "Tiny runs (four clients, three rounds) of every method on every executor of one machine, ended by SIGKILL",
        "at moments drawn uniformly from the making of their folder to their end, then resumed: all processes, the",
        "first process alone, or one worker alone. Ray, and the commands that begin runs of two seeds and are typed",
        f"again, are tried with {', '.join(FEW[:-1])} and {FEW[-1]}. *Same bytes*: records and checkpoints are",
        "those of runs that nobody disturbed. *One line*: the run ended with one line that says why, and resumed to",
        "the same bytes. *Before it began*: nothing had been computed, and a resume says so on one line. *Lost*:",
        "anything else.",
        "",
        f"    {command}",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}, Python {machine['python']}, torch"
        f" {torch.__version__}; commit {machine['commit']}.",
    ]
    at_writes = [trial for trial in trials if trial.what in FAULTS]
    at_random = [trial for trial in trials if trial.what not in FAULTS]
    by_cell = partial(_rows, key=lambda trial: (trial.method, trial.executor))
    if at_random:
        lines += ["", f"## At {len(at_random)} random moments", ""]
        lines += by_cell(at_random, header=("method", "executor", "kills"))
        lines += ["", "By what was killed:", ""]
        lines += _rows(
            at_random, key=lambda trial: (trial.executor, trial.what), header=("executor", "killed", "kills")
        )
    if at_writes:
        lines += ["", "## At every single step that changes a file", "", "Of runs and of resumes, two rounds.", ""]
        key = "method", "executor", "fault", "of", "steps"
        lines += _rows(
            at_writes,
            key=lambda trial: (trial.method, trial.executor, trial.what, "a resume" if trial.resumed else "a run"),
            header=key,
        )
    lost = [trial for trial in trials if trial.outcome == "lost"]
    if lost:
        lines += ["", "## Lost", "", *(f"- `{json.dumps(asdict(trial))}`" for trial in lost)]
    return "\n".join(lines) + "\n"


def _rows(trials: Sequence[Trial], key: Callable[[Trial], tuple[str, ...]], header: Sequence[str]) -> list[str]:
    """One row a group of trials, how many came out how, and their sums."""
    groups: dict[tuple[str, ...], Counter[Outcome]] = {}
    for trial in sorted(trials, key=key):
        groups.setdefault(key(trial), Counter())[trial.outcome] += 1
    total = sum(groups.values(), Counter[Outcome]())
    groups[("all", *[""] * (len(header) - 2))] = total
    rows = [
        [*names, str(found.total()), *(str(found[outcome]) for outcome in OUTCOMES)] for names, found in groups.items()
    ]
    rule = ["---"] * (len(header) - 1) + ["---:"] * (1 + len(OUTCOMES))
    return [f"| {' | '.join(row)} |" for row in ([*header, *OUTCOMES], rule, *rows)]


def warm(cells: Sequence[Cell]) -> None:
    """Import and read here what every fork would import and read."""
    torch.set_num_threads(1)
    import_optimizers()
    import_module("potluck.cli.run")
    for cell in {cell.method: cell for cell in cells}.values():
        target, *assignments = cell.experiment
        assemble(experiment_for(target, assignments))


def remembered(path: Path) -> list[Trial]:
    """Trials of a command that was interrupted; half a line is none, and goes."""
    text = path.read_text() if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    return [Trial(**json.loads(line)) for line in whole.splitlines()]


def _note(trial: Trial, path: Path) -> Trial:
    with path.open("a") as file:
        file.write(json.dumps(asdict(trial)) + "\n")
    if trial.outcome == "lost":
        print(f"\nlost: {trial}", file=sys.stderr)
    return trial


def kills(cells: Sequence[Cell], count: int, begun: int, seed: int) -> Iterator[Trial]:
    """Kills at random moments, one kind of run after the other; from the one of this number."""
    whole: dict[Cell, Undisturbed] = {}
    for number in range(begun, count):
        cell = cells[number % len(cells)]
        if cell not in whole:
            whole[cell] = Undisturbed.of(cell)
        yield kill_at_random(cell, whole[cell], random.Random(f"{seed} {number}"))


def faults(cell: Cell, done: Sequence[Trial]) -> Iterator[Trial]:
    """Every fault at every step of a run of two rounds, and of the resume of one that has one behind it."""
    known = {(trial.method, trial.executor, trial.what, trial.when, trial.resumed) for trial in done}
    with ground(cell, rounds=1) as first:
        first.run().wait()
        steps = [(begun, step) for begun in (None, first.place) for step in range(_steps(cell, begun))]
        wanted = [(what, step, begun) for begun, step in steps for what in FAULTS]
        left = [one for one in wanted if (*astuple(cell), one[0], one[1], one[2] is not None) not in known]
        if left:
            whole = Undisturbed.of(cell, rounds=2)
            yield from (fault(cell, whole, *one) for one in left)


def main() -> None:
    """Play and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000, help="at random moments, in all")
    parser.add_argument(
        "--faults", nargs="*", default=[], metavar="METHOD", help="a kill and a full disk at every write"
    )
    parser.add_argument("--methods", nargs="+", default=list_methods(), help="all by default")
    parser.add_argument("--executors", nargs="+", default=[*EXECUTORS, *SEVERAL], choices=[*EXECUTORS, *SEVERAL])
    parser.add_argument("--minutes", type=float, default=1e9, help="stop then; the same command goes on")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--notes", type=Path, default=Path("runs/kills"), help="folder of what was done so far")
    parser.add_argument("--table", type=Path, default=HERE / "results" / "kills.md", help="where the table goes")
    options = parser.parse_args()
    pairs = product(options.methods, options.executors)
    cells = [Cell(*pair) for pair in pairs if pair[1] in WHEREVER or pair[0] in FEW]
    machine = describe()
    options.notes.mkdir(parents=True, exist_ok=True)
    path: Path = (
        options.notes / f"{machine['commit']}-{options.seed}.jsonl"
    )  # what another version did counts for nothing
    trials = remembered(path)
    at_random = kills(cells, options.kills, sum(trial.what not in FAULTS for trial in trials), options.seed)
    # Files are written by the first process alone, whoever trains; with workers, it must end those too.
    written = [Cell(method, "workers" if method == "scaffold" else "sequential") for method in options.faults]
    warm([*cells, *written])
    at_writes = (trial for cell in written for trial in faults(cell, trials))
    deadline = time.monotonic() + 60 * options.minutes
    for trial in chain(at_random, at_writes):
        trials.append(_note(trial, path))
        print(f"\r{len(trials)} trials; {trial.method}, {trial.executor}: {trial.outcome}\033[K", end="", flush=True)
        if time.monotonic() > deadline:
            break
    command = shlex.join(["python", *sys.argv])
    options.table.write_text(table(trials, machine, command))
    counts = Counter(trial.outcome for trial in trials)
    print("\n" + ", ".join(f"{outcome}: {counts[outcome]}" for outcome in OUTCOMES))
    sys.exit(1 if counts["lost"] else 0)


if __name__ == "__main__":
    main()
