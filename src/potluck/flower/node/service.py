"""The node's service: one client with its own data, model and state."""

import json
import re
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ConfigDict

from potluck.core.federation import ClientId, Federation, Site
from potluck.core.ground.access import only
from potluck.core.ground.digest import digest
from potluck.core.ground.errors import ConfigError, WireError
from potluck.core.ground.rng import Key
from potluck.core.ground.text import one_line
from potluck.core.message import Message
from potluck.core.nets.modes import threads
from potluck.core.roles import Failure
from potluck.data.dataset import Dataset
from potluck.data.datasets import list_datasets
from potluck.engine.answers.inspection import check_inputs, check_targets
from potluck.engine.client.runtime import ClientRuntime, Outcome
from potluck.engine.client.session import Answer, Call, failure
from potluck.engine.rounds.sums import SECURE_SUMS
from potluck.experiment.federation.assemble import (
    architectures_of,
    assemble,
    builder_of,
    common_data,
    common_of,
    load_own,
    named,
    own_heads,
    own_parts,
)
from potluck.experiment.federation.own_classes import classes_held, of_classes
from potluck.experiment.federation.rehearsal import rehearse
from potluck.experiment.running.secure_sums import check_sums_suffice, sum_noise
from potluck.experiment.settings.resolve import of_vocabulary
from potluck.experiment.settings.schema import Experiment, ModelSpec
from potluck.experiment.settings.secure import SecureRule
from potluck.flower import JOB, REFUSAL, Envelope
from potluck.flower.node.asked import asked
from potluck.flower.node.audit import Audit
from potluck.flower.node.config import NOTHING_OF_ITS_OWN, NodeConfig
from potluck.flower.node.peers import identity_in, public_text, read_peers
from potluck.flower.node.policy import Policy, Tally
from potluck.flower.node.room import Room, of_limits
from potluck.flower.node.store import NodeStore
from potluck.flower.node.sums import NodeSums, Trust
from potluck.flower.wire.classes import Classes, sendable
from potluck.flower.wire.introduction import Introduction, Network
from potluck.flower.wire.schemas import (
    LONGEST_NAME,
    ClientNumber,
    Header,
    NodeJob,
    SumsStep,
    from_outcome,
    read,
    to_job,
)
from potluck.flower.wire.software import ServerSoftwareEntries, Software
from potluck.secure import ANSWERS
from potluck.secure.agreement import SecureRefusal


class Node:
    """Carries out a run's jobs for one client.

    Args:
        client: the client's id.
        federation: the federation, in which it alone has data.
        host: the runtime of the run's method.
        store: the store of the client's state.
        torch_threads: torch's threads, as configured for the run.
        sums: the client's part in secure sums; None if the run has none.
    """

    def __init__(
        self,
        client: ClientId,
        federation: Federation,
        host: ClientRuntime,
        store: NodeStore,
        torch_threads: int = 1,
        sums: NodeSums | None = None,
    ) -> None:
        self._client = client
        self._federation = federation
        self._host = host
        self._store = store
        self._threads = torch_threads
        self._sums = sums

    def execute(self, job: NodeJob) -> Outcome:
        """Do a job; the client's state is on disk before the outcome is returned."""
        name = _name_of(job, self._host)
        if job.client != self._client:
            return failure(job.client, name, ConfigError(f"this node is client {self._client}"))
        try:
            if isinstance(job, SumsStep):
                return self._added(job)
            if isinstance(job, Call) and self._sums is not None and (said := self._sums.again(job)) is not None:
                return said
            known = None if job.record is None else self._store.read(job.record.decode("ascii"))
            with threads(self._threads):
                outcome = self._host.execute(replace(job, record=known))
        except Exception as error:  # including bugs in the method's file, which the server reports
            return failure(job.client, name, error)
        if not isinstance(outcome, Answer) or not isinstance(job, Call):
            return outcome
        released = self._store.count(outcome.releases)  # before anything is sent, whether or not it arrives
        record = self._store.write(outcome.record, job.record, job.round)
        return self._told(job, replace(outcome, record=record, released=released))

    def _told(self, call: Call, answer: Answer) -> Answer | Failure:
        """The answer as the server gets it: where numbers are summed securely, without them."""
        if self._sums is None:
            return answer
        try:
            return self._sums.keep_back(call, answer)
        except Exception as error:
            return failure(call.client, self._host.full_name(call.handler), error)

    def _added(self, step: SumsStep) -> Answer:
        """The answer to a step of secure sums.

        Raises:
            SecureRefusal: the run has none, or this client does not go on with these.
        """
        if self._sums is None:
            raise SecureRefusal("found a step of secure sums; expected none in a run without run.secure_sums")
        return self._sums.answer(step)

    def introduce(self, classes: tuple[str, ...] | None) -> Introduction:
        """What the server needs to know of the client, and nothing more.

        Args:
            classes: the names of those that its data may have, if they have names.
        """
        site, own = self._federation.sites[self._client], self._federation.classes_of(self._client)
        return Introduction(
            architecture=self._federation.base_of(site.architecture),
            capacity=site.capacity,
            network=Network.of(self._federation.build(site.architecture, Key((site.architecture,)))),
            train=len(site.train),
            validation=len(site.validation),
            test=len(site.test),
            input_shape=self._federation.input_shape,
            num_classes=self._federation.num_classes,
            classes=classes,
            outputs=None if own is None else own.numbers,
        )


class _Setting(Header):
    """The entries of every message besides its job."""

    model_config = ConfigDict(extra="ignore", strict=True)
    experiment: dict[str, Any]
    run: str
    client: ClientNumber
    classes: Classes
    code: str | None = None
    software: ServerSoftwareEntries | None = None


class NodeService:
    """Answers the messages to a node, and holds data and modules between them.

    Args:
        config: the node's configuration.

    Raises:
        ConfigError: its policy cannot be read.
        CheckpointError: its audit log was changed, or its tally is damaged.
    """

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._setting: str | None = None
        self._found: NodeInRun | None = None
        self._policy, self._peers = Policy.read(config.policy), read_peers(config.peers)
        self._tally = Tally(config.state / "tally.json", self._policy)
        self._audit = Audit(config.audit_log)
        self._room = Room(config.state, config.most_disk_gib)
        self._logged = ""

    def answer(self, kind: str, envelope: Envelope) -> Envelope:
        """The node's answer to a message, whatever it contains; the audit log has it before it is returned."""
        began = time.monotonic()
        with only(self._config.named):
            answer = self._answer(kind, envelope)
        took = {"seconds": round(time.monotonic() - began, 3)}
        self._audit.note(self._facts(kind, envelope[0], answer) | took)
        return answer

    def _answer(self, kind: str, envelope: Envelope) -> Envelope:
        if kind == REFUSAL:
            return {}, b""
        try:
            if kind != JOB:
                self._room.check()
                return self._node(envelope[0]).introduction.header(), b""
            job = to_job(envelope)
        except Exception as error:
            said = refusing_header(error)
            return {name: of_limits(why, self._config.most_memory_gib) for name, why in said.items()}, b""
        try:
            return self._done(job, envelope[0])
        except Exception as error:
            return from_outcome(self._within_limits(failure(job.client, "the node", error)))

    def _done(self, job: NodeJob, header: Mapping[str, Any]) -> Envelope:
        """The outcome of a job that the owner's policy allows, of a size that it allows."""
        self._room.check()
        found = self._node(header)
        if found.other_software is not None:
            raise ConfigError(found.other_software)
        self._tally.begin(str(header["run"]), job.round)
        said, payload = from_outcome(self._within_limits(found.node.execute(job)))
        self._tally.leave(_size(said, payload))
        return said, payload

    def _within_limits(self, outcome: Outcome) -> Outcome:
        """An outcome, in which a failure that comes of the limit of memory says so."""
        if not isinstance(outcome, Failure):
            return outcome
        return replace(outcome, reason=of_limits(outcome.reason, self._config.most_memory_gib))

    def _node(self, header: Mapping[str, Any]) -> "NodeInRun":
        """The node in this run; that of the previous run is dropped."""
        said = read(_Setting, header, "not a message of Potluck's")
        entries = [said.experiment, said.run, said.client, said.classes.model_dump(), said.code]
        setting = json.dumps([*entries, said.software and said.software.model_dump()])
        if self._found is None or setting != self._setting:
            self._found = None
            self._found, self._setting = node_at(self._config, header, self._policy, self._peers), setting
        return self._found

    def _facts(self, kind: str, header: Mapping[str, Any], answer: Envelope) -> dict[str, Any]:
        """The audit log's line on a message and its answer; the experiment's settings if they were not the last."""
        said, payload = answer
        refused = said.get("refusal") or said.get("failure", {}).get("reason")
        asked = _asked_for(kind, header)
        facts: dict[str, Any] = {"asked": asked, "run": one_line(str(header.get("run")), LONGEST_NAME)}
        facts |= {"round": header.get("round") if isinstance(header.get("round"), int) else None, "refused": refused}
        if kind == REFUSAL:
            facts |= {"asked": "nothing", "told": one_line(str(header.get("why")))}
        elif self._found is not None:
            found = self._found.experiment
            settings = found.settings()
            name = digest(json.dumps(settings, sort_keys=True).encode())
            facts |= {"method": found.method_name, "experiment": name}
            facts |= {} if name == self._logged else {"settings": _without_content(settings)}
            self._logged = name
        left = {"header": _size(said, b""), **_entries(payload)}
        return {**facts, "left": left, "bytes": _size(said, payload), "digest": digest(payload)}


@dataclass(frozen=True)
class NodeInRun:
    """A node, as a run's server has asked for it.

    Attributes:
        introduction: what the server is told of it.
        experiment: the server's, as this node carries it out.
        other_software: how its software differs from the server's, which wants the same; None if it may compute.
    """

    node: Node
    introduction: Introduction
    experiment: Experiment
    other_software: str | None = None


def _without_content(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with the digest of a tokenizer in place of its content, which may be megabytes."""
    federation = settings["federation"]
    known = (federation["columns"] or {}).get("known") or {}
    if "tokenizer" not in known:
        return dict(settings)
    told = {**known, "tokenizer": digest(known["tokenizer"].encode())}
    return {**settings, "federation": {**federation, "columns": {**federation["columns"], "known": told}}}


def _name_of(job: NodeJob, host: ClientRuntime) -> str:
    if isinstance(job, SumsStep):
        return SECURE_SUMS
    return host.full_name(job.handler) if isinstance(job, Call) else "evaluation"


def _asked_for(kind: str, header: Mapping[str, Any]) -> str:
    """What a message asks for, in a word or two, for the audit log."""
    if kind != JOB:
        return "introduction"
    step = header.get("step")
    if isinstance(step, int) and 0 <= step < len(ANSWERS):
        return f"{SECURE_SUMS}: {ANSWERS[step]}"
    return one_line(str(header.get("handler", "evaluation")), LONGEST_NAME)


def _size(said: Mapping[str, Any], payload: bytes) -> int:
    """The bytes of an answer: of its header as JSON, and of its payload."""
    return len(json.dumps(dict(said))) + len(payload)


def _entries(payload: bytes) -> dict[str, int]:
    """By name, the bytes of the entries of a packed reply."""
    try:
        return Message.decode(payload, views=True).sizes() if payload else {}
    except WireError:
        return {"payload": len(payload)}


def node_at(
    config: NodeConfig,
    header: Mapping[str, Any],
    policy: Policy | None = None,
    peers: Collection[bytes] | None = None,
) -> NodeInRun:
    """The node described by the header of the server's messages, and its introduction.

    Args:
        config: the node's configuration.
        header: the experiment's tables, the run's name, which client this is, the federation's classes, a digest of the
            method's file, and the server's software.
        policy: what its owner lets servers ask.
        peers: the keys of those with whom alone it sums, and without whom it takes part in nothing; None for no list.

    Raises:
        ConfigError: owner and server disagree on the client or on what this node may run and read, its policy forbids
            it, or its model cannot be trained on its data.
        DataError: the data cannot be read, are of another task, have a class that the federation lacks, or hold NaN.
        CheckpointError: data or model have changed since the run began.
        WireError: the header is not Potluck's.
    """
    said = read(_Setting, header, "not a message of Potluck's")
    store = NodeStore(config.state / _safe(said.run), Room(config.state, config.most_disk_gib))
    experiment = asked(said.experiment, config, said.client, said.code)
    own = own_of(config, experiment, said.client, said.classes)
    federation = own.federation
    policy = policy or Policy()
    policy.check(experiment, len(federation.sites[said.client].train))
    trust = _trust(config, experiment, policy, peers)
    check_inputs(federation)
    check_targets(federation, whole=False)
    rehearse(federation)
    run = experiment.run
    host = ClientRuntime(experiment.method, federation, run.seed, run.computing, run.clipping)
    sums = None if trust is None else NodeSums(said.client, said.run, host, store, trust, sum_noise(run))
    node = Node(said.client, federation, host, store, run.threads, sums)
    introduction = node.introduce(own.classes)
    if trust is not None:
        introduction = replace(introduction, sums_key=public_text(trust.identity))
    name, capacity = introduction.architecture, introduction.capacity
    store.pin({"client": said.client, "data": own.checksum, "model": name, "capacity": capacity})
    if said.software is None:
        return NodeInRun(node, introduction, experiment)
    own = Software.with_method(experiment.method)
    other = None if said.software.others else own.difference(said.software.read())
    return NodeInRun(node, replace(introduction, software=own), experiment, other)


def _trust(config: NodeConfig, experiment: Experiment, policy: Policy, peers: Collection[bytes] | None) -> Trust | None:
    """With whom this node sums; None in a run without secure sums.

    Raises:
        ConfigError: the method needs single replies; or there are no sums, and the owner has listed peers.
    """
    rule = experiment.run.secure_sums
    if isinstance(rule, SecureRule):
        check_sums_suffice(experiment.method)
        return Trust(identity_in(config.state), peers, max(rule.least, policy.least_summed or 0))
    if peers is not None:
        raise ConfigError(
            "this node's owner lists peers, with whom alone it adds up what it sends; found a run without"
            " run.secure_sums"
        )
    return None


@dataclass(frozen=True)
class Own:
    """What a node has of a federation.

    Attributes:
        federation: the federation, in which only this client has data.
        checksum: of the data.
        classes: the names of those that the data may have; None if the data number them.
    """

    federation: Federation
    checksum: str
    classes: tuple[str, ...] | None


def own_of(config: NodeConfig, experiment: Experiment, client: ClientId, classes: Classes) -> Own:
    """The client's data, with the federation's numbers for their classes, and its model.

    Args:
        config: the node's configuration.
        experiment: the experiment, as this node carries it out.
        client: the client that this node is.
        classes: the federation's.

    Raises:
        ConfigError: the experiment has no such client, the owner's model cannot be built, or the experiment's data set
            has other classes here.
        DataError: the data cannot be read, are of another task, or have a class that the federation lacks.
    """
    if client >= experiment.federation.clients:
        raise ConfigError(f"client {client}: the experiment has {experiment.federation.clients} clients")
    if config.data is None:
        if config.model is not None or config.capacity is not None:
            raise ConfigError(NOTHING_OF_ITS_OWN)
        return _share(experiment, client, classes)
    who, found = named(client, config.data), load_own(experiment, config.data)
    matched = classes.matched(common_data(experiment))
    dataset = matched.relabelled(found, who)
    parts = own_parts(experiment, client, dataset)
    own = model_of(config, experiment, client)
    task = (dataset.num_classes, dataset.train.input_shape)
    # A test set in a file of the server's exists only there; here the node's own data replace it.
    shared = experiment.federation.dataset in list_datasets()
    public, test = common_of(experiment, matched) if shared else (None, None)
    capacities = experiment.federation.capacities or (1.0,)
    capacity = capacities[client % len(capacities)] if config.capacity is None else config.capacity
    architectures, server_architecture = architectures_of(experiment, *task)
    architectures[own.architecture] = builder_of(own, *task, experiment.feature_fit)
    name = own.architecture
    if experiment.federation.classes == "own":
        heads, numbers = own_heads(experiment, *task), classes_held(parts)
        name, parts = heads.named(own, numbers), of_classes(parts, numbers)
        architectures |= heads.builders
    federation = Federation(
        sites={client: Site(client, name, *parts, capacity=capacity)},
        architectures=architectures,
        server_architecture=server_architecture,
        num_classes=dataset.num_classes,
        public=public,
        public_labels=experiment.federation.public_labels,
        test=test,
        task=dataset.task,
    )
    return Own(federation, dataset.checksum, _names(found, who))


def _share(experiment: Experiment, client: ClientId, classes: Classes) -> Own:
    """The client's share of the experiment's data."""
    whole = assemble(experiment, checked=True)
    federation, name = whole.federation, experiment.federation.dataset
    matched = classes.matched(common_data(experiment))
    if (whole.classes, federation.num_classes) != (matched.classes, matched.width):
        raise ConfigError(
            f"{name} has other classes here than at the server; install the same version of it, or bring data of your"
            " own: potluck join --data ..."
        )
    sites = {client: federation.sites[client]}
    return Own(replace(federation, sites=sites), whole.data_checksum, sendable(whole.classes, name))


def _names(own: Dataset, who: str) -> tuple[str, ...] | None:
    """The names of the classes of a client's own data, as the server is told them."""
    if not own.task.has_classes:
        return ()
    return None if own.classes is None else sendable(own.classes, who)


def model_of(config: NodeConfig, experiment: Experiment, client: ClientId) -> ModelSpec:
    """The client's model: the owner's, or the one that the experiment assigns."""
    own = config.own_model
    return experiment.model_of(client) if own is None else of_vocabulary(own, experiment.federation.columns)


def refusing_header(error: Exception) -> dict[str, str]:
    """The header that refuses to take part."""
    return {"refusal": f"{type(error).__name__}: {' '.join(str(error).split())}"}


def _safe(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,200}", name) or name.startswith("."):
        raise ConfigError(f"name of a run: found {name!r}, expected letters, digits, '-', '_' and '.'")
    return name
