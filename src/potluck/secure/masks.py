"""Keys that two clients have in common, what they encrypt, and streams of words that look random without the key."""

import hashlib

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from potluck.secure.fixed import Words

KEY_BYTES, SIGNATURE_BYTES, TAG_BYTES = 32, 64, 16
_ONCE = bytes(12)  # the nonce of keys that encrypt one thing


def public_half(secret: bytes) -> bytes:
    """The public half of an X25519 secret."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def both_know(secret: bytes, public: bytes) -> bytes:
    """What the owner of one secret and that of the other's public half both know, by X25519.

    Raises:
        ValueError: the public half is one with which all secrets give the same.
    """
    return X25519PrivateKey.from_private_bytes(secret).exchange(X25519PublicKey.from_public_bytes(public))


def key_for(known: bytes, session: bytes, *purpose: str | int) -> bytes:
    """A key of 32 bytes for one purpose in one session, by HKDF."""
    info = "/".join(map(str, purpose)).encode()
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=session, info=info).derive(known)


def sealed_box(key: bytes, content: bytes) -> bytes:
    """The content encrypted under a key that encrypts nothing else, 16 bytes longer, by AES-GCM."""
    return AESGCM(key).encrypt(_ONCE, content, None)


def opened_box(key: bytes, box: bytes) -> bytes:
    """The content.

    Raises:
        cryptography.exceptions.InvalidTag: it was encrypted under another key, or changed.
    """
    return AESGCM(key).decrypt(_ONCE, box, None)


def stream(key: bytes, count: int, word: int) -> Words:
    """So many words that look random to whoever lacks the key, by AES in counter mode."""
    encryptor = Cipher(AES(key), CTR(bytes(16))).encryptor()
    data = encryptor.update(bytes(count * word // 8))
    return np.frombuffer(data, dtype=f"<u{word // 8}")


def hashed(*parts: bytes) -> bytes:
    """32 bytes that identify these parts in this order, by SHA-256."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "big"))
        found.update(part)
    return found.digest()
