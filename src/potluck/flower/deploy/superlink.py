"""A SuperLink, Flower's server, which listens on this machine's loopback interface alone."""

import json
import shutil
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from potluck.core.ground.errors import PotluckError
from potluck.flower.deploy.certificates import MOST_DAYS
from potluck.flower.deploy.keys import CA, CA_KEY, SERVER, SERVER_KEY, certify
from potluck.flower.deploy.processes import environment, free_port, start, stop
from potluck.flower.deploy.registry import RegisteredKey, Registry

CONNECTION = "potluck"
_STARTS_WITHIN, _ANSWERS_WITHIN = 60.0, 120.0  # seconds


class FlowerError(PotluckError):
    """One of Flower's programs failed."""


class SuperLink:
    """Flower's server, as a child of this process or run by somebody else.

    A child's state is in memory: everything that must survive is in the run's folder, and nodes reconnect by
    themselves. Between it and the gate, on this machine, are certificates of its own, made when it starts: those that
    nodes see may be exchanged while it runs.

    Args:
        place: the folder for its log and Flower's own files.
        keys: the folder of `potluck keys`; None for no encryption and unauthenticated nodes.
        address: the `host:port` of one that runs already. Its operator then decides who may take part.
    """

    def __init__(self, place: Path, keys: Path | None, address: str | None = None) -> None:
        self.address = address or f"127.0.0.1:{free_port()}"
        self._is_ours = address is None
        self._place = place
        self._keys = keys
        self._home = place / "flower"
        self._inside = place / "inside"
        self._registry = None if keys is None else Registry(keys)
        self._known: dict[str, tuple[str, int]] = {}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def trust(self) -> Path | None:
        """The certificate of the authority by which it is known; None if it does not encrypt."""
        if self._keys is None:
            return None
        return (self._inside if self._is_ours else self._keys).resolve() / CA

    @property
    def log(self) -> Path:
        """What it says."""
        return self._place / "superlink.log"

    def __enter__(self) -> Self:
        host, _, port = self.address.rpartition(":")
        self._home.mkdir(parents=True, exist_ok=True)
        if self._is_ours and self._keys is not None:
            shutil.rmtree(self._inside, ignore_errors=True)
            certify(self._inside, [], MOST_DAYS)
            (self._inside / CA_KEY).unlink()  # it has signed what it was made for
        (self._home / "config.toml").write_text(self._connection())
        if not self._is_ours:
            return self
        self._process = start(
            "flower-superlink", ["--host", host, "--port", port, *self._security()], self._home, self.log
        )
        self._wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            stop(self._process)

    def check(self) -> None:
        """Check that it is still running.

        Raises:
            FlowerError: it is not.
        """
        if self._process is not None and self._process.poll() is not None:
            raise FlowerError(f"the SuperLink has ended; it says why in {self.log}")

    def register(self) -> list[str]:
        """Register new keys and remove revoked ones; return the changes, as text."""
        if self._registry is None or not self._is_ours:
            return []
        now, told = datetime.now(UTC), list[str]()
        wanted = {key.public: key for key in self._registry.keys().values() if key.counts(now)}
        for public in self._known.keys() - wanted.keys():
            name, number = self._known.pop(public)
            self.ask("supernode", "unregister", str(number), CONNECTION)
            stays = any(key.name == name for key in wanted.values())
            told.append(f"a former key of node {name} counts no more" if stays else f"node {name} is revoked")
        for key in sorted(wanted.values(), key=lambda key: (key.name, key.ends is not None)):
            if key.public not in self._known:
                told.append(self._admit(key))
        return told

    def _admit(self, key: RegisteredKey) -> str:
        """Register a key; return what an operator should know."""
        has_another = any(name == key.name for name, _ in self._known.values())
        file = self._home / "node.pub"
        file.write_text(f"{key.public}\n")
        answer = self.ask("supernode", "register", str(file), CONNECTION, "--name", key.name)
        self._known[key.public] = (key.name, int(answer["node-id"]))
        if key.ends is not None:
            return f"node {key.name} may take part with its former key, too, until {key.ends:%Y-%m-%d}"
        return f"node {key.name} has a new key" if has_another else f"node {key.name} may take part"

    def submit(self, app: Path) -> str:
        """Start a run of the app in a folder; return Flower's number for it."""
        return str(self.ask("run", str(app), CONNECTION)["run-id"])

    def status(self, run: str) -> tuple[str, str]:
        """A run's status, such as `running` or `finished:failed`, and the reason."""
        (found,) = self.ask("ls", CONNECTION, "--run-id", run)["runs"]
        return str(found["status"]), str(found.get("status-details") or "")

    def stop_run(self, run: str) -> None:
        """End a run."""
        self.ask("stop", run, CONNECTION)

    def ask(self, *arguments: str) -> dict[str, Any]:
        """Run one of Flower's commands and return its answer.

        Raises:
            FlowerError: it failed, or took too long.
        """
        what = f"flwr {' '.join(arguments[:2])}"
        try:
            done = subprocess.run(
                [str(Path(sys.executable).parent / "flwr"), *arguments, "--format", "json"],
                env=environment(self._home), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=_ANSWERS_WITHIN, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise FlowerError(
                f"{what}: no answer within {_ANSWERS_WITHIN:g} s; such a command takes a second or two where this"
                " machine has nothing else to do: see what keeps it busy"
            ) from error
        answer = _json_in(done.stdout)
        if not answer.get("success"):
            why = answer.get("error-message") or done.stderr or done.stdout
            raise FlowerError(f"{what}: {' '.join(str(why).split())}")
        return dict(answer)

    def _connection(self) -> str:
        known = self.trust
        trust = "insecure = true" if known is None else f"root-certificates = {json.dumps(str(known))}"
        return (
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "{self.address}"\n{trust}\n'
        )

    def _security(self) -> list[str]:
        if self._keys is None:
            return ["--insecure"]
        certificates = {"--ssl-ca-certfile": CA, "--ssl-certfile": SERVER, "--ssl-keyfile": SERVER_KEY}
        given = [word for option, name in certificates.items() for word in (option, str(self._inside.resolve() / name))]
        return [*given, "--enable-supernode-auth"]

    def _wait(self) -> None:
        """Until it answers."""
        context = None if self.trust is None else ssl.create_default_context(cafile=str(self.trust))
        url = f"{'http' if self.trust is None else 'https'}://{self.address}/health"
        deadline = time.monotonic() + _STARTS_WITHIN
        while time.monotonic() < deadline:
            self.check()
            try:
                with urllib.request.urlopen(url, timeout=1, context=context):
                    return
            except OSError:
                time.sleep(0.2)
        raise FlowerError(f"the SuperLink did not answer within {_STARTS_WITHIN:.0f} s; see {self.log}")


def _json_in(output: str) -> Mapping[str, Any]:
    """The JSON object in a command's output; empty if there is none."""
    try:
        return json.loads(output[output.index("{") :])
    except ValueError:
        return {}
