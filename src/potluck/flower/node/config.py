"""A node's configuration, set by its owner."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from potluck.core.ground.discovery import config_file, named_file
from potluck.core.ground.errors import ConfigError, DataError
from potluck.core.tasks.named import TASKS
from potluck.data.dataset import Dataset
from potluck.data.datasets import load, rows_in
from potluck.engine.numerics.numerics import Numerics
from potluck.experiment.federation.assemble import builder_of
from potluck.experiment.settings.schema import ModelSpec
from potluck.flower.node.audit import last_digest
from potluck.flower.node.peers import read_peers
from potluck.flower.node.policy import Policy
from potluck.models.initial import file_digest

NOTHING_OF_ITS_OWN = "--model and --capacity need --data: a node with a model of its own has its own data"


@dataclass(frozen=True)
class NodeConfig:
    """A node's configuration, set by its owner.

    Attributes:
        state: the folder for the client's state.
        data: its own data, a folder of images or an `.npz` file; None for its share of the experiment's.
        model: its own model; None for the one that the experiment assigns.
        capacity: share of the full model that it can train; None for the experiment's.
        device: where its network is computed; see `potluck.engine.numerics.numerics.Numerics`.
        code: Python files that the server may have this node run, besides its own model's.
        policy: a TOML file with what the server may ask; None for whatever is installed. See
            `potluck.flower.node.policy.Policy`.
        audit: the file of the audit log; None for `audit.jsonl` in the state folder.
        weights: a file of initial weights: of its own model, or if it has none, the owner's copy of the one that the
            server's model begins with.
        train_only: names of the modules of its own model that are trained, "head" for the head; none freeze nothing.
        most_disk_gib: the most GiB that the folder for its state may take; None for any number.
        most_memory_gib: the most GiB of memory that its worker may have, on Linux; None for any number.
        peers: the file with the keys of those with whom alone it sums securely, see `potluck.flower.node.peers`; None
            to believe the server's.
    """

    state: Path
    data: Path | None = None
    model: str | None = None
    capacity: float | None = None
    device: str = "cpu"
    code: tuple[Path, ...] = ()
    policy: Path | None = None
    audit: Path | None = None
    weights: Path | None = None
    train_only: tuple[str, ...] = ()
    most_disk_gib: float | None = None
    most_memory_gib: float | None = None
    peers: Path | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "NodeConfig":
        """From a node's configuration, scalars by name.

        Raises:
            ConfigError: it has no folder for the client's state.
        """
        if "state" not in config:
            raise ConfigError("the node's configuration has no 'state'; expected a folder: potluck join --state FOLDER")
        model, capacity = config.get("model"), config.get("capacity")
        disk, memory = config.get("most_disk_gib"), config.get("most_memory_gib")
        places = ("data", "policy", "audit", "weights", "peers")
        data, policy, audit, weights, peers = (Path(str(config[key])) if key in config else None for key in places)
        return cls(
            state=Path(str(config["state"])),
            data=data,
            policy=policy,
            audit=audit,
            model=None if model is None else str(model),
            capacity=None if capacity is None else float(capacity),
            device=str(config.get("device", "cpu")),
            code=tuple(Path(place) for place in str(config.get("code", "")).split(os.pathsep) if place),
            weights=weights,
            train_only=tuple(name for name in str(config.get("train_only", "")).split(",") if name),
            most_disk_gib=None if disk is None else float(disk),
            most_memory_gib=None if memory is None else float(memory),
            peers=peers,
        )

    def check(self) -> None:
        """Check that device, data, model, weights, code, policy, peers and audit log are sound, before a server asks.

        Raises:
            ConfigError: there is no such device; the model cannot be built, or there is one without data; a file is
                missing; the policy speaks of something that there is not.
            DataError: the data cannot be read.
            CheckpointError: the audit log was changed.
        """
        _ = Numerics(device=self.device).place
        if missing := [str(place) for place in self.code if not place.is_file()]:
            raise ConfigError(f"--allow-code {missing[0]}: no such file; expected a Python file")
        if self.weights is not None:
            file_digest(str(self.weights))
        if self.train_only and self.model is None:
            raise ConfigError(
                f"--train-only {self.train_only[0]} needs --model: of its model the server says it itself"
            )
        Policy.read(self.policy)
        read_peers(self.peers)
        last_digest(self.audit_log)
        if self.data is None:
            if self.model is not None or self.capacity is not None:
                raise ConfigError(NOTHING_OF_ITS_OWN)
            return
        if self.capacity is not None and not 0 < self.capacity <= 1:
            raise ConfigError(f"capacity {self.capacity}; expected a share above 0 and at most 1")
        if rows_in(self.data) is not None:
            return  # what its columns are a server says, and so what a model of them has to read
        dataset = _of_any_task(self.data)
        if (own := self.own_model) is not None:
            builder_of(own, dataset.num_classes, dataset.train.input_shape)

    @property
    def own_model(self) -> ModelSpec | None:
        """The owner's model; None for the one that the experiment assigns."""
        if self.model is None:
            return None
        weights = None if self.weights is None else str(self.weights)
        return ModelSpec(self.model, {}, weights=weights, train_only=self.train_only)

    @property
    def audit_log(self) -> Path:
        """The file of the audit log."""
        return self.state / "audit.jsonl" if self.audit is None else self.audit

    @property
    def named(self) -> list[Path]:
        """The files and folders of which the node's processes make code and data."""
        references = [str(place) for place in (self.data, self.model) if place is not None]
        files = [found[0] if (found := named_file(name)) else config_file(name) for name in references]
        return [*self.code, *filter(None, [self.data, self.weights, *files])]

    def as_config(self) -> dict[str, str | float]:
        """The configuration in the form that `of` reads."""
        names = ("data", "policy", "audit", "weights", "peers")
        files: dict[str, Path | None] = {name: getattr(self, name) for name in names}
        places = {"state": self.state.resolve(), **{name: place and place.resolve() for name, place in files.items()}}
        told = {**{name: place and str(place) for name, place in places.items()}, "model": self.model}
        told["train_only"] = ",".join(self.train_only) or None
        code = os.pathsep.join(str(place.resolve()) for place in self.code) or None
        found: dict[str, str | float | None] = {**told, "capacity": self.capacity, "device": self.device, "code": code}
        found |= {"most_disk_gib": self.most_disk_gib, "most_memory_gib": self.most_memory_gib}
        return {name: value for name, value in found.items() if value is not None}


def _of_any_task(place: Path) -> Dataset:
    """The data, read for the first task that they suit; the server names the actual task later.

    Raises:
        DataError: they suit none.
    """
    refused: list[DataError] = []
    for task in (None, *TASKS.values()):
        try:
            return load(place, augmentation="none", task=task)
        except DataError as error:
            refused.append(error)
    raise refused[0]
