"""What is looked at before keys are used, and what is said of them in time: who may read them, and when they end."""

import shlex
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography.exceptions import InvalidSignature

from potluck.core.ground.errors import ConfigError
from potluck.flower.deploy.certificates import addresses_in, certificates_in, end_of, key_in
from potluck.flower.deploy.keys import (
    CA,
    CA_KEY,
    CERTIFICATES,
    FOR_NODES,
    NODE_KEY,
    SERVER,
    SERVER_KEY,
    bridges_in,
    public_key_of,
    read_secret,
)
from potluck.flower.deploy.limits import Say
from potluck.flower.deploy.registry import FORMER, REGISTERED, RegisteredKey, present_and_former, registered
from potluck.flower.deploy.roles import NODE, OBSERVER, ROLES

_SOON = timedelta(days=30)
_DAY = 86_400.0  # seconds
_COPY_CERTIFICATE = "for a server that asks for it, copy KEYS/nodes/NAME/node.crt over it"
_COPY_CA = "have the server's operator carry out `potluck keys KEYS --renew-authority`, and copy KEYS/ca.crt over it"


class Daily:
    """Says each line once a day, however often it comes.

    Args:
        say: called with a line.
        clock: gives seconds.
    """

    def __init__(self, say: Say, clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._said: dict[str, float] = {}

    def __call__(self, lines: Iterable[str]) -> None:
        """Say those that were not said within a day."""
        now = self._clock()
        self._said = {line: at for line, at in self._said.items() if now - at < _DAY}
        for line in lines:
            if line not in self._said:
                self._said[line] = now
                self._say(line)


def check_served(folder: Path) -> None:
    """Check that a server can use these keys.

    Raises:
        ConfigError: something is missing, has expired, or does not belong together; others may read secrets, or write.
    """
    _check_there(folder, (CA, SERVER, SERVER_KEY), f"potluck keys {folder} --address HOST --node NAME")
    secrets = [folder / CA_KEY, folder / SERVER_KEY]
    for role in ROLES:
        secrets += sorted((folder / role.carried).glob(f"*/{role.secret}"))
    registries = [role.registry_in(folder) / kind for role in ROLES for kind in (".", REGISTERED, FORMER)]
    _check_modes(registries, secrets)
    now = datetime.now(UTC)
    for name, remedy in _remedies(folder).items():
        if (end := end_of(folder / name)) <= now:
            raise ConfigError(f"{folder / name} expired on {_day(end)}, so nodes refuse it; {remedy}")
    if certificates_in(folder / SERVER)[0].public_key() != read_secret(folder / SERVER_KEY).public_key():
        raise ConfigError(
            f"{folder / SERVER} is of another key than {SERVER_KEY}; make both anew: potluck keys {folder}"
            " --renew-server"
        )


def check_carried(folder: Path) -> None:
    """Check that a node can use these keys.

    Raises:
        ConfigError: something is missing, or the authority's certificate has expired; others may read the secret, or
            write.
    """
    _check_there(folder, (CA, NODE_KEY), "copy nodes/NAME, which `potluck keys` made on the server, to this machine")
    _check_modes([folder], [folder / NODE_KEY])
    if (end := end_of(folder / CA)) <= datetime.now(UTC):
        raise ConfigError(f"{folder / CA} expired on {_day(end)}, so this node trusts no server by it; {_COPY_CA}")


def expiring(folder: Path) -> list[str]:
    """Warnings for a server's operator: what ends within 30 days, or has ended, and what to do.

    Raises:
        ConfigError: a file does not hold what it should.
    """
    now, found = datetime.now(UTC), list[str]()
    for name, remedy in _remedies(folder).items():
        if (end := end_of(folder / name)) - now < _SOON:
            verb = "expires" if now < end else "expired"
            found.append(f"{folder / name} {verb} on {_day(end)}, and nodes will refuse it; {remedy}")
    return [
        *found,
        *_bridges_ending(folder, now),
        *_former_ending(folder, now),
        *_observers_ending(folder, now),
    ]


def uncertified(folder: Path) -> list[str]:
    """Warnings for the operator of a server that asks for certificates: nodes that have none.

    Those of before there were any, and those that got their key while the authority's secret key was elsewhere.
    """
    return [
        f"node {name} has no certificate, and is not let in without; make one for each node that has none, and copy"
        f" them: potluck keys {folder} --renew-authority"
        for name in registered(folder)
        if not (folder / CERTIFICATES / f"{name}.crt").is_file()
    ]


def expiring_carried(folder: Path, end: datetime, shown_until: datetime | None = None) -> list[str]:
    """Warnings for a node's owner: a certificate ends within 30 days, or has ended.

    Args:
        folder: the node's keys.
        end: of the authority's certificate that it has joined with.
        shown_until: the end of the node's own one; None if it has none.
    """
    now, found = datetime.now(UTC), list[str]()
    if end - now < _SOON:
        verb = "expires" if now < end else "expired"
        found.append(f"{folder / CA} {verb} on {_day(end)}, and this node will trust no server by it; {_COPY_CA}")
    if shown_until is not None and shown_until < end and shown_until - now < _SOON:
        verb = "expires" if now < shown_until else "expired"
        found.append(f"{folder / NODE.certificate} {verb} on {_day(shown_until)}; {_COPY_CERTIFICATE}")
    return found


def faults_of_certificate(folder: Path) -> list[str]:
    """Why a node's own certificate, if it has one, will not do for a server that asks for it; for its owner.

    Raises:
        ConfigError: a file does not hold what it should.
    """
    place = folder / NODE.certificate
    if not place.is_file():
        return []
    own = certificates_in(place)[0]
    if key_in(own) != public_key_of(folder):
        return [f"{place} is of another key than {NODE_KEY}, and is not shown; {_COPY_CERTIFICATE}"]
    try:
        own.verify_directly_issued_by(certificates_in(folder / CA)[0])
    except (InvalidSignature, ValueError, TypeError):
        return [f"{place} is of another authority than {CA}; {_COPY_CERTIFICATE}"]
    return []


def expiring_at_server(folder: Path) -> list[str]:
    """Warnings for nodes: the server's certificate ends within 30 days.

    Raises:
        ConfigError: its file does not hold one.
    """
    end = end_of(folder / SERVER)
    soon = end - datetime.now(UTC) < _SOON
    return [f"the server's certificate expires on {_day(end)}; its operator can renew it"] if soon else []


def ends_in(folder: Path) -> dict[str, datetime]:
    """When a server's certificate and its authority's expire, by the names of their files.

    Raises:
        ConfigError: a file does not hold one.
    """
    return {name: end_of(folder / name) for name in (SERVER, CA)}


def ends_of_observers(folder: Path) -> dict[str, datetime]:
    """By name, when the certificates of the observers that there are end.

    Raises:
        ConfigError: a file does not hold one.
    """
    places = {name: folder / CERTIFICATES / f"{name}.crt" for name in registered(OBSERVER.registry_in(folder))}
    return {name: end_of(place) for name, place in places.items() if place.is_file()}


def listing(folder: Path) -> list[str]:
    """A line for each certificate and each node: what it is for, and when it ends.

    Raises:
        ConfigError: there are no certificates, or a file holds something else.
    """
    now, (server, *_) = datetime.now(UTC), certificates_in(folder / SERVER)
    keys = present_and_former(folder)
    return [
        f"authority: {_until(end_of(folder / CA), now)}",
        *(f"a former authority: {_until(one.not_valid_after_utc, now)}" for one in bridges_in(folder)),
        f"server: {_until(server.not_valid_after_utc, now)}, for {', '.join(addresses_in(server))}",
        *(f"node {name}: {_standing(name, keys, now, 'no end')}" for name in sorted({key.name for key in keys})),
        *_observers(folder, now),
    ]


def _observers(folder: Path, now: datetime) -> Iterator[str]:
    """A line for each observer."""
    keys = present_and_former(OBSERVER.registry_in(folder))
    for name in sorted({key.name for key in keys}):
        certificate = folder / CERTIFICATES / f"{name}.crt"
        end = _until(end_of(certificate), now) if certificate.is_file() else "no certificate"
        yield f"observer {name}: {_standing(name, keys, now, end)}"


def _standing(name: str, keys: Sequence[RegisteredKey], now: datetime, end: str) -> str:
    """How a holder's keys stand, of which the last one is its present one, if it has one, with an end in words."""
    *former, last = [key for key in keys if key.name == name]
    if last.ends is not None:
        return f"{'revoked' if last.revoked else 'ended'} on {_day(last.ends)}"
    ends = [key.ends for key in former if key.ends is not None and key.counts(now)]
    return f"{end}; its former key ends on {_day(max(ends))}, or when it comes with this one" if ends else end


def _until(end: datetime, now: datetime) -> str:
    return f"{'ends' if now < end else 'ended'} on {_day(end)}"


def _remedies(folder: Path) -> dict[str, str]:
    """By name of a certificate that nodes look at, what to do when it ends."""
    return {
        SERVER: f"make a new one: potluck keys {folder} --renew-server",
        CA: f"make it last longer, and copy it to each node: potluck keys {folder} --renew-authority",
    }


def _bridges_ending(folder: Path, now: datetime) -> list[str]:
    return [
        f"a former authority counts until {_day(one.not_valid_after_utc)}, and nodes that know no other will refuse"
        f" this server then; copy {folder / CA} to each node"
        for one in bridges_in(folder)
        if one.not_valid_after_utc - now < _SOON
    ]


def _former_ending(folder: Path, now: datetime) -> list[str]:
    return [
        f"node {key.name} has not come with its new key, and its former one counts until {_day(key.ends)}; copy"
        f" {folder / FOR_NODES / key.name} to its machine, or make another: potluck keys {folder} --renew {key.name}"
        for key in present_and_former(folder)
        if key.ends is not None and now < key.ends < now + _SOON
    ]


def _observers_ending(folder: Path, now: datetime) -> Iterator[str]:
    for name, end in ends_of_observers(folder).items():
        if end - now < _SOON:
            verb = "expires" if now < end else "expired"
            yield f"the certificate of observer {name} {verb} on {_day(end)}; potluck keys {folder} --renew {name}"


def _day(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d}"


def _check_there(folder: Path, names: Sequence[str], remedy: str) -> None:
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ConfigError(f"{folder}: {', '.join(missing)} not found; {remedy}")


def _check_modes(folders: Iterable[Path], secrets: Iterable[Path]) -> None:
    """Check that nobody else may put keys into folders, or read secret ones.

    Raises:
        ConfigError: somebody may; says which command mends it.
    """
    for place in folders:
        if place.is_dir() and (mode := stat.S_IMODE(place.stat().st_mode)) & 0o022:
            raise ConfigError(
                f"{place}: others may write to this folder (mode {mode:o}), and so exchange keys; keep them out:"
                f" chmod go-w {shlex.quote(str(place))}"
            )
    for secret in secrets:
        if secret.is_file() and (mode := stat.S_IMODE(secret.stat().st_mode)) & 0o077:
            raise ConfigError(
                f"{secret}: others may read this secret key (mode {mode:o}); make a new one if they may have, or keep"
                f" them out: chmod 600 {shlex.quote(str(secret))}"
            )
