"""What a node's owner lets servers ask of the node: a TOML file, `potluck join --policy FILE`.

A policy narrows what a server may ask; whatever it does not speak of is as without it. What breaks it is refused in
one line, which the server sees, before anything is computed or, for the size of a reply, before anything leaves.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from potluck.core.ground.errors import CheckpointError, ConfigError, nearest
from potluck.core.ground.fields import Checked, at_least, require
from potluck.core.ground.text import one_line
from potluck.engine.disk.files import write_atomically
from potluck.experiment.settings.keys import settings_of
from potluck.experiment.settings.schema import TABLES, Experiment
from potluck.experiment.settings.strict import typed
from potluck.experiment.settings.tables import read_toml
from potluck.methods import get_method, list_methods

Rounds = Annotated[int, at_least(1)]
_LIMITS = {"least", "most"}


@dataclass(frozen=True)
class Policy(Checked):
    """A node's policy.

    Attributes:
        methods: the methods that the node computes, by name, or by the name of a file that its owner allows; None for
            all.
        settings: by dotted key of the experiment, such as "method.training.epochs", what it may be: a value, a list
            of values, or a table with `least`, `most` or both. A key that a method does not have is not asked for; one
            of a table that is left out, such as "run.private_weights.noise_multiplier", has it asked for.
        rounds: the most rounds in which the node takes part, those of all runs together.
        bytes_a_round: the most bytes that leave the node in one round.
        least_batch: the fewest examples over which a step or a batch of features may be taken, by the method's
            settings, and the fewest training examples with which the node takes part.
        privacy: "required" for methods alone whose features leave clipped and with calibrated noise. Their weights are
            sent as they are.
        least_summed: the least number of clients whose numbers are summed, in runs with secure sums.
    """

    methods: tuple[str, ...] | None = None
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    rounds: Rounds | None = None
    bytes_a_round: Rounds | None = None
    least_batch: Rounds | None = None
    privacy: Literal["required", "any"] = "any"
    least_summed: Annotated[int, at_least(3)] | None = None

    def __post_init__(self) -> None:
        for key, allowed in self.settings.items():
            sound = not isinstance(allowed, dict) or (allowed.keys() <= _LIMITS and allowed and _are_numbers(allowed))
            require(bool(sound), f"settings.{key}", "a value, a list of values, or numbers `least` and `most`", allowed)

    @classmethod
    def read(cls, path: Path | None) -> "Policy":
        """The policy of a file; without a file, one that refuses nothing.

        Raises:
            ConfigError: the file cannot be read, or speaks of something that there is not.
        """
        if path is None:
            return cls()
        policy = typed(cls, read_toml(path), "policy", str(path))
        known = set(_keys_of(policy.methods))
        for key in policy.settings:
            if key not in known:
                near = ", ".join(nearest(key, known))
                raise ConfigError(f"{path}: settings: no experiment has the key {one_line(key, 80)}; nearest: {near}")
        return policy

    def check(self, experiment: Experiment, examples: int) -> None:
        """Check an experiment that a server asks for.

        Args:
            experiment: as the node would carry it out.
            examples: the number of the node's training examples.

        Raises:
            ConfigError: the policy forbids it.
        """
        name = experiment.method_name
        if self.methods is not None and not {name, Path(name.rpartition(":")[0] or name).name} & set(self.methods):
            _refuse(f"the method {name}", f"one of {', '.join(self.methods)}")
        asked = dict(_flat(experiment.settings()))
        for key, allowed in self.settings.items():
            if key in asked and not _fits(asked[key], allowed):
                _refuse(f"{key} = {one_line(repr(asked[key]), 80)}", _in_words(allowed))
            if table := _left_out(key, asked):
                _refuse(f"an experiment without {table}", f"a {key} that is {_in_words(allowed)}")
        if self.least_batch is not None:
            self._check_batches(asked, self.least_batch, examples)
        if self.privacy == "required" and not experiment.method.releases_privately:
            _refuse(f"{name}, whose features do not leave clipped and with calibrated noise", "`method.privacy`")

    @staticmethod
    def _check_batches(asked: Mapping[str, Any], least: int, examples: int) -> None:
        if examples < least:
            _refuse(f"a part with {examples} training examples", f"at least {least}")
        for key, value in asked.items():
            if key.startswith("method.") and key.endswith(("batch_size", "_batch")) and value < least:
                _refuse(f"{key} = {value}", f"at least {least}")


class Tally:
    """How many rounds a node has taken part in, and how many bytes left it in the latest; kept in its state folder.

    A round counts again when the server returns to it.

    Args:
        path: the file that keeps it.
        policy: the node's policy.

    Raises:
        CheckpointError: the file is damaged.
    """

    def __init__(self, path: Path, policy: Policy) -> None:
        self._path, self._policy = path, policy
        self._rounds, self._run, self._round, self._bytes = self._read()

    def begin(self, run: str, round_number: int) -> None:
        """Note that a run's server asks for something in a round.

        Raises:
            ConfigError: the policy allows no further round.
        """
        if (run, round_number) == (self._run, self._round):
            return
        if self._policy.rounds is not None and self._rounds >= self._policy.rounds:
            _refuse("one more round", f"at most {self._policy.rounds}, and as many have been")
        self._rounds, self._run, self._round, self._bytes = self._rounds + 1, run, round_number, 0
        self._save()

    def leave(self, size: int) -> None:
        """Note that this many bytes are about to leave.

        Raises:
            ConfigError: the policy allows fewer.
        """
        most = self._policy.bytes_a_round
        if most is not None and self._bytes + size > most:
            _refuse(f"a reply of {size} bytes after {self._bytes} in this round", f"at most {most} in a round")
        self._bytes += size
        self._save()

    def _read(self) -> tuple[int, str, int, int]:
        if not self._path.is_file():
            return 0, "", -1, 0
        try:
            rounds, run, round_number, size = json.loads(self._path.read_bytes())
            return int(rounds), str(run), int(round_number), int(size)
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{self._path} is damaged: {error}; how much left this node is not known") from error

    def _save(self) -> None:
        write_atomically(self._path, json.dumps([self._rounds, self._run, self._round, self._bytes]).encode())


def _refuse(found: str, expected: str) -> None:
    raise ConfigError(f"the policy of this node's owner refuses {found}; it allows {expected}")


def _keys_of(methods: tuple[str, ...] | None) -> Iterator[str]:
    """The dotted keys of experiments with these methods; those of a method in a file are known when it is asked for."""
    for table, cls in TABLES.items():
        yield from (f"{table}.{one.key}" for one in settings_of(cls))
    for name in list_methods():
        if methods is None or name in methods:
            yield from (f"method.{one.key}" for one in settings_of(get_method(name)))


def _flat(tree: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        yield f"{before}{key}", value
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{key}.")


def _left_out(key: str, asked: Mapping[str, Any]) -> str:
    """The table in which a key would be, if the experiment could have one and has none; otherwise nothing."""
    parts = key.split(".")
    tables = (".".join(parts[:length]) for length in range(1, len(parts)))
    return next((table for table in tables if table in asked and asked[table] is None), "")


def _fits(value: Any, allowed: Any) -> bool:
    if isinstance(allowed, dict):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and allowed.get("least", value) <= value <= allowed.get("most", value)
    return value in allowed if isinstance(allowed, list) else value == allowed


def _in_words(allowed: Any) -> str:
    if isinstance(allowed, dict):
        return " and ".join(f"at {name} {limit}" for name, limit in allowed.items())
    return f"one of {', '.join(map(repr, allowed))}" if isinstance(allowed, list) else repr(allowed)


def _are_numbers(limits: Mapping[str, Any]) -> bool:
    return all(isinstance(limit, int | float) and not isinstance(limit, bool) for limit in limits.values())
