"""Certificates: an authority's own, those of a server and of holders of keys, which it signs, and bridges.

All authorities have one name, and differ by their keys. A bridge is the successor's key, signed by the former's: who
knows the former alone trusts by it what the successor has signed, until the bridge ends. So a server can change its
authority at once, and nodes get to know the new one one by one. By a bridge back, the former's key signed by the
successor, a server trusts the certificates that nodes have of the former.
"""

import ipaddress
import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from potluck.core.ground.errors import ConfigError

MOST_DAYS = 3650
"""The days for which an authority's own certificate is valid, and the most for which another is."""

_AUTHORITY, _SERVER = (
    x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Potluck {role}")]) for role in ("authority", "server")
)
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


def new_secret() -> ec.EllipticCurvePrivateKey:
    """A secret key of the kind that authorities, servers and nodes have."""
    return ec.generate_private_key(ec.SECP384R1())


def address_names(addresses: Iterable[str]) -> list[x509.GeneralName]:
    """Host names and IP addresses as certificates have them.

    Raises:
        ConfigError: one is neither.
    """
    return [_name(address) for address in addresses]


def certificate_of_authority(authority: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    """An authority's certificate, signed by itself."""
    return _of_authority(authority.public_key(), authority, datetime.now(UTC) + timedelta(days=MOST_DAYS))


def bridge(
    successor: ec.EllipticCurvePublicKey, former: ec.EllipticCurvePrivateKey, ends: datetime
) -> x509.Certificate:
    """The successor's certificate for those who know the former authority.

    It bears the name of the one who signs it, so that it is no step of a chain by the rules of certificates, and the
    former authority, which may have no other authority below it, may sign it.
    """
    return _of_authority(successor, former, ends)


def certificate_of_server(
    names: Iterable[x509.GeneralName],
    server: ec.EllipticCurvePublicKey,
    authority: ec.EllipticCurvePrivateKey,
    days: int,
) -> x509.Certificate:
    """A server's certificate for these names, for so many days from now."""
    return (
        _certificate(_SERVER, server, authority, datetime.now(UTC) + timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(authority, hashes.SHA384())
    )


def certificate_of_holder(
    name: str, key: ec.EllipticCurvePublicKey, authority: ec.EllipticCurvePrivateKey, ends: datetime
) -> x509.Certificate:
    """The certificate by which the holder of a key is known before it says anything. It passes for no server's."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    return (
        _certificate(subject, key, authority, ends)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(authority, hashes.SHA384())
    )


def certificates_in(path: Path) -> list[x509.Certificate]:
    """The certificates in a file, of which there is at least one.

    Raises:
        ConfigError: there is no such file, or it does not hold any.
    """
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except FileNotFoundError as error:
        raise ConfigError(f"{path} not found; expected a certificate") from error
    except ValueError as error:
        raise ConfigError(f"{path} holds no certificate: {error}") from error


def end_of(path: Path) -> datetime:
    """When the first certificate in a file ends.

    Raises:
        ConfigError: there is none.
    """
    return certificates_in(path)[0].not_valid_after_utc


def as_pem(certificates: Iterable[x509.Certificate]) -> bytes:
    """The content of a file with these certificates."""
    return b"".join(certificate.public_bytes(Encoding.PEM) for certificate in certificates)


def key_in(certificate: x509.Certificate) -> bytes:
    """The public key of a certificate, in the format of nodes' requests."""
    return certificate.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def addresses_in(certificate: x509.Certificate) -> list[str]:
    """The host names and IP addresses that a server's certificate is for."""
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names]


def fingerprint_of(path: Path) -> str:
    """64 hex digits by which the first certificate in a file is known.

    Raises:
        ConfigError: there is none.
    """
    return certificates_in(path)[0].fingerprint(hashes.SHA256()).hex()


def _of_authority(
    key: ec.EllipticCurvePublicKey, signer: ec.EllipticCurvePrivateKey, ends: datetime
) -> x509.Certificate:
    usage = x509.KeyUsage(
        digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    return (
        _certificate(_AUTHORITY, key, signer, ends)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .sign(signer, hashes.SHA384())
    )


def _certificate(
    subject: x509.Name, key: ec.EllipticCurvePublicKey, signer: ec.EllipticCurvePrivateKey, ends: datetime
) -> x509.CertificateBuilder:
    of_signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(_AUTHORITY)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - timedelta(hours=1))  # tolerance for wrong clocks of small devices
        .not_valid_after(ends)
        .add_extension(of_signer, critical=False)  # authorities have one name: this tells which of them signed
    )


def _name(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        pass
    if not _HOST.fullmatch(address):
        raise ConfigError(f"--address {address}: expected a host name or an IP address, without port")
    return x509.DNSName(address)
