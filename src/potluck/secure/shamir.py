"""Shamir's secret sharing: of a secret's shares so many give it back, and fewer tell nothing.

Shamir. Communications of the ACM, 1979. A polynomial with the secret as its constant term and otherwise random
coefficients modulo a prime; a holder's share is its value at the holder's number. The version of pycryptodome
takes secrets of 16 bytes, two for each of ours, and some hundred times as long: half a minute for one among 1,000.
"""

import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache

PRIME = 2**257 - 93
"""The largest prime below 2^257, above every secret."""

SECRET_BYTES, SHARE_BYTES = 32, 33


def secret_shares(secret: bytes, holders: Sequence[int], needed: int) -> list[bytes]:
    """A share of a secret of 32 bytes for each holder, 33 bytes, of which any `needed` give it back.

    Args:
        secret: the secret.
        holders: their numbers, from 1.
        needed: how many shares are needed.
    """
    if len(secret) != SECRET_BYTES or min(holders, default=1) < 1 or needed < 1:
        raise ValueError(f"expected a secret of {SECRET_BYTES} bytes, and holders and needed from 1")
    terms = [secrets.randbelow(PRIME) for _ in range(needed - 1)] + [int.from_bytes(secret, "big")]
    found: list[bytes] = []
    for holder in holders:
        value = 0
        for term in terms:  # Horner's rule
            value = (value * holder + term) % PRIME
        found.append(value.to_bytes(SHARE_BYTES, "big"))
    return found


def secret_from(shares: Mapping[int, bytes]) -> bytes:
    """The secret, from exactly as many shares as are needed, by holder.

    Fewer give another one, and so do shares that were changed: compare it with what is known of it.

    Raises:
        ValueError: the shares are those of no secret of 32 bytes.
    """
    values = [int.from_bytes(share, "big") for share in shares.values()]
    value = sum(factor * share for factor, share in zip(_at_zero(tuple(shares)), values, strict=True)) % PRIME
    if value >> 8 * SECRET_BYTES:
        raise ValueError("shares that are of no secret")
    return value.to_bytes(SECRET_BYTES, "big")


@lru_cache(maxsize=8)
def _at_zero(holders: tuple[int, ...]) -> tuple[int, ...]:
    """What each holder's share counts in the polynomial's value at 0: Lagrange's interpolation."""
    found: list[int] = []
    for own in holders:
        above, below = 1, 1
        for other in holders:
            if other != own:
                above, below = above * other % PRIME, below * (other - own) % PRIME
        found.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(found)
