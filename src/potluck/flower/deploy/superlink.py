"""A SuperLink, Flower's server, which listens on this machine's loopback interface alone."""

import json
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from potluck.core.ground.errors import PotluckError
from potluck.flower.deploy.keys import CA, SERVER, SERVER_KEY, registered
from potluck.flower.deploy.processes import environment, free_port, start, stop

CONNECTION = "potluck"
_STARTS_WITHIN, _ANSWERS_WITHIN = 60.0, 120.0  # seconds


class FlowerError(PotluckError):
    """One of Flower's programs failed."""


class SuperLink:
    """Flower's server, as a child of this process or run by somebody else.

    A child's state is in memory: everything that must survive is in the run's folder, and nodes reconnect by
    themselves.

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
        self._known: dict[str, int] = {}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        """What it says."""
        return self._place / "superlink.log"

    def __enter__(self) -> Self:
        host, _, port = self.address.rpartition(":")
        self._home.mkdir(parents=True, exist_ok=True)
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
        if self._keys is None or not self._is_ours:
            return []
        wanted, told = registered(self._keys), list[str]()
        for name in self._known.keys() - wanted.keys():
            self.ask("supernode", "unregister", str(self._known.pop(name)), CONNECTION)
            told.append(f"node {name} is revoked")
        for name in sorted(wanted.keys() - self._known.keys()):
            answer = self.ask("supernode", "register", str(wanted[name]), CONNECTION, "--name", name)
            self._known[name] = int(answer["node-id"])
            told.append(f"node {name} may take part")
        return told

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
        trust = (
            "insecure = true"
            if self._keys is None
            else f"root-certificates = {json.dumps(str(self._keys.resolve() / CA))}"
        )
        return (
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "{self.address}"\n{trust}\n'
        )

    def _security(self) -> list[str]:
        if self._keys is None:
            return ["--insecure"]
        certificates = {"--ssl-ca-certfile": CA, "--ssl-certfile": SERVER, "--ssl-keyfile": SERVER_KEY}
        given = [word for option, name in certificates.items() for word in (option, str(self._keys.resolve() / name))]
        return [*given, "--enable-supernode-auth"]

    def _wait(self) -> None:
        """Until it answers."""
        context = None if self._keys is None else ssl.create_default_context(cafile=str(self._keys / CA))
        url = f"{'http' if self._keys is None else 'https'}://{self.address}/health"
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
