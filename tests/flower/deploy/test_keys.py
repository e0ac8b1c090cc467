"""Keys are made once, kept secret, and found wanting in words."""

import ipaddress
import re
import stat

import pytest
from cryptography import x509

from potluck.core.ground.errors import ConfigError
from potluck.flower.deploy.keys import (
    add_node,
    certify,
    check_carried,
    check_served,
    expiring,
    key_of,
    registered,
    revoke_node,
)


@pytest.fixture
def keys(tmp_path):
    certify(tmp_path / "keys", ["fl.example.org", "10.0.0.7"], days=30)
    return tmp_path / "keys"


def names_in(path):
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value


def test_the_server_is_known_by_its_addresses_and_this_machines_own(keys):
    names = names_in(keys / "server.crt")
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org", "localhost"]
    assert names.get_values_for_type(x509.IPAddress) == [
        ipaddress.ip_address("10.0.0.7"),
        ipaddress.ip_address("127.0.0.1"),
    ]


def test_a_new_certificate_is_signed_by_the_old_authority_so_that_nodes_still_trust_it(keys):
    before, old = (keys / "ca.crt").read_bytes(), (keys / "server.crt").read_bytes()
    certify(keys, ["other.example.org"], days=30)
    assert (keys / "ca.crt").read_bytes() == before
    assert (keys / "server.crt").read_bytes() != old
    authority, server = (
        x509.load_pem_x509_certificate((keys / name).read_bytes()) for name in ("ca.crt", "server.crt")
    )
    server.verify_directly_issued_by(authority)


def test_secrets_are_for_their_owner_alone(keys):
    place = add_node(keys, "a")
    for secret in (keys / "ca.key", keys / "server.key", place / "node.key"):
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600


def test_a_node_gets_what_it_needs_and_nothing_else(keys):
    place = add_node(keys, "hospital-a")
    assert sorted(path.name for path in place.iterdir()) == ["ca.crt", "node.key"]
    check_carried(place)
    check_served(keys)
    assert list(registered(keys)) == ["hospital-a"]
    assert key_of(registered(keys)["hospital-a"]).startswith(b"-----BEGIN PUBLIC KEY-----")


def test_a_revoked_node_is_registered_no_more_and_may_get_a_new_key(keys):
    place = add_node(keys, "a")
    old = (place / "node.key").read_bytes()
    revoke_node(keys, "a")
    assert registered(keys) == {}
    assert (add_node(keys, "a") / "node.key").read_bytes() != old


@pytest.mark.parametrize("address", ["fl.example.org:8443", "", "a b", "-x", "10.0.0.7/8"])
def test_what_is_no_address_is_refused(tmp_path, address):
    with pytest.raises(ConfigError, match="without port"):
        certify(tmp_path, [address], days=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "../up", "a b", "a/b", ".hidden"])
def test_what_is_no_name_is_refused(keys, name):
    with pytest.raises(ConfigError, match="expected up to 64"):
        add_node(keys, name)


def test_a_name_is_given_once(keys):
    add_node(keys, "a")
    with pytest.raises(ConfigError, match="revoke a before"):
        add_node(keys, "a")


def test_what_is_missing_is_named_with_its_remedy(keys, tmp_path):
    with pytest.raises(ConfigError, match="registered: none"):
        revoke_node(keys, "b")
    with pytest.raises(ConfigError, match="make it first"):
        add_node(tmp_path / "none", "a")
    with pytest.raises(ConfigError, match=r"node\.key not found; copy nodes/NAME"):
        check_carried(keys)
    with pytest.raises(ConfigError, match=r"ca.crt, server.crt, server.key not found; potluck keys"):
        check_served(tmp_path)


@pytest.mark.parametrize("days", [-1, 0, 3651, 10**9])
def test_days_that_no_certificate_can_have_are_refused(tmp_path, days):
    with pytest.raises(ConfigError, match=f"--days {days}: expected a number from 1 to 3650"):
        certify(tmp_path / "keys", [], days)
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize(
    ("age", "expected"),
    [
        (300, None),
        (340, r"server\.crt expires on .*; make a new one"),
        (366, r"server\.crt expired on .*; make a new one"),
        (3651, r"server\.crt expired on "),
    ],
)
def test_a_server_does_not_start_with_what_has_expired_and_says_what_soon_will(tmp_path, days_ago, age, expected):
    with days_ago(age):
        certify(tmp_path, [], days=365)
    if expected is None or "expires" in expected:
        check_served(tmp_path)
        assert [bool(re.search(expected or "", line)) for line in expiring(tmp_path)] == [True] * (expected is not None)
    else:
        with pytest.raises(ConfigError, match=expected):
            check_served(tmp_path)


def test_an_authority_that_has_expired_is_renewed_by_new_keys_alone(tmp_path, days_ago):
    with days_ago(3651):
        certify(tmp_path, [], days=365)
    certify(tmp_path, [], days=365)
    with pytest.raises(ConfigError, match=r"ca\.crt expired on .*; make new keys in another folder"):
        check_served(tmp_path)


def test_what_is_no_certificate_is_said(keys):
    (keys / "server.crt").write_text("none")
    with pytest.raises(ConfigError, match=r"server\.crt holds no certificate"):
        check_served(keys)
