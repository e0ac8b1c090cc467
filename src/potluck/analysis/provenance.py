"""What runs were made with: code, versions, machine and data, as far as their manifests say."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from potluck.analysis.read import StoredRun
from potluck.analysis.rendering import NOTHING
from potluck.core.ground.errors import CheckpointError
from potluck.records import MANIFEST

_DIGITS = 12


@dataclass(frozen=True)
class Provenance:
    """What a run was made with, in words; a dash for what its manifest does not say.

    Of a run that was resumed with something else, each tells what it had, and to which round.

    Attributes:
        commit: of the repository that holds the user's code, if there is one; else Potluck's.
        potluck_commit: of Potluck's code, if it ran from its own checkout.
        python: version.
        packages: the versions of Potluck, torch and numpy, by name.
        machine: system, processor and cores, and the device of the clients' work if it is not the processor.
        data: checksum of the data.
        division: fingerprint of their division among clients.
    """

    commit: str
    potluck_commit: str
    python: str
    packages: dict[str, str]
    machine: str
    data: str
    division: str


def provenance(run: StoredRun) -> Provenance:
    """What a run was made with.

    Raises:
        CheckpointError: its manifest is damaged.
    """
    potlucks = _told(run, lambda facts: _commit(facts, "potluck"))
    packages = ("potluck", "torch", "numpy")
    return Provenance(
        commit=_commit(run.manifest, "git") if run.manifest.get("git_commit") else potlucks,
        potluck_commit=potlucks,
        python=_told(run, lambda facts: facts.get("python")),
        packages={name: _told(run, lambda facts, name=name: _table(facts, "packages").get(name)) for name in packages},
        machine=_told(run, _machine),
        data=_short(run.manifest.get("data_checksum")),
        division=_short(run.manifest.get("partition_fingerprint")),
    )


def stretches(run: StoredRun) -> list[tuple[int, Mapping[str, Any]]]:
    """What the rounds of a run stood on, and the last round for which that holds; the first rounds first.

    A run that was resumed with other code, packages or machine has several.

    Raises:
        CheckpointError: its manifest is damaged.
    """
    done = len(run.rounds)
    try:
        past = [(int(facts["last_round"]), facts) for facts in run.manifest.get("earlier", ())]
    except (KeyError, TypeError, ValueError) as error:
        found = f"{run.folder / MANIFEST} is damaged: of `earlier`, a table is missing or has no whole last_round"
        raise CheckpointError(f"{found}; restore it, or run again") from error
    return past if past and past[-1][0] >= done else [*past, (done, run.manifest)]


def _told(run: StoredRun, what: Callable[[Mapping[str, Any]], object]) -> str:
    """One of the facts, with the round to which it held if it changed."""
    known = [(last, str(what(facts) or NOTHING)) for last, facts in stretches(run)]
    *past, (_, final) = [list(same)[-1] for _, same in groupby(known, key=lambda one: one[1])]
    return ", then ".join([*(f"{value} to round {last}" for last, value in past), final])


def _commit(facts: Mapping[str, Any], whose: str) -> str:
    changed = " with changes" if facts.get(f"{whose}_dirty") else ""
    return f"{_short(facts.get(f'{whose}_commit'))}{changed}"


def _machine(facts: Mapping[str, Any]) -> str:
    device = _table(facts, "computing").get("device") or "cpu"
    return "; ".join([facts.get("machine") or NOTHING, *([] if device == "cpu" else [f"device {device}"])])


def _short(digits: object) -> str:
    return str(digits or NOTHING)[:_DIGITS]


def _table(facts: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return facts.get(name) or {}
