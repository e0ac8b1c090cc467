"""Digests: short text that identifies bytes."""

import hashlib


def digest(data: bytes) -> str:
    """32 hex digits (BLAKE2b, 128 bits) that identify these bytes in checkpoints and records."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()
