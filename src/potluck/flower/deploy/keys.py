"""Keys: a certificate for the server, a key for every node, and how each gets a successor while all of them run.

keys/                      stays with the server
  ca.key  ca.crt           signs the server's certificate
  bridges.crt              by which nodes that know a former authority trust this one
  server.key  server.crt   the server shows it to nodes
  registered/NAME.pub      nodes that may take part; delete a node's file to revoke it
  former/NAME.pub          keys that the node had before, each with its end
  nodes/NAME/              copy it to the node, and nowhere else
    ca.crt                 by which it knows the server
    node.key               by which the server knows it
"""

import os
import re
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
)
from cryptography.x509 import Certificate, GeneralName

from potluck.core.ground.errors import ConfigError
from potluck.flower.deploy.certificates import (
    MOST_DAYS,
    address_names,
    addresses_in,
    as_pem,
    bridge,
    certificate_of_authority,
    certificate_of_server,
    certificates_in,
    end_of,
    new_secret,
)
from potluck.flower.deploy.registry import FORMER, REGISTERED, NodeKey, former_keys, present_key, registered
from potluck.locks import locked

CA_KEY, CA, SERVER_KEY, SERVER, NODE_KEY = "ca.key", "ca.crt", "server.key", "server.crt", "node.key"
BRIDGES = "bridges.crt"
"""The certificates that `server.crt` has beside its own, newest first."""

FOR_NODES = "nodes"
"""The folder with a folder for each node, until that is copied to it."""

_MOST_OVERLAP = 365  # days for which a former key or authority counts beside its successor
_ALONE = 5.0  # seconds in which another command has changed the keys
_LOCAL = ("localhost", "127.0.0.1")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def certify(folder: Path, addresses: Sequence[str], days: int) -> None:
    """Make the server's certificate, and the certificate authority that signs it if there is none yet.

    Args:
        folder: the folder of the keys.
        addresses: host names and IP addresses under which nodes reach the server; this machine's own are added.
        days: days until it expires.

    Raises:
        ConfigError: an address is not a host name or an IP address; the days are none, or more than the authority's;
            the authority's secret key is not there.
    """
    _check_days(days)
    names = address_names(dict.fromkeys([*addresses, *_LOCAL]))
    _make_folder(folder)
    if not (folder / CA_KEY).is_file() and not (folder / CA).is_file():
        authority = new_secret()
        _write(folder / CA_KEY, _pem(authority, PrivateFormat.PKCS8), secret=True)
        _write(folder / CA, as_pem([certificate_of_authority(authority)]))
    _show(folder, _authority(folder), names, days, bridges_in(folder))


def renew_server(folder: Path, days: int) -> datetime:
    """Make a new certificate and key for the server, for the addresses of the one that there is; return its end.

    A running server shows it to nodes within seconds.

    Raises:
        ConfigError: there is no certificate; the days are none, or too many; the authority's secret key is not there.
    """
    certify(folder, addresses_in(certificates_in(folder / SERVER)[0]), days)
    return end_of(folder / SERVER)


def renew_authority(folder: Path) -> datetime:
    """Make a new certificate of the same authority, with a later end, which is returned.

    All that it has signed stays valid. A node needs the new certificate before its own one ends.

    Raises:
        ConfigError: the authority's secret key is not there.
    """
    _write(folder / CA, as_pem([certificate_of_authority(_secret(folder))]))
    _hand_out(folder)
    return end_of(folder / CA)


def change_authority(folder: Path, days: int, overlap: int) -> datetime:
    """Put another authority in the place of the one that there is, and make a new certificate of the server's.

    Nodes that know the former one trust the server until the end that is returned.

    Args:
        folder: the folder of the keys.
        days: days until the server's certificate expires.
        overlap: days for which the former authority still counts.

    Raises:
        ConfigError: days or overlap are out of range; there are no certificates; the authority's secret key is not
            there.
    """
    _check_days(days)
    former, successor = _authority(folder), new_secret()
    ends = min(end_of(folder / CA), _end_of_overlap(overlap))
    bridges = [bridge(successor.public_key(), former, ends), *bridges_in(folder)]
    names = address_names(addresses_in(certificates_in(folder / SERVER)[0]))
    _write(folder / BRIDGES, as_pem(bridges))
    _show(folder, successor, names, days, bridges)  # before the former key goes: until then all can be done again
    _write(folder / CA_KEY, _pem(successor, PrivateFormat.PKCS8), secret=True)
    _write(folder / CA, as_pem([certificate_of_authority(successor)]))
    _hand_out(folder)
    return ends


def add_node(folder: Path, name: str) -> Path:
    """Make a node's key, register it, and return the folder to copy to the node.

    Raises:
        ConfigError: the name is taken or invalid, or there is no certificate yet.
    """
    public, place = _file_of(folder, REGISTERED, name), folder / FOR_NODES / name
    if public.exists() or place.exists():
        raise ConfigError(
            f"node {name} has a key; renew it, or revoke {name} before it gets another one: potluck keys {folder}"
            f" --renew {name}"
        )
    if not (folder / CA).is_file():
        raise ConfigError(f"{folder / CA} is missing; make it first: potluck keys {folder} --address HOST")
    return _give_key(folder, name)


def renew_node(folder: Path, name: str, overlap: int) -> tuple[Path, datetime]:
    """Make a node another key; return the folder to copy to the node, and until when its former key counts.

    The former key counts no more as soon as the node comes with the new one.

    Args:
        folder: the folder of the keys.
        name: the node's.
        overlap: days for which it may come with the former key.

    Raises:
        ConfigError: there is no such node; the overlap is out of range.
        HeldError: another command is changing the keys.
    """
    ends = _end_of_overlap(overlap)
    with _changing(folder, _ALONE):
        _note_former(folder, replace(_registered_key(folder, name), ends=ends))
        return _give_key(folder, name), ends


def revoke_node(folder: Path, name: str) -> None:
    """Revoke a node; a running server notices within seconds, and tells the node.

    Raises:
        ConfigError: there is no such node.
        HeldError: another command is changing the keys.
    """
    with _changing(folder, _ALONE):
        _note_former(folder, replace(_registered_key(folder, name), ends=datetime.now(UTC), revoked=True))
        _end_former(folder, name, revoked=True)
        _file_of(folder, REGISTERED, name).unlink()
    shutil.rmtree(folder / FOR_NODES / name, ignore_errors=True)


def retire_former_keys(folder: Path, name: str) -> None:
    """End the former keys of a node, which has come with its new one.

    Raises:
        StorageError: the folder cannot be written.
        HeldError: another command is changing the keys.
    """
    with _changing(folder, 0.0):
        _end_former(folder, name, revoked=False)


def bridges_in(folder: Path) -> list[Certificate]:
    """The bridges from former authorities that have not ended.

    Raises:
        ConfigError: their file holds no certificate.
    """
    place = folder / BRIDGES
    found = certificates_in(place) if place.is_file() else []
    return [one for one in found if datetime.now(UTC) < one.not_valid_after_utc]


def public_key_of(place: Path) -> bytes:
    """The key in a node's folder, in the format of its requests.

    Raises:
        ConfigError: the file does not hold a secret key.
    """
    try:
        key = load_ssh_private_key((place / NODE_KEY).read_bytes(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{place / NODE_KEY} holds no secret key of a node: {error}") from error
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def read_secret(path: Path) -> ec.EllipticCurvePrivateKey:
    """The secret key of an authority or a server.

    Raises:
        ConfigError: the file does not hold one.
    """
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} holds no secret key: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{path} holds a key of another kind; expected one that `potluck keys` made")
    return key


def _check_days(days: int) -> None:
    if not 1 <= days <= MOST_DAYS:
        raise ConfigError(f"--days {days}: expected a number from 1 to {MOST_DAYS}")


def _end_of_overlap(overlap: int) -> datetime:
    if not 0 <= overlap <= _MOST_OVERLAP:
        raise ConfigError(f"--overlap {overlap}: expected a number of days from 0 to {_MOST_OVERLAP}")
    return datetime.now(UTC) + timedelta(days=overlap)


def _show(
    folder: Path,
    authority: ec.EllipticCurvePrivateKey,
    names: Sequence[GeneralName],
    days: int,
    bridges: Sequence[Certificate],
) -> None:
    """Write the server's certificate and key."""
    key = new_secret()
    certificate = certificate_of_server(names, key.public_key(), authority, days)
    _write(folder / SERVER_KEY, _pem(key, PrivateFormat.PKCS8), secret=True)
    _write(folder / SERVER, as_pem([certificate, *bridges]))


def _authority(folder: Path) -> ec.EllipticCurvePrivateKey:
    """The authority's secret key, whose certificate is the one that there is.

    Raises:
        ConfigError: it is not there, or another's.
    """
    key = _secret(folder)
    if certificates_in(folder / CA)[0].public_key() != key.public_key():
        raise ConfigError(
            f"{folder / CA} is of another key than {CA_KEY}; make it anew, and copy it to each node: potluck keys"
            f" {folder} --renew-authority"
        )
    return key


def _secret(folder: Path) -> ec.EllipticCurvePrivateKey:
    if not (folder / CA_KEY).is_file():
        raise ConfigError(f"{folder / CA_KEY} is missing, which signs certificates; bring it back into this folder")
    return read_secret(folder / CA_KEY)


def _hand_out(folder: Path) -> None:
    """Have the folders that are still to be copied to nodes hold the authority's certificate."""
    for place in (folder / FOR_NODES).glob("*"):
        _write(place / CA, (folder / CA).read_bytes())


def _give_key(folder: Path, name: str) -> Path:
    """Make a node's key, and register it."""
    place, public = folder / FOR_NODES / name, _file_of(folder, REGISTERED, name)
    key = new_secret()
    for made in (folder / FOR_NODES, place, public.parent):
        _make_folder(made)
    _write(place / CA, (folder / CA).read_bytes())
    _write(place / NODE_KEY, _pem(key, PrivateFormat.OpenSSH), secret=True)
    _write(public, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")
    return place


def _registered_key(folder: Path, name: str) -> NodeKey:
    public = _file_of(folder, REGISTERED, name)
    if not public.is_file():
        known = ", ".join(registered(folder)) or "none"
        raise ConfigError(f"{folder} has no node {name}; registered: {known}")
    return present_key(public)


def _note_former(folder: Path, key: NodeKey) -> None:
    """Add a former key to the file of its node."""
    place = _file_of(folder, FORMER, key.node)
    _make_folder(place.parent)
    _write_former(place, [*former_keys(place), key])


def _end_former(folder: Path, name: str, *, revoked: bool) -> None:
    """End the former keys of a node that still count."""
    now, place = datetime.now(UTC), _file_of(folder, FORMER, name)
    if any(key.counts(now) for key in former_keys(place)):
        ended = [replace(key, ends=now, revoked=revoked) if key.counts(now) else key for key in former_keys(place)]
        _write_former(place, ended)


def _write_former(place: Path, keys: Sequence[NodeKey]) -> None:
    _write(place, "".join(key.line for key in keys).encode())


def _changing(folder: Path, patience: float) -> AbstractContextManager[None]:
    """Nobody else changes the keys of nodes inside this block."""
    return locked(folder / ".lock", patience, f"another command is changing the keys in {folder}; try again")


def _file_of(folder: Path, kind: str, name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"node {name!r}: expected up to 64 letters, digits, '.', '_' and '-'")
    return folder / kind / f"{name}.pub"


def _pem(key: ec.EllipticCurvePrivateKey, form: PrivateFormat) -> bytes:
    return key.private_bytes(Encoding.PEM, form, NoEncryption())


def _make_folder(folder: Path) -> None:
    """Make a folder into which no other user can look, if there is none."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _write(path: Path, content: bytes, *, secret: bool = False) -> None:
    """Write a file as a whole: whoever reads it meanwhile gets the one before or this one."""
    aside = path.with_name(f".{path.name}.new")
    aside.unlink(missing_ok=True)
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
