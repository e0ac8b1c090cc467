"""Keys: a certificate for the server, a key for every node.

keys/                      stays with the server
  ca.key  ca.crt           signs the server's certificate
  server.key  server.crt   the server shows it to nodes
  registered/NAME.pub      nodes that may take part; delete a node's file to revoke it
  nodes/NAME/              copy it to the node, and nowhere else
    ca.crt                 by which it knows the server
    node.key               by which the server knows it
"""

import ipaddress
import re
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from potluck.core.ground.errors import ConfigError

CA_KEY, CA, SERVER_KEY, SERVER, NODE_KEY = "ca.key", "ca.crt", "server.key", "server.crt", "node.key"
_REGISTERED, _NODES = "registered", "nodes"
_LONGEST = 3650  # days of the authority's own certificate
_SOON = timedelta(days=30)
_RENEWAL = {
    SERVER: "make a new one with all addresses, and start the server anew: potluck keys FOLDER --address HOST",
    CA: "make new keys in another folder, and copy each node its own",
}
_LOCAL = ("localhost", "127.0.0.1")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def certify(folder: Path, addresses: Sequence[str], days: int) -> None:
    """Make the server's certificate, and the certificate authority that signs it if there is none yet.

    Args:
        folder: the folder of the keys.
        addresses: host names and IP addresses under which nodes reach the server; this machine's own are added.
        days: days until it expires.

    Raises:
        ConfigError: an address is not a host name or an IP address; the days are none, or more than the authority's.
    """
    if not 1 <= days <= _LONGEST:
        raise ConfigError(f"--days {days}: expected a number from 1 to {_LONGEST}")
    names = [_address(address) for address in dict.fromkeys([*addresses, *_LOCAL])]
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / CA_KEY).is_file():
        _make_authority(folder)
    authority = load_pem_private_key((folder / CA_KEY).read_bytes(), None)
    issuer = x509.load_pem_x509_certificate((folder / CA).read_bytes())
    assert isinstance(authority, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP384R1())
    certificate = (
        _certificate("Potluck server", key, issuer.subject, days)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA384())
    )
    _write_secret(folder / SERVER_KEY, _pem(key, PrivateFormat.PKCS8))
    (folder / SERVER).write_bytes(certificate.public_bytes(Encoding.PEM))


def add_node(folder: Path, name: str) -> Path:
    """Make a node's key, register it, and return the folder to copy to the node.

    Raises:
        ConfigError: the name is taken or invalid, or there is no certificate yet.
    """
    public, place = folder / _REGISTERED / f"{_named(name)}.pub", folder / _NODES / name
    if public.exists() or place.exists():
        raise ConfigError(f"{place} is there already; revoke {name} before it gets a new key")
    if not (folder / CA).is_file():
        raise ConfigError(f"{folder / CA} is missing; make it first: potluck keys {folder} --address HOST")
    key = ec.generate_private_key(ec.SECP384R1())
    place.mkdir(parents=True)
    public.parent.mkdir(exist_ok=True)
    shutil.copy(folder / CA, place / CA)
    _write_secret(place / NODE_KEY, _pem(key, PrivateFormat.OpenSSH))
    public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")
    return place


def revoke_node(folder: Path, name: str) -> None:
    """Revoke a node; a running server notices within seconds.

    Raises:
        ConfigError: there is no such node.
    """
    public = folder / _REGISTERED / f"{_named(name)}.pub"
    if not public.is_file():
        known = ", ".join(registered(folder)) or "none"
        raise ConfigError(f"{folder} has no node {name}; registered: {known}")
    public.unlink()
    shutil.rmtree(folder / _NODES / name, ignore_errors=True)


def registered(folder: Path) -> dict[str, Path]:
    """The public keys of the nodes that may take part, by name."""
    return {path.stem: path for path in sorted((folder / _REGISTERED).glob("*.pub"))}


def key_of(public: Path) -> bytes:
    """A registered key in the format of a node's requests.

    Raises:
        ConfigError: the file does not hold a public key.
    """
    try:
        return load_ssh_public_key(public.read_bytes()).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{public} holds no public key: {error}") from error


def public_key_of(place: Path) -> bytes:
    """The key in a node's folder, in the format of its requests."""
    key = load_ssh_private_key((place / NODE_KEY).read_bytes(), None)
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def check_served(folder: Path) -> None:
    """Check that a server can use these keys.

    Raises:
        ConfigError: something is missing, or has expired.
    """
    _check(folder, (CA, SERVER, SERVER_KEY), f"potluck keys {folder} --address HOST --node NAME")
    for name, remedy in _RENEWAL.items():
        if (end := _end_of(folder / name)) <= datetime.now(UTC):
            raise ConfigError(f"{folder / name} expired on {end:%Y-%m-%d}, so nodes refuse it; {remedy}")


def expiring(folder: Path) -> list[str]:
    """Warnings, for a server's certificate and its authority's, of those that expire within 30 days."""
    return [
        f"{folder / name} expires on {end:%Y-%m-%d}, and nodes will refuse it; {_RENEWAL[name]}"
        for name, end in ends_in(folder).items()
        if end - datetime.now(UTC) < _SOON
    ]


def ends_in(folder: Path) -> dict[str, datetime]:
    """When a server's certificate and its authority's expire, by the names of their files.

    Raises:
        ConfigError: a file does not hold one.
    """
    return {name: _end_of(folder / name) for name in _RENEWAL}


def check_carried(folder: Path) -> None:
    """Check that a node can use these keys.

    Raises:
        ConfigError: something is missing.
    """
    _check(folder, (CA, NODE_KEY), "copy nodes/NAME, which `potluck keys` made on the server, to this machine")


def _check(folder: Path, names: Sequence[str], remedy: str) -> None:
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ConfigError(f"{folder}: {', '.join(missing)} not found; {remedy}")


def _end_of(certificate: Path) -> datetime:
    """When a certificate expires.

    Raises:
        ConfigError: the file does not hold one.
    """
    try:
        return x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc
    except ValueError as error:
        raise ConfigError(f"{certificate} holds no certificate: {error}") from error


def _make_authority(folder: Path) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    usage = x509.KeyUsage(
        digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    certificate = (
        _certificate("Potluck authority", key, None, _LONGEST)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    _write_secret(folder / CA_KEY, _pem(key, PrivateFormat.PKCS8))
    (folder / CA).write_bytes(certificate.public_bytes(Encoding.PEM))


def _certificate(
    name: str, key: ec.EllipticCurvePrivateKey, issuer: x509.Name | None, days: int
) -> x509.CertificateBuilder:
    subject, now = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer or subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # tolerance for wrong clocks of small devices
        .not_valid_after(now + timedelta(days=days))
    )


def _address(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        pass
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", address):
        raise ConfigError(f"--address {address}: expected a host name or an IP address, without port")
    return x509.DNSName(address)


def _named(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"node {name!r}: expected up to 64 letters, digits, '.', '_' and '-'")
    return name


def _pem(key: ec.EllipticCurvePrivateKey, form: PrivateFormat) -> bytes:
    return key.private_bytes(Encoding.PEM, form, NoEncryption())


def _write_secret(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(content)
