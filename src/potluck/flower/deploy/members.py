"""Who asks: the keys of nodes or of observers, and the proof that a caller holds one.

Flower's nodes sign the time of every request. The SuperLink checks the signature, but only after it has read the
request; the gate checks it first, so that a public key in a header, which is no secret, opens nothing. Who was
asked for a certificate has proven in the handshake that the key in it is its own.
"""

import binascii
import re
from base64 import b64decode
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from cryptography.x509 import load_der_x509_certificate

from potluck.core.ground.errors import PotluckError
from potluck.flower.deploy.certificates import key_in
from potluck.flower.deploy.keys import retire_former_keys
from potluck.flower.deploy.registry import RegisteredKey, Registry
from potluck.flower.deploy.requests import Inadmissible
from potluck.flower.deploy.roles import NODE, Role

KEY_HEADER, TIME_HEADER, SIGNATURE_HEADER = "flwr-public-key", "flwr-timestamp", "flwr-signature"
"""Headers of Flower's requests: the node's key, the time, and the key's signature of the time."""

_CLOCKS_APART = 5.0
_SIGNED_WITHIN = 300.0 + _CLOCKS_APART
"""Seconds that a clock may be ahead, and that a signature counts; Flower's."""

_TIME = re.compile(r"[0-9T:.+-]{19,40}")
_LONGEST_PROOF = 1024  # characters of a key or a signature in a header


@dataclass(frozen=True)
class Caller:
    """A node that has proven who it is.

    Attributes:
        key: its public key, as PEM.
        name: under which it is registered; "node" if keys are not used.
        host: the address from which it calls.
        proof: the headers by which it did so, for the SuperLink.
    """

    key: bytes
    name: str
    host: str
    proof: Mapping[str, str]

    @property
    def registered(self) -> str:
        """The name of its key; nothing if keys are not used."""
        return self.name.removeprefix("node").lstrip()

    def __str__(self) -> str:
        return f"{self.name} at {self.host}"


class Members:
    """The keys of those who have a role, read again when their files change.

    Args:
        keys: folder of `potluck keys`; None if everybody with a key of their own may take part.
        role: whose keys.
    """

    def __init__(self, keys: Path | None, role: Role = NODE) -> None:
        self._registry = None if keys is None else Registry(role.registry_in(keys))
        self._role = role
        self._ended = set[bytes]()

    def meet(self, certificate: bytes | None) -> None:
        """Check that the key in a certificate, in DER, that a caller has shown in its handshake is of somebody here.

        Raises:
            Inadmissible: it has shown none; the key is not registered, or counts no more.
        """
        if certificate is None:
            raise Inadmissible(403, "it shows no certificate")
        pem = key_in(load_der_x509_certificate(certificate))
        self._counting(pem)
        self._end_former(pem)

    def shown(self, headers: Mapping[str, str]) -> tuple[str, str]:
        """The key that a request shows, in the format of requests, and its name.

        Raises:
            Inadmissible: it is not registered, or counts no more.
        """
        shown = headers.get(KEY_HEADER, "")
        if self._registry is None:
            return shown, "node"
        return shown, f"node {self._counting(_decoded(shown)).name}"

    def notices(self, headers: Mapping[str, str]) -> list[str]:
        """What the owner of a node that shows this key should know of it."""
        key = None if self._registry is None else self._registry.keys().get(_decoded(headers.get(KEY_HEADER, "")))
        if key is None or key.ends is None:
            return []
        return [
            f"this node's key has a successor, and counts until {key.ends:%Y-%m-%d}: copy nodes/{key.name} of the"
            " server's keys over the files here"
        ]

    def prove(self, headers: Mapping[str, str], host: str) -> Caller:
        """Who signed a request.

        Raises:
            Inadmissible: no registered key did, or not now.
        """
        shown, name = self.shown(headers)
        time, signature = headers.get(TIME_HEADER, ""), headers.get(SIGNATURE_HEADER, "")
        if not _TIME.fullmatch(time) or max(len(shown), len(signature)) > _LONGEST_PROOF:
            raise Inadmissible(401, "it does not sign its requests")
        try:
            key = b64decode(shown, validate=True)
            _public_key(key).verify(
                b64decode(signature, validate=True), time.encode("ascii"), ec.ECDSA(hashes.SHA256())
            )
            ahead = (datetime.fromisoformat(time) - datetime.now(UTC)).total_seconds()
        except (InvalidSignature, UnsupportedAlgorithm, ValueError, TypeError, binascii.Error) as error:
            raise Inadmissible(401, "its signature is not its key's") from error
        if not -_SIGNED_WITHIN < ahead < _CLOCKS_APART:
            way = "ahead of" if ahead > 0 else "behind"
            raise Inadmissible(401, f"its clock is {abs(ahead):.0f} s {way} the server's")
        self._end_former(key)
        return Caller(key, name, host, {KEY_HEADER: shown, TIME_HEADER: time, SIGNATURE_HEADER: signature})

    def _counting(self, pem: bytes) -> RegisteredKey:
        """The registered key with this public key, in the format of requests.

        Raises:
            Inadmissible: there is none, or it counts no more.
        """
        key = None if self._registry is None else self._registry.keys().get(pem)
        if key is None:
            raise Inadmissible(
                403, f"its key is not registered{'' if self._role is NODE else f' as an {self._role.word}'}"
            )
        if not self._counts(key):
            raise Inadmissible(403, _why_not(key, self._role))
        return key

    def _counts(self, key: RegisteredKey) -> bool:
        return key.counts(datetime.now(UTC)) and key.pem not in self._ended

    def _end_former(self, pem: bytes) -> None:
        """Have the former keys of a holder that has come with its present one count no more."""
        keys = {} if self._registry is None else self._registry.keys()
        present = keys.get(pem)
        if self._registry is None or present is None or present.ends is not None:
            return
        former = {key.pem for key in keys.values() if key.name == present.name and key.pem != pem and self._counts(key)}
        if former:
            self._ended |= former  # at least while this server runs: the folder may be one that it only reads
            with suppress(PotluckError, OSError):
                retire_former_keys(self._registry.folder, present.name)


def _why_not(key: RegisteredKey, role: Role) -> str:
    """Why a key that is known counts no more."""
    if key.revoked:
        return f"its key, of {role.word} {key.name}, was revoked on {key.ends:%Y-%m-%d at %H:%M} UTC"
    copied = f"copy {role.carried}/{key.name} of the server's keys to it"
    mend = f"{copied}, or make another: potluck keys KEYS --renew {key.name}"
    return f"its key, of {role.word} {key.name}, has a successor and counts no more; {mend}"


def _decoded(shown: str) -> bytes:
    """A key in a header, as PEM; nothing if it is none."""
    try:
        return b64decode(shown[:_LONGEST_PROOF], validate=True)
    except (ValueError, binascii.Error):
        return b""


@lru_cache(maxsize=1024)
def _public_key(pem: bytes) -> ec.EllipticCurvePublicKey:
    key = load_pem_public_key(pem)
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("not a key of Flower's kind")
    return key
