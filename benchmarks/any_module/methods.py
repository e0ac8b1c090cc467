"""Which methods train which networks: each for one round of two clients, beside networks that are cut by hand.

    make zoo
    .venv-zoo/bin/python benchmarks/any_module/methods.py [--only NAME ...] [--show]

The first makes an environment with timm and transformers, and calls the second there. No net has weights from anywhere:
all are drawn, as are the examples. A cell goes to results/any_methods.json when its column is done; --only tries these
methods or columns again, --show none. All write results/any_methods.md; what is not tried again stays as it was.
"""

import argparse
import json
import math
import re
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from string import ascii_lowercase
from textwrap import shorten
from typing import Any, Literal, get_args

from run import asked, said, versions
from torch import Tensor
from trying import short
from twelve import TABLE, Column, write_configs

from potluck import Federation, Observer, PotluckError, Run, RunConfig, get_method, list_methods
from potluck.api.given import given
from potluck.core.ground.errors import ConfigError, explained
from potluck.core.ground.tree import unpack
from potluck.core.method import Method
from potluck.core.needs import Offer
from potluck.data.dataset import arrays_digest
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.settings.presets import experiment_for
from potluck.testing.worlds import packed_state, quick

MOST = 60.0  # seconds of the processor for a cell, so that none takes them all
LONGEST = 300  # characters of what a failure says
SMALLER = {"fedftg": ("width=8",)}
"""Settings without which a method takes long: of a generator that puts out images."""
INCO = ("incoavg", "incomoon", "inconova", "incoprox", "incoscaffold")
EXITING = ("depthfl", "hypemefed", "mfedepth", "scalefl")
OTHER_STAGES = "the dataflow finds other stages than a person cuts"
BEHIND_STAGES = f"it has exits behind stages, and {OTHER_STAGES}"
EXITS = "its exits begin as their places are called, which the dataflow names by modules and a family by its stages"
UNLIKE: dict[str | tuple[str, str], str] = {
    "fedepth": f"it trains stages one after the other, and {OTHER_STAGES}",
    "fedmlb": f"it has a path for each stage, and {OTHER_STAGES}",
    "flanc": "a narrower network that a builder makes has first weights of its own, and one that is cut out of the full"
    " network has some of that one's; it trains each width from where it begins",
    **dict.fromkeys(INCO, "it pairs layers by the modules that they are in, and stages are other modules"),
    **dict.fromkeys(("depthfl", "scalefl"), EXITS),
    "hypemefed": "its exits and hypernetworks begin as places and layers are called, which are others in stages",
    **dict.fromkeys([(name, "timm convnext") for name in EXITING], BEHIND_STAGES),
    ("mfedepth", "preresnet18 unstaged"): BEHIND_STAGES,
}
"""Why a method may leave other numbers with a network in stages; in some columns for another reason."""
ALONE = ("centralised", "local")  # methods that exchange nothing, and say so

Outcome = Literal["equal", "runs", "refused", "unequal", "failed", "slow"]
SHOWN: dict[Outcome, str] = {"equal": "=", "runs": "runs", "unequal": "≠", "failed": "FAILS", "slow": "slow"}

PAGE = """\
# Any network, any method

Each method with its defaults, for one round of two clients, of capacities 1 and 0.5 of the full model, that have the
network of the column, or one each of two. Trainings are short: one epoch of a client's; and `fedftg`'s generator is
small, of width 8. Public examples, a fifth of the training set, are there with labels for methods that want them.
Examples and labels are drawn, so what is learnt is of no interest.

- **runs**: the round ended, both clients were evaluated, the loss and all models are finite, and something was sent,
  but by `local` and `centralised`, which say that they send nothing.
- **=**: and the same network, cut into stages by hand and with the same first weights, leaves the same behind to the
  last bit. Without stages, cnn4 and preresnet18 have their tensors under the same names: the server's state and all
  clients' are the same bytes. Of the other networks, whose tensors have other names in stages, it is all numbers in the
  server's state, the clients' states and the models that are evaluated, whatever their names. **≠**: they are not the
  same; why, is said at the end.
- A letter: refused, before anything trained, by the line below the table. NET is the network.
- **FAILS** is anything else, and a bug; **slow**, that it took more than a minute of the processor.

    make zoo

{about}.

"""


@dataclass(frozen=True)
class Cell:
    """What became of a method on a network.

    Attributes:
        line: that refuses it, or says what went wrong.
        seconds: of the processor, with the network that is cut by hand, if there is one.
        sent: bytes that were exchanged in training.
    """

    column: str
    method: str
    outcome: Outcome
    line: str = ""
    seconds: float = 0.0
    sent: int = 0


class OutOfTime(BaseException):
    """A cell took too long. What catches errors of clients must not catch this one."""


class Wrong(Exception):
    """A round ended, and not as it should."""


class Began(Observer):
    """Whether a round has begun."""

    rounds = 0

    def on_round_start(self, event: Any) -> None:
        """Count it."""
        self.rounds += 1


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """A block that raises `OutOfTime` if the processor works on it for longer."""

    def over(*_: Any) -> None:
        raise OutOfTime

    signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def federation_of(column: Column, configs: Path) -> Federation:
    """Two clients with its networks, made as `potluck.run` makes them."""
    models = [f"hf:{configs / one[3:]}" if str(one).startswith("hf:") else one for one in column.models]
    keywords = {"dataset": column.dataset(), "clients": 2, "models": models, "capacities": [1.0, 0.5]}
    keywords |= {"public": "holdout", "partition": {"name": "iid"}}
    settings = {"federation.public_labels": True, "federation.public_fraction": 0.2} | dict(column.settings)
    wanted = given("local", keywords, settings)
    with wanted.naming():
        return assemble(experiment_for(wanted.target, wanted.values)).federation


def by_hand(column: Column, federation: Federation) -> Federation | None:
    """The federation whose only network is in stages; None if there is none."""
    if column.by_hand is None:
        return None
    ((name, build),) = federation.architectures.items()
    return replace(federation, architectures={name: column.by_hand(build)})


def tried(column: Column, name: str, whole: Federation, staged: Federation | None) -> Cell:
    """Run a method, and with it the same in stages. Nothing that goes wrong is raised."""
    started, method = time.process_time(), quick(get_method(name), SMALLER.get(name, ()))
    outcome, line, sent, began = "failed", "", 0, Began()
    try:
        with deadline(MOST):
            left, sent = ran(method, whole, began, column.same_names)
            if not sent and name not in ALONE:
                raise Wrong("nothing was sent")
            outcome = "runs"
            if staged is not None:
                outcome = compared(left, method, staged, column.same_names)
    except OutOfTime:
        outcome, line = "slow", f"more than {MOST:g} s"
    except Exception as error:  # whatever it is, it is this cell's
        refused = isinstance(error, PotluckError) and not began.rounds
        outcome, line = ("refused", plainly(str(error), method, whole)) if refused else ("failed", where(error))
    return Cell(column.name, name, outcome, line, round(time.process_time() - started, 2), sent)


def compared(left: Any, method: Method[Any], staged: Federation, named: bool) -> Outcome:
    """What a round left behind, beside the same with the network that is cut by hand, if the method takes that."""
    begun = Began()
    try:
        other, _ = ran(method, staged, begun, named)
    except ConfigError:  # such as of a depth that its builder does not make
        if begun.rounds:
            raise
        return "runs"
    return "equal" if left == other else "unequal"


def ran(method: Method[Any], federation: Federation, began: Began, named: bool) -> tuple[Any, int]:
    """What one round leaves behind, and how many bytes it has sent."""
    run = Run(method, federation, RunConfig(rounds=1, executor="sequential"))
    (record,) = run.run(began).rounds
    if len(record.replied) != 2 or record.lost:
        raise Wrong(f"{record.replied} replied: {record.lost} {record.failed}")
    if record.loss_local is not None and not math.isfinite(record.loss_local):
        raise Wrong(f"loss {record.loss_local}")
    return kept(run, named), record.bytes_down + record.bytes_up


def kept(run: Run, named: bool) -> Any:
    """The states of the server and the clients, as bytes if tensors are to have the same names; else all numbers."""
    trained = run.trained()
    models = [trained.model(client) for client in trained.federation.sites]
    for tensor in (tensor for model in models for tensor in model.state_dict().values()):
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise Wrong("a model has numbers that are not finite")
    states = [packed_state(trained.state), *(trained.engine.store.read(id) or b"" for id in trained.federation.sites)]
    if named:
        return states
    numbers = Counter(number for state in states if state for number in numbers_in(unpack(state)))
    return numbers + Counter(number for model in models for number in numbers_in(dict(model.state_dict())))


def numbers_in(tree: Any) -> Iterator[str]:
    """The tensors and numbers of a tree, without their names."""
    if isinstance(tree, Tensor):
        yield arrays_digest(tree)
    elif isinstance(tree, dict | list | tuple):
        for one in tree.values() if isinstance(tree, dict) else tree:
            yield from numbers_in(one)
    elif not isinstance(tree, str):
        yield repr(tree)


def plainly(line: str, method: Method[Any], federation: Federation) -> str:
    """A refusal without the names of the method and the network, so that equal ones are told as one.

    Of two networks the names stay, without options.
    """
    line = re.sub(rf"^{type(method).__name__} cannot run here: ", "", line)
    nets = Offer.of(federation).nets
    if len(nets) > 1:
        for name in nets:
            line = line.replace(name, name.partition("(")[0])
        return line
    ((name, net),) = nets.items()
    for own in sorted({name, type(net).__name__}, key=len, reverse=True):
        line = re.sub(rf"(?<![\w.]){re.escape(own)}(?!\w)", "NET", line)
    return line


def where(error: Exception) -> str:
    """What went wrong, and in which line of which file, if a client's failure does not say so."""
    if isinstance(error, PotluckError | Wrong):
        return shorten(short(f"{type(error).__name__}: {error}"), LONGEST, placeholder=" ...")
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{short(explained(error))} ({Path(last.filename).name}, line {last.lineno})"


def codes(cells: list[Cell]) -> dict[str, str]:
    """A letter for each refusal, the most frequent first."""
    letters = [*ascii_lowercase, *(a + b for a in ascii_lowercase for b in ascii_lowercase)]
    counts = Counter(cell.line for cell in cells if cell.outcome == "refused")
    return dict(zip((line for line, _ in counts.most_common()), letters, strict=False))


def counts_of(cells: list[Cell]) -> str:
    """How many cells of each outcome."""
    found = Counter(cell.outcome for cell in cells)
    return " | ".join(str(found[outcome]) for outcome in get_args(Outcome))


def page(found: dict[str, Any]) -> str:
    """The results as Markdown."""
    commits = ", ".join(sorted({one["commit"] for one in found["cells"]}))
    cells = [Cell(**{key: value for key, value in one.items() if key != "commit"}) for one in found["cells"]]
    machine, libraries = found["machine"], ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    seconds = [cell.seconds for cell in cells]
    about = (
        f"{machine['cpu']}, one thread beside other work (load {machine['load_average_before'][0]:.1f} on"
        f" {machine['cores']} cores), {machine['system']}, Python {machine['python']}, {libraries}; commit {commits};"
        f" {sum(seconds):.0f} seconds of the processor in all, {median(seconds):.1f} a cell in the median and"
        f" {max(seconds):.1f} at most"
    )
    text = PAGE.format(about=about) + "| network | | = | runs | refused | ≠ | FAILS | slow |\n|---|---|" + "--:|" * 6
    for column in TABLE:
        mine = [cell for cell in cells if cell.column == column.name]
        text += f"\n| {column.name} | {column.about} | {counts_of(mine)} |"
    text += f"\n| all | | {counts_of(cells)} |\n\n## Cells\n\n| method | "
    text += " | ".join(column.name for column in TABLE) + " |\n|---|" + ":-:|" * len(TABLE)
    letters, by = codes(cells), {(cell.column, cell.method): cell for cell in cells}
    for method in sorted({cell.method for cell in cells}):
        row = [shown(by.get((column.name, method)), letters) for column in TABLE]
        text += f"\n| {method} | {' | '.join(row)} |"
    text += "\n\n## Refusals\n\n| | cells | line |\n|---|--:|---|\n"
    for line, letter in letters.items():
        text += f"| {letter} | {sum(cell.line == line for cell in cells)} | {said(line)} |\n"
    if wrong := [cell for cell in cells if cell.outcome in ("unequal", "failed", "slow")]:
        text += "\n## What differs or fails\n\n"
        text += "".join(
            f"- {one.method}, {one.column}, {SHOWN[one.outcome]}: {said(one.line or why_unlike(one))}\n"
            for one in wrong
        )
    return text


def why_unlike(cell: Cell) -> str:
    """Why a method may leave other numbers with the network of this column in stages."""
    return UNLIKE.get((cell.method, cell.column), UNLIKE.get(cell.method, "?"))


def shown(cell: Cell | None, letters: dict[str, str]) -> str:
    """A cell."""
    if cell is None:
        return ""
    return letters[cell.line] if cell.outcome == "refused" else SHOWN[cell.outcome]


def main() -> None:
    """Try, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options, store, found = asked(parser, "any_methods", "these methods or columns alone", "cells")
    if not options.show:
        try_all(found, store, set(options.only or ()))
    text = page(found)
    (options.results / "any_methods.md").write_text(text)
    print(text[text.index("| network") : text.index("\n## ")].strip())


def try_all(found: dict[str, Any], store: Path, only: set[str]) -> None:
    """Try the methods on the networks, column by column."""
    from machine import describe  # its folder is known once `run` is imported

    machine = describe()
    found |= {"machine": machine, "versions": versions()}
    known = {(one["column"], one["method"]): one for one in found["cells"]}
    with tempfile.TemporaryDirectory() as folder:
        write_configs(Path(folder))
        for column in TABLE:
            methods = [name for name in list_methods() if not only or {name, column.name} & only]
            if not methods:
                continue
            whole = federation_of(column, Path(folder))
            staged = by_hand(column, whole)
            for name in methods:
                cell = tried(column, name, whole, staged)
                known[column.name, name] = {**asdict(cell), "commit": machine["commit"]}
                print(f"{column.name}, {name}: {cell.outcome} {cell.line} ({cell.seconds:.1f} s)", flush=True)
            found["cells"] = list(known.values())
            store.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
