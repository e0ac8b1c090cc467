"""Who asks: the registered keys, and the proof that a caller holds one.

Flower's nodes sign the time of every request. The SuperLink checks the signature, but only after it has read the
request; the gate checks it first, so that a public key in a header, which is no secret, opens nothing.
"""

import binascii
import re
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from potluck.flower.deploy.keys import key_of, registered
from potluck.flower.deploy.requests import Inadmissible

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
    """The registered keys, read again when files are added or removed.

    Args:
        keys: folder of `potluck keys`; None if everybody with a key of their own may take part.
    """

    def __init__(self, keys: Path | None) -> None:
        self._keys = keys
        self._files: dict[str, Path] = {}
        self._names: dict[str, str] = {}

    def shown(self, headers: Mapping[str, str]) -> tuple[str, str]:
        """The key that a request shows, in the format of requests, and its name.

        Raises:
            Inadmissible: it is not registered.
        """
        shown = headers.get(KEY_HEADER, "")
        name = self._name_of(shown)
        if name is None:
            raise Inadmissible(403, "its key is not registered")
        return shown, name

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
        return Caller(key, name, host, {KEY_HEADER: shown, TIME_HEADER: time, SIGNATURE_HEADER: signature})

    def _name_of(self, shown: str) -> str | None:
        if self._keys is None:
            return "node"
        files = registered(self._keys)
        if files != self._files:
            self._names = {b64encode(key_of(public)).decode("ascii"): name for name, public in files.items()}
            self._files = files
        found = self._names.get(shown)
        return None if found is None else f"node {found}"


@lru_cache(maxsize=1024)
def _public_key(pem: bytes) -> ec.EllipticCurvePublicKey:
    key = load_pem_public_key(pem)
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("not a key of Flower's kind")
    return key
