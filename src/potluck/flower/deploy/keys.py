"""Keys: a certificate for the server, a key for every node and observer, and how each gets a successor while all run.

keys/                      stays with the server
  ca.key  ca.crt           signs the server's certificate, and those of nodes and observers
  bridges.crt              by which nodes that know a former authority trust this one
  formers.crt              by which this server trusts certificates that nodes have of a former authority
  server.key  server.crt   the server shows it to nodes
  registered/NAME.pub      nodes that may take part; delete a node's file to revoke it
  former/NAME.pub          keys that the node had before, each with its end
  observing/               registered/ and former/ of observers
  certificates/NAME.crt    the present certificate of each node and observer
  nodes/NAME/              copy it to the node, and nowhere else
    ca.crt                 by which it knows the server
    node.key               by which the server knows it
    node.crt               by which the server knows it before it says anything, if it wants that
  observers/NAME/          likewise, with observer.key and observer.crt
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
    load_pem_public_key,
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
    certificate_of_holder,
    certificate_of_server,
    certificates_in,
    end_of,
    new_secret,
)
from potluck.flower.deploy.registry import FORMER, REGISTERED, RegisteredKey, former_keys, present_key, registered
from potluck.flower.deploy.roles import NODE, OBSERVER, ROLES, Role
from potluck.locks import locked

CA_KEY, CA, SERVER_KEY, SERVER = "ca.key", "ca.crt", "server.key", "server.crt"
NODE_KEY, FOR_NODES = NODE.secret, NODE.carried
BRIDGES, FORMERS = "bridges.crt", "formers.crt"
"""The certificates that `server.crt` has beside its own, newest first; and those by which a server trusts certificates
of nodes that a former authority has signed."""

CERTIFICATES = "certificates"
"""The folder with the present certificate of each node and observer."""

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

    All that it has signed stays valid. A node needs the new certificate before its own one ends. All nodes get
    certificates that end with it.

    Raises:
        ConfigError: the authority's secret key is not there.
    """
    authority = _secret(folder)
    _write(folder / CA, as_pem([certificate_of_authority(authority)]))
    _hand_out(folder, authority)
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
    ends = max(datetime.now(UTC), min(end_of(folder / CA), _end_of_overlap(overlap)))
    bridges = [bridge(successor.public_key(), former, ends), *bridges_in(folder)]
    back = bridge(former.public_key(), successor, ends)
    again = [one for one in formers_in(folder) if one.public_key() != former.public_key()]
    names = address_names(addresses_in(certificates_in(folder / SERVER)[0]))
    _write(folder / BRIDGES, as_pem(bridges))
    _write(folder / FORMERS, as_pem([back, *again]))
    _show(folder, successor, names, days, bridges)  # before the former key goes: until then all can be done again
    _write(folder / CA_KEY, _pem(successor, PrivateFormat.PKCS8), secret=True)
    _write(folder / CA, as_pem([certificate_of_authority(successor)]))
    _hand_out(folder, successor)
    return ends


def add_node(folder: Path, name: str) -> Path:
    """Make a node's key, register it, and return the folder to copy to the node.

    It gets a certificate that ends with the authority's, if the authority's secret key is there.

    Raises:
        ConfigError: the name is taken or invalid, or there is no certificate yet.
    """
    _check_free(folder, name)
    return _give_key(folder, NODE, name, end_of(folder / CA))


def add_observer(folder: Path, name: str, days: int) -> Path:
    """Make an observer's key and certificate, register it, and return the folder to copy to the observer.

    Args:
        folder: the folder of the keys.
        name: the observer's, which no node has.
        days: days until its certificate ends.

    Raises:
        ConfigError: the name is taken or invalid; the days are none, or too many; the authority's secret key is not
            there.
    """
    _check_days(days)
    _check_free(folder, name)
    _authority(folder)  # without a certificate an observer is nobody
    return _give_key(folder, OBSERVER, name, datetime.now(UTC) + timedelta(days=days))


def is_observer(folder: Path, name: str) -> bool:
    """Whether an observer has this name.

    Raises:
        ConfigError: it is no name.
    """
    return _file_of(OBSERVER.registry_in(folder), REGISTERED, name).is_file()


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
    return _renew(folder, NODE, name, overlap, end_of(folder / CA))


def renew_observer(folder: Path, name: str, overlap: int, days: int) -> tuple[Path, datetime]:
    """Make an observer another key and certificate, in the same way.

    Args:
        folder: the folder of the keys.
        name: the observer's.
        overlap: days for which it may come with the former key.
        days: days until its new certificate ends.

    Raises:
        ConfigError: there is no such observer; a number is out of range; the authority's secret key is not there.
        HeldError: another command is changing the keys.
    """
    _check_days(days)
    _authority(folder)
    return _renew(folder, OBSERVER, name, overlap, datetime.now(UTC) + timedelta(days=days))


def revoke_node(folder: Path, name: str) -> None:
    """Revoke a node; a running server notices within seconds, and tells the node.

    Raises:
        ConfigError: there is no such node.
        HeldError: another command is changing the keys.
    """
    _revoke(folder, NODE, name)


def revoke_observer(folder: Path, name: str) -> None:
    """Revoke an observer, in the same way.

    Raises:
        ConfigError: there is no such observer.
        HeldError: another command is changing the keys.
    """
    _revoke(folder, OBSERVER, name)


def retire_former_keys(folder: Path, name: str) -> None:
    """End the former keys of a holder, which has come with its new one.

    Args:
        folder: the folder of `Role.registry_in`.
        name: the holder's.

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
    return _not_ended(folder / BRIDGES)


def formers_in(folder: Path) -> list[Certificate]:
    """The certificates, by the present authority, of former ones that have not ended.

    Raises:
        ConfigError: their file holds no certificate.
    """
    return _not_ended(folder / FORMERS)


def public_key_of(place: Path) -> bytes:
    """The key in a node's folder, in the format of its requests.

    Raises:
        ConfigError: the file does not hold a secret key.
    """
    return node_secret(place).public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def node_secret(place: Path) -> ec.EllipticCurvePrivateKey:
    """The secret key in a node's folder.

    Raises:
        ConfigError: the file does not hold one.
    """
    try:
        key = load_ssh_private_key((place / NODE_KEY).read_bytes(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{place / NODE_KEY} holds no secret key of a node: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{place / NODE_KEY} holds a key of another kind; expected one that `potluck keys` made")
    return key


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


def _hand_out(folder: Path, authority: ec.EllipticCurvePrivateKey) -> None:
    """Have the folders that are to be copied to all holders of keys hold new certificates, the authority's and theirs.

    A node's own one ends with the authority's, an observer's when the one before would have.
    """
    for role in ROLES:
        for name, public in registered(role.registry_in(folder)).items():
            before = folder / CERTIFICATES / f"{name}.crt"
            if role is NODE or before.is_file():
                ends = end_of(folder / CA) if role is NODE else end_of(before)
                if datetime.now(UTC) < ends:
                    _certify_holder(folder, role, present_key(public), authority, ends)


def _certify_holder(
    folder: Path, role: Role, key: RegisteredKey, authority: ec.EllipticCurvePrivateKey, ends: datetime
) -> None:
    """Put the certificate of a key, and the authority's, into the folder that is to be copied to its holder."""
    public = load_pem_public_key(key.pem)
    if not isinstance(public, ec.EllipticCurvePublicKey):
        return  # somebody else's key, which was put there by hand
    place, kept = folder / role.carried / key.name, folder / CERTIFICATES
    for made in (place.parent, place, kept):
        _make_folder(made)
    _write(place / CA, (folder / CA).read_bytes())
    content = as_pem([certificate_of_holder(key.name, public, authority, ends)])
    for file in (place / role.certificate, kept / f"{key.name}.crt"):
        _write(file, content)


def _give_key(folder: Path, role: Role, name: str, ends: datetime) -> Path:
    """Make a key and, if the authority's secret key is there, its certificate; register it."""
    place, public = folder / role.carried / name, _file_of(role.registry_in(folder), REGISTERED, name)
    certifies = (folder / CA_KEY).is_file() and datetime.now(UTC) < ends
    key, authority = new_secret(), _authority(folder) if certifies else None
    for made in (place.parent, place, public.parent.parent, public.parent):
        _make_folder(made)
    if authority is None:
        for former in (place / role.certificate, folder / CERTIFICATES / f"{name}.crt"):
            former.unlink(missing_ok=True)  # it is of the former key
    _write(place / CA, (folder / CA).read_bytes())
    form = PrivateFormat.OpenSSH if role is NODE else PrivateFormat.PKCS8  # what Flower, and what all others read
    _write(place / role.secret, _pem(key, form), secret=True)
    _write(public, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")
    if authority is not None:
        _certify_holder(folder, role, present_key(public), authority, ends)
    return place


def _check_free(folder: Path, name: str) -> None:
    """Check that nobody has a name, which is one node's or one observer's, and that there is an authority.

    Raises:
        ConfigError: somebody has it, it is no name, or there is none.
    """
    for role in ROLES:
        public = _file_of(role.registry_in(folder), REGISTERED, name)
        if public.exists() or (folder / role.carried / name).exists():
            raise ConfigError(
                f"{role.word} {name} has a key; renew it, or revoke {name} before it gets another one: potluck keys"
                f" {folder} --renew {name}"
            )
    if not (folder / CA).is_file():
        raise ConfigError(f"{folder / CA} is missing; make it first: potluck keys {folder} --address HOST")


def _renew(folder: Path, role: Role, name: str, overlap: int, certified: datetime) -> tuple[Path, datetime]:
    """Make another key, with a certificate up to a moment; the former one counts until the moment that is returned."""
    ends, registry = _end_of_overlap(overlap), role.registry_in(folder)
    _registered_key(folder, role, name)  # before that there may be no folder in which to keep others out
    with _changing(registry, _ALONE):
        _note_former(registry, replace(_registered_key(folder, role, name), ends=ends))
        return _give_key(folder, role, name, certified), ends


def _revoke(folder: Path, role: Role, name: str) -> None:
    registry = role.registry_in(folder)
    _registered_key(folder, role, name)  # as there
    with _changing(registry, _ALONE):
        _note_former(registry, replace(_registered_key(folder, role, name), ends=datetime.now(UTC), revoked=True))
        _end_former(registry, name, revoked=True)
        _file_of(registry, REGISTERED, name).unlink()
    (folder / CERTIFICATES / f"{name}.crt").unlink(missing_ok=True)
    shutil.rmtree(folder / role.carried / name, ignore_errors=True)


def _registered_key(folder: Path, role: Role, name: str) -> RegisteredKey:
    registry = role.registry_in(folder)
    public = _file_of(registry, REGISTERED, name)
    if not public.is_file():
        known = ", ".join(registered(registry)) or "none"
        raise ConfigError(f"{folder} has no {role.word} {name}; registered: {known}")
    return present_key(public)


def _note_former(folder: Path, key: RegisteredKey) -> None:
    """Add a former key to the file of its holder."""
    place = _file_of(folder, FORMER, key.name)
    _make_folder(place.parent)
    _write_former(place, [*former_keys(place), key])


def _end_former(folder: Path, name: str, *, revoked: bool) -> None:
    """End the former keys of a holder that still count."""
    now, place = datetime.now(UTC), _file_of(folder, FORMER, name)
    if any(key.counts(now) for key in former_keys(place)):
        ended = [replace(key, ends=now, revoked=revoked) if key.counts(now) else key for key in former_keys(place)]
        _write_former(place, ended)


def _write_former(place: Path, keys: Sequence[RegisteredKey]) -> None:
    _write(place, "".join(key.line for key in keys).encode())


def _changing(folder: Path, patience: float) -> AbstractContextManager[None]:
    """Nobody else changes the keys in a folder of `Role.registry_in` inside this block."""
    return locked(folder / ".lock", patience, f"another command is changing the keys in {folder}; try again")


def _file_of(folder: Path, kind: str, name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"name {name!r}: expected up to 64 letters, digits, '.', '_' and '-'")
    return folder / kind / f"{name}.pub"


def _not_ended(place: Path) -> list[Certificate]:
    """The certificates in a file, which need not be there, that have not ended."""
    found = certificates_in(place) if place.is_file() else []
    return [one for one in found if datetime.now(UTC) < one.not_valid_after_utc]


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
