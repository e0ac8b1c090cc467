"""A node: Flower's program for nodes, kept running with the owner's configuration."""

import json
import re
import ssl
import subprocess
import time
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from potluck.core.errors import ConfigError, PotluckError
from potluck.core.text import one_line
from potluck.flower import EVALUATION, GREETING
from potluck.flower.deploy.gate import HEALTH, KEY_HEADER, reason_in
from potluck.flower.deploy.keys import CA, NODE_KEY, check_carried, public_key_of
from potluck.flower.deploy.processes import PYTHON, free_port, lines_after, start, stop
from potluck.flower.node.audit import in_words
from potluck.flower.node.config import NodeConfig
from potluck.flower.node.confined import environment_of
from potluck.flower.node.resident import socket_in
from potluck.flower.ourapp import stand_in_front

Say = Callable[[str], None]

_LOOK_EVERY = 0.5
_AGAIN_AFTER = 10.0  # seconds; a server may take a minute to notice that a node was killed
_CODE = re.compile(r"\[code: \d+\] (.*)")
_GROUP = re.compile(r"\[RUN \d+, ROUND (\w+)\]")
_AT_WORK = {GREETING: "introduced", EVALUATION: "evaluating its model"}


@dataclass(frozen=True)
class Credentials:
    """How to reach a server, and the node's identity.

    Attributes:
        address: the `host:port` of its gate.
        keys: the folder that `potluck keys` made for this node; None for no encryption.
    """

    address: str
    keys: Path | None

    def options(self) -> list[str]:
        """For Flower's program."""
        found = ["--superlink", self.address]
        if self.keys is None:
            return [*found, "--insecure"]
        place = self.keys.resolve()
        return [*found, "--root-certificates", str(place / CA), "--auth-supernode-private-key", str(place / NODE_KEY)]


class Unreachable(PotluckError):
    """No server answers; one may later."""


class Refused(PotluckError):
    """The server refuses this node, or the node this server; waiting does not help."""


def probe(credentials: Credentials) -> None:
    """Check that a server is reachable with these credentials and has registered this node.

    Raises:
        ConfigError: the address is not HOST:PORT.
        Unreachable: no server answers.
        Refused: a server answers, but refuses this node.
    """
    scheme, trust, shown = "http", False, {}
    if credentials.keys is not None:
        scheme, trust = "https", ssl.create_default_context(cafile=str(credentials.keys / CA))
        shown = {KEY_HEADER: b64encode(public_key_of(credentials.keys)).decode("ascii")}
    try:
        reply = httpx.get(
            f"{scheme}://{credentials.address}{HEALTH}", headers=shown, verify=trust, timeout=10.0, trust_env=False
        )
    except httpx.InvalidURL as error:
        raise ConfigError(f"{credentials.address!r} is not an address; expected HOST:PORT") from error
    except httpx.RemoteProtocolError as error:
        raise Refused(
            f"{credentials.address} hung up on plain text; it expects encryption: potluck join"
            f" {credentials.address} --keys ..."
        ) from error
    except httpx.HTTPError as error:
        raise _misfortune(credentials.address, error) from error
    if reply.status_code == 403:
        raise Refused(f"{credentials.address} refuses this node: {reason_in(reply.content)}")


def run_node(credentials: Credentials, home: NodeConfig, say: Say) -> None:
    """Take part until interrupted. Flower's program is restarted whenever it ends.

    It ends when the server is gone, and while the server still counts a killed predecessor of this node as present.

    Raises:
        ConfigError: keys are missing, or the address is not HOST:PORT.
        Refused: see `probe`.
    """
    socket_in(home.state)
    if credentials.keys is not None:
        check_carried(credentials.keys)
    home.state.mkdir(parents=True, exist_ok=True)
    home.state.chmod(0o700)
    told = ""

    def tell(line: str) -> None:
        nonlocal told
        if line != told:
            say(line)
        told = line

    while True:
        try:
            probe(credentials)
            tell(f"disconnected: {_live(credentials, home, tell)}; trying again every {_AGAIN_AFTER:.0f} s")
        except Unreachable as error:
            tell(f"{error}; trying again every {_AGAIN_AFTER:.0f} s")
        time.sleep(_AGAIN_AFTER)


def _live(credentials: Credentials, home: NodeConfig, say: Say) -> str:
    """Run Flower's program beside the node's own worker until one ends; return why."""
    log, words = home.state / "node.log", home.as_config()
    position, noted = (place.stat().st_size if place.is_file() else 0 for place in (log, home.audit_log))
    config = " ".join(f"{name}={json.dumps(value)}" for name, value in {**words, "resident": True}.items())
    arguments = [*credentials.options(), "--port", str(free_port()), "--node-config", config]
    # A node with its own data needs no other: the server's common test set is not downloaded for it.
    offline = {} if home.data is None else {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    more = {**environment_of(home), **offline}
    ours_first = stand_in_front(home.state / "flower")

    def move_in() -> subprocess.Popen[bytes]:
        return start(
            PYTHON, ["-P", "-m", "potluck.flower.node.resident", json.dumps(words)], home.state / "flower", log, more
        )

    resident = move_in()
    process = start("flower-supernode", arguments, home.state / "flower", log, ours_first)
    reason = "Flower's program ended"
    try:
        while True:
            ended = process.poll() is not None
            lines, position = lines_after(log, position)
            for line in lines:
                if found := _CODE.search(line):
                    reason = one_line(found[1]).rstrip(".")
                if "SuperNode ID" in line:
                    say("connected")
                if found := _GROUP.search(line):
                    say(_AT_WORK.get(found[1], f"at work on round {found[1]}"))
            entries, noted = lines_after(home.audit_log, noted)
            for words in filter(None, map(in_words, entries)):
                say(words)
            if ended:
                return reason
            if resident.poll() is not None:
                say(f"the worker ended with code {resident.returncode}; starting another one")
                resident = move_in()
            time.sleep(_LOOK_EVERY)
    finally:
        stop(process)
        stop(resident)


def _misfortune(address: str, error: httpx.HTTPError) -> PotluckError:
    text = str(error) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in text:
        why = text.rpartition(": ")[2]
        return Refused(f"{address}: its certificate is not one of ours ({why}); is this the ca.crt of its keys?")
    if "WRONG_VERSION_NUMBER" in text or "RECORD_LAYER_FAILURE" in text:
        return Refused(f"{address}: it does not encrypt; if that is intended, join with --insecure")
    return Unreachable(f"{address}: nobody answers ({text})")
