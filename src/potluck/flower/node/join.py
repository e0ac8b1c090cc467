"""A node: Flower's program for nodes, kept running with the owner's configuration."""

import json
import random
import re
import ssl
import subprocess
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Self

import httpx

from potluck.core.ground.errors import ConfigError, PotluckError
from potluck.core.ground.text import one_line
from potluck.experiment.running.execute import holding
from potluck.flower import EVALUATION, FAREWELL, GREETING
from potluck.flower.deploy.certificates import end_of, fingerprint_of
from potluck.flower.deploy.checks import Daily, check_carried, expiring_carried, faults_of_certificate
from potluck.flower.deploy.gate import HEALTH, KEY_HEADER, TRUST_HEADER, reason_in
from potluck.flower.deploy.keys import CA, NODE_KEY, public_key_of
from potluck.flower.deploy.private import RUNTIME
from potluck.flower.deploy.processes import PYTHON, lines_after, private_folder, socket_in, start, stop
from potluck.flower.deploy.registry import Stamps, stamps
from potluck.flower.deploy.roles import NODE
from potluck.flower.deploy.superlink import FlowerError
from potluck.flower.deploy.tls import side_of_node
from potluck.flower.node.audit import in_words
from potluck.flower.node.config import NodeConfig
from potluck.flower.node.confined import environment_of
from potluck.flower.node.ourapp import stand_in_front
from potluck.flower.node.resident import SOCKET
from potluck.flower.node.supernode import CARRIED, SIGNS, Signs

_RUNTIME = "runtime.sock"
_LOOK_EVERY = 0.5  # seconds, as all that follow
_FIRST_WAIT, _LONGEST_WAIT = 5.0, 60.0  # a server may take a minute to notice that a node was killed
_QUIET = 60.0  # without a sign of life that is answered; Flower sends one every 23 s at least
_ASK_EVERY = 5.0
_ASK_ANYWAY = 3600.0  # for what the owner should know
_GRACE = 30.0  # in which Flower's program finds by itself a server that is back; it tries every 20 s at least
_ANSWERS_WITHIN = 10.0
_LONGEST_ANSWER = 2**16  # bytes
_MOST_NOTICES = 8
_CODE = re.compile(r"\[code: (\d+)\] (.*)")
_NOT_ACTIVATED = 2004  # Flower's number for it
_PRESENT = (
    "the server counts a node with this key as present: another machine with a copy of it, or this one before it was"
    " killed, for up to a minute"
)
_ELSEWHERE = "where it does, others could take this node's tasks; install the version that Potluck asks for"
_HANGING_UP = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)
"""Errors of a connection that was opened: its server has shown a certificate of ours."""

_GROUP = re.compile(r"\[RUN \d+, ROUND (\w+)\]")
_BUSY, _IDLE = "Receiving: ", ("Sent successfully", "Failed to ", "Ignoring ")  # as Flower's program says it
_AT_WORK = {GREETING: "introduced", EVALUATION: "evaluating its model", FAREWELL: ""}


@dataclass(frozen=True)
class Credentials:
    """How to reach a server, and the node's identity.

    Attributes:
        address: the `host:port` of its gate.
        keys: the folder that `potluck keys` made for this node; None for no encryption.
    """

    address: str
    keys: Path | None

    def stamps(self) -> Stamps:
        """What differs when the owner has put other keys into the folder."""
        names = (CA, NODE_KEY, NODE.certificate)
        return () if self.keys is None else stamps(*(self.keys / name for name in names))

    def options(self) -> list[str]:
        """For Flower's program."""
        found = ["--superlink", self.address]
        if self.keys is None:
            return [*found, "--insecure"]
        place = self.keys.resolve()
        return [*found, "--root-certificates", str(place / CA), "--auth-supernode-private-key", str(place / NODE_KEY)]


class Unreachable(PotluckError):
    """No server answers; one may later."""

    about: ClassVar[str] = "nobody answers"
    """What a line is about that tells of it, whatever the reason, which changes between attempts."""


class HungUp(Unreachable):
    """A server of ours ended the connection without an answer, which one that asks for certificates does."""

    about: ClassVar[str] = "it hangs up"


class Refused(PotluckError):
    """The server refuses this node, or the node this server; waiting does not help."""


def probe(credentials: Credentials) -> None:
    """Check that a server is reachable with these credentials and has registered this node.

    Raises:
        ConfigError: keys are missing, or the address is not HOST:PORT.
        Unreachable: no server answers.
        Refused: a server answers, but refuses this node.
    """
    question(credentials)()


def question(credentials: Credentials) -> Callable[[], list[str]]:
    """Read the keys, and return `probe` with these, whatever becomes of the files; it returns warnings for the owner.

    Raises:
        ConfigError: keys are missing, have expired, or are open to others.
    """
    scheme, trust, shown, ends, own_end, faults = "http", False, dict[str, str](), None, None, list[str]()
    if (keys := credentials.keys) is not None:
        check_carried(keys)
        scheme, trust = "https", side_of_node(keys)
        shown = {KEY_HEADER: b64encode(public_key_of(keys)).decode("ascii"), TRUST_HEADER: fingerprint_of(keys / CA)}
        ends, faults = end_of(keys / CA), faults_of_certificate(keys)
        own_end = end_of(keys / NODE.certificate) if (keys / NODE.certificate).is_file() else None

    def ask() -> list[str]:
        try:
            status, body = _answer(f"{scheme}://{credentials.address}{HEALTH}", shown, trust)
        except httpx.InvalidURL as error:
            raise ConfigError(f"{credentials.address!r} is not an address; expected HOST:PORT") from error
        except httpx.HTTPError as error:
            raise _misfortune(credentials, error) from error
        if status == 403:
            raise Refused(f"{credentials.address} refuses this node: {reason_in(body)}")
        own = [] if keys is None or ends is None else expiring_carried(keys, ends, own_end)
        return [*faults, *own, *_notices(body)]

    return ask


def _answer(url: str, headers: Mapping[str, str], trust: ssl.SSLContext | bool) -> tuple[int, bytes]:
    """A server's answer, as far as it comes in time and is not longer than one: its status and its body."""
    until, body = time.monotonic() + _ANSWERS_WITHIN, b""
    with httpx.stream("GET", url, headers=headers, verify=trust, timeout=_ANSWERS_WITHIN, trust_env=False) as reply:
        for part in reply.iter_raw():
            body += part
            if len(body) > _LONGEST_ANSWER or time.monotonic() > until:
                break
    return reply.status_code, body[:_LONGEST_ANSWER]


def _notices(body: bytes) -> list[str]:
    """What a server has a node's owner know, a bounded number of clean lines; none if it says it otherwise."""
    try:
        said = json.loads(body)["notices"]
        lines = said[:_MOST_NOTICES] if isinstance(said, list) else []
    except (ValueError, LookupError, TypeError, RecursionError):
        return []
    return [f"{one_line(line)} (says the server)" for line in lines if isinstance(line, str)]


class NodeLine(str):
    """A line for the terminal of a node's owner.

    Attributes:
        event: what it is about, in a word: connection, work, request, keys, worker, warning or ended.
        round: the number of the round that it is about; None if it is about none.
        run: the name of its run; None if it is about none.
    """

    event: str
    round: int | None
    run: str | None

    def __new__(cls, line: str, event: str, round: int | None = None, run: str | None = None) -> Self:
        """A line with what it is about."""
        made = super().__new__(cls, line)
        made.event, made.round, made.run = event, round, run
        return made


def run_node(credentials: Credentials, home: NodeConfig, say: Callable[[NodeLine], None]) -> None:
    """Take part until interrupted. Flower's program is started anew when it ends or reaches the server no more.

    A server that refuses this node at first ends it. One that does so later may have to be set right, by another key or
    a new certificate, and is asked again.

    Raises:
        ConfigError: keys are missing, or the address is not HOST:PORT.
        CheckpointError: another process uses the folder for the node's state.
        StorageError: that folder cannot be written, or is another user's.
        Refused: see `probe`.
        FlowerError: this version of Flower would let others take the node's tasks.
    """
    sockets = [socket_in(home.state, name) for name in (SOCKET, _RUNTIME)]
    question(credentials)  # errors are reported before anything is written
    private_folder(home.state)
    with holding(home.state):
        _stay(credentials, home, sockets[1], _News(say))


def _stay(credentials: Credentials, home: NodeConfig, runtime: Path, say: "_News") -> None:
    waits, was_here, warn = _Waits(), False, Daily(lambda line: say(f"warning: {line}", "warning"))
    while True:
        renewal = _Renewal(credentials, say)
        try:
            ask = question(credentials)
            warn(ask())
            was_here = True
            why = _Life(credentials, ask, home, runtime, say, waits.start_over, renewal, warn).until_it_ends()
            if renewal.is_done:
                say("the keys are new; joining with them", "keys")
                continue
            say(f"disconnected: {why}; trying again", "connection")
        except Unreachable as error:
            say(f"{error}; trying again", "connection", error.about)
        except (ConfigError, Refused) as error:
            if not was_here:
                raise
            say(f"{error}; trying again", "connection")
        time.sleep(waits.next())


class _Renewal:
    """Notices that a node's owner has put other keys in the place of those that it joined with, which the server takes.

    Those that cannot be used, or that the server refuses, change nothing: the node goes on with the ones it has.

    Args:
        credentials: where the keys are.
        say: called with what is wrong with new ones.

    Attributes:
        is_done: whether there are other keys that the server takes.
    """

    def __init__(self, credentials: Credentials, say: "_News") -> None:
        self.is_done = False
        self._credentials, self._say = credentials, say
        self._seen = self._tried = credentials.stamps()
        self._not_before = 0.0

    def look(self) -> bool:
        """Whether there are other keys that the server takes; they are tried when they are found a second time."""
        before, self._seen = self._seen, self._credentials.stamps()
        if self._seen == self._tried or self._seen != before or time.monotonic() < self._not_before:
            return False
        try:
            question(self._credentials)()
            self.is_done = True
        except Unreachable:
            self._not_before = time.monotonic() + _ASK_EVERY
            return False
        except (ConfigError, Refused, OSError) as error:
            self._say(f"there are new keys, and they cannot be used: {error}; going on with those of before", "keys")
        self._tried = self._seen
        return self.is_done


class _News:
    """Says what a node's owner should know, and nothing twice in a row."""

    def __init__(self, say: Callable[[NodeLine], None]) -> None:
        self._say = say
        self._told = ""

    def __call__(self, line: str, event: str, about: str = "", **where: Any) -> None:
        """Say a line unless the last one was the same, or about the same; see `NodeLine`."""
        if (about or line) != self._told:
            self._say(NodeLine(line, event, **where))
        self._told = about or line


class _Waits:
    """The seconds between attempts: more each time up to a limit, and different for each node."""

    def __init__(self) -> None:
        self._longest = _FIRST_WAIT

    def next(self) -> float:
        """How long to wait now."""
        longest, self._longest = self._longest, min(2 * self._longest, _LONGEST_WAIT)
        return random.uniform(longest / 2, longest)

    def start_over(self) -> None:
        """The next wait is a first one: an attempt succeeded."""
        self._longest = _FIRST_WAIT


class _Life:
    """Flower's program and the node's own worker, from their start until one thing ends them.

    Args:
        credentials: by which it reaches the server.
        ask: asks the server itself; see `probe`.
        home: the node's configuration.
        runtime: the socket for Flower's program.
        say: called with news.
        admitted: called when the server has admitted the node.
        renewal: notices new keys.
        warn: called with what the owner should know.
    """

    def __init__(
        self, credentials: Credentials, ask: Callable[[], Sequence[str]], home: NodeConfig, runtime: Path, say: "_News",
        admitted: Callable[[], None], renewal: _Renewal, warn: Callable[[Sequence[str]], None],
    ) -> None:  # fmt: skip
        self._credentials, self._ask = credentials, ask
        self._say, self._admitted = say, admitted
        self._renewal, self._warn, self._is_busy = renewal, warn, False
        self._log, self._home = home.state / "node.log", home.state / "flower"
        self._audit_log = home.audit_log
        self._read = {place: _length(place) for place in (self._log, self._audit_log)}
        self._words = home.as_config()
        self._runtime = runtime
        # A node with its own data needs no other: the server's common test set is not downloaded for it.
        offline = {} if home.data is None else {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        self._confined = {**environment_of(home), **offline}
        self._reason = "Flower's program ended"

    def until_it_ends(self) -> str:
        """Run both; return why they ended.

        Raises:
            Refused: the server refuses this node.
            FlowerError: the program does not listen at its socket.
        """
        resident = self._move_in()
        process = self._start()
        watch, asked = Watch(Signs(self._home), self._ask), time.monotonic()
        try:
            while True:
                ended = process.poll() is not None
                self._read_logs()
                if ended:
                    return self._reason
                if not self._is_busy and self._renewal.look():
                    return "the keys are new"
                if self._is_stuck(watch):
                    return "the server answers, but no longer to Flower's program"
                if resident.poll() is not None:
                    self._say(f"the worker ended with code {resident.returncode}; starting another one", "worker")
                    resident = self._move_in()
                if time.monotonic() - asked > _ASK_ANYWAY:
                    asked = time.monotonic()
                    self._hear()
                time.sleep(_LOOK_EVERY)
        finally:
            stop(process)
            stop(resident)

    def _hear(self) -> None:
        """Ask the server what the owner should know."""
        with suppress(Unreachable):  # which the watch notices
            self._warn(self._ask())

    def _is_stuck(self, watch: "Watch") -> bool:
        """Whether Flower's program should be started anew; says when no server answers, and when one does again."""
        waiting = watch.waiting
        try:
            return watch.gives_up()
        except Unreachable as error:
            self._say(f"{error}; trying again", "connection", error.about)
            return False
        finally:
            if waiting and not watch.waiting:
                self._say("connected", "connection")

    def _start(self) -> subprocess.Popen[bytes]:
        config = " ".join(f"{name}={json.dumps(value)}" for name, value in {**self._words, "resident": True}.items())
        arguments = [*self._credentials.options(), "--node-config", config]
        self._runtime.unlink(missing_ok=True)
        more = {**stand_in_front(self._home), RUNTIME: str(self._runtime), SIGNS: str(self._home.resolve())}
        if (keys := self._credentials.keys) is not None:
            more[CARRIED] = str(keys.resolve())
        return start(PYTHON, ["-P", "-m", "potluck.flower.node.supernode", *arguments], self._home, self._log, more)

    def _move_in(self) -> subprocess.Popen[bytes]:
        words = ["-P", "-m", "potluck.flower.node.resident", json.dumps(self._words)]
        return start(PYTHON, words, self._home, self._log, self._confined)

    def _read_logs(self) -> None:
        for line in self._new_in(self._log):
            if found := _CODE.search(line):
                self._reason = _PRESENT if int(found[1]) == _NOT_ACTIVATED else one_line(found[2]).rstrip(".")
            if "SuperNode ID" in line:
                if not self._runtime.is_socket():
                    raise FlowerError(f"this version of Flower does not listen at {self._runtime}; {_ELSEWHERE}")
                self._admitted()
                self._say("connected", "connection")
            if _BUSY in line or any(word in line for word in _IDLE):
                self._is_busy = _BUSY in line
            if found := _GROUP.search(line):
                self._at_work(found[1])
        for line in self._new_in(self._audit_log):
            if words := in_words(line):
                entry = json.loads(line)
                self._say(words, "request", round=entry.get("round"), run=entry.get("run"))

    def _at_work(self, group: str) -> None:
        if words := _AT_WORK.get(group, f"at work on round {group}"):
            self._say(words, "work", round=int(group) if group.isdecimal() and len(group) < 10 else None)

    def _new_in(self, log: Path) -> list[str]:
        lines, self._read[log] = lines_after(log, self._read[log])
        return lines


def _length(log: Path) -> int:
    return log.stat().st_size if log.is_file() else 0


class Watch:
    """Watches whether the server answers Flower's program, and if not, asks the server itself.

    Args:
        signs: how the program's requests fare.
        ask: asks the server; see `probe`.
        clock: gives seconds.

    Attributes:
        waiting: whether no server answered, and the program has to find it again.
    """

    def __init__(self, signs: Signs, ask: Callable[[], object], clock: Callable[[], float] = time.monotonic) -> None:
        self.waiting = False
        self._signs, self._ask, self._clock = signs, ask, clock
        self._answered, self._failed = signs.seen()
        self._last_answer = self._last_asked = clock()
        self._there_since: float | None = None

    def gives_up(self) -> bool:
        """Whether the program should be started anew: for a while the server has answered us, and not the program.

        Raises:
            Unreachable: no server answers, which the program can wait for.
            Refused: the server refuses this node.
        """
        now, (answered, failed) = self._clock(), self._signs.seen()
        if answered != self._answered:
            self._answered, self._last_answer, self._there_since, self.waiting = answered, now, None, False
        if (failed == self._failed and now - self._last_answer <= _QUIET) or now - self._last_asked < _ASK_EVERY:
            return False
        self._failed, self._last_asked = failed, now
        try:
            self._ask()
        except Unreachable:
            self._there_since, self.waiting = None, True
            raise
        self._there_since = self._there_since or now
        return now - max(self._there_since + _GRACE, self._last_answer + _QUIET) > 0


def _misfortune(credentials: Credentials, error: httpx.HTTPError) -> PotluckError:
    address, text = credentials.address, str(error) or type(error).__name__
    if isinstance(error, httpx.RemoteProtocolError) and credentials.keys is None:
        return Refused(f"{address} hung up on plain text; it expects encryption: potluck join {address} --keys ...")
    if "certificate has expired" in text and credentials.keys is not None:
        return Refused(
            f"{address}: its certificate has expired; make a new one there: potluck keys KEYS --renew-server; or it has"
            f" another authority by now, whose ca.crt belongs into {credentials.keys}"
        )
    if "CERTIFICATE_VERIFY_FAILED" in text:
        why = text.rpartition(": ")[2]
        return Refused(f"{address}: its certificate is not one of ours ({why}); is this the ca.crt of its keys?")
    if "WRONG_VERSION_NUMBER" in text or "RECORD_LAYER_FAILURE" in text:
        return Refused(f"{address}: it does not encrypt; if that is intended, join with --insecure")
    if credentials.keys is not None and isinstance(error, _HANGING_UP):
        return HungUp(f"{address}: it hangs up; {_about_certificate(credentials.keys)}")
    return Unreachable(f"{address}: nobody answers ({text})")


def _about_certificate(keys: Path) -> str:
    """What a node's owner can do if its server asks for a certificate."""
    place = keys / NODE.certificate
    copy = f"copy KEYS/nodes/NAME/{NODE.certificate} of the server's to {keys}"
    if not place.is_file():
        return f"if that goes on, it is served with --mutual-tls, and this node has no certificate to show; {copy}"
    if (end := end_of(place)) <= datetime.now(UTC):
        return f"if that goes on, it is served with --mutual-tls, and {place} expired on {end:%Y-%m-%d}; {copy}"
    return f"if that goes on, it is served with --mutual-tls, and does not take {place}; {copy}"
