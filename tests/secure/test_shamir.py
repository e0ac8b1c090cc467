import itertools
import secrets

import pytest
import sympy

from potluck.secure.shamir import PRIME, SHARE_BYTES, secret_from, secret_shares


def joined(shares):
    """What the shares give: a secret, or None."""
    try:
        return secret_from(shares)
    except ValueError:
        return None


def test_the_modulus_is_the_largest_prime_below_2_to_the_257():
    assert sympy.isprime(PRIME)
    assert sympy.prevprime(2**257) == PRIME


@pytest.mark.parametrize("secret", [bytes(32), b"\xff" * 32, bytes(range(32))])
def test_any_three_of_five_shares_give_the_secret_back_and_no_two_do(secret):
    shares = dict(zip((1, 2, 5, 9, 1000), secret_shares(secret, (1, 2, 5, 9, 1000), 3), strict=True))
    assert {len(share) for share in shares.values()} == {SHARE_BYTES}
    for some in itertools.permutations(shares, 3):
        assert joined({holder: shares[holder] for holder in some}) == secret
    for two in itertools.combinations(shares, 2):
        assert joined({holder: shares[holder] for holder in two}) != secret


def test_two_of_three_shares_fit_every_secret():
    """Whatever the secret is said to be, some third share would confirm it: two tell nothing."""
    one, other, _ = secret_shares(secrets.token_bytes(32), (1, 2, 3), 3)
    for claimed in (bytes(32), b"\x01" * 32, secrets.token_bytes(32)):
        # f(0) = 3 f(1) - 3 f(2) + f(3) for polynomials of degree 2
        zero, first, second = (int.from_bytes(share, "big") for share in (claimed, one, other))
        third = (zero - 3 * first + 3 * second) % PRIME
        assert joined({1: one, 2: other, 3: third.to_bytes(SHARE_BYTES, "big")}) == claimed


def test_a_share_that_was_changed_does_not_give_the_secret():
    secret = secrets.token_bytes(32)
    one, other = secret_shares(secret, (1, 2), 2)
    assert joined({1: one, 2: other}) == secret
    assert joined({1: one, 2: bytes([*other[:-1], other[-1] ^ 1])}) != secret


def test_what_is_above_every_secret_is_none():
    with pytest.raises(ValueError, match="no secret"):
        secret_from({1: (2**256).to_bytes(SHARE_BYTES, "big")})


@pytest.mark.parametrize(
    ("secret", "holders", "needed"), [(b"short", (1,), 1), (bytes(32), (0, 1), 1), (bytes(32), (1,), 0)]
)
def test_a_share_at_zero_which_is_the_secret_is_refused_and_so_are_other_sizes(secret, holders, needed):
    with pytest.raises(ValueError, match="expected a secret of 32 bytes"):
        secret_shares(secret, holders, needed)
