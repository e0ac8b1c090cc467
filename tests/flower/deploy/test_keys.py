"""Keys are made once, kept secret, renewed while nodes go on, and found wanting in words."""

import ipaddress
import re
import socket
import ssl
import stat
import threading
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_ssh_private_key

from potluck.core.ground.errors import ConfigError
from potluck.flower.deploy.certificates import key_in
from potluck.flower.deploy.checks import (
    Daily,
    check_carried,
    check_served,
    expiring,
    expiring_at_server,
    expiring_carried,
    faults_of_certificate,
    listing,
    uncertified,
)
from potluck.flower.deploy.keys import (
    add_node,
    add_observer,
    certify,
    change_authority,
    renew_authority,
    renew_node,
    renew_observer,
    renew_server,
    retire_former_keys,
    revoke_node,
    revoke_observer,
)
from potluck.flower.deploy.registry import Registry, present_and_former, present_key, registered
from potluck.flower.deploy.tls import show_certificate
from potluck.locks import HeldError, locked


@pytest.fixture
def keys(tmp_path):
    certify(tmp_path / "keys", ["fl.example.org", "10.0.0.7"], days=365)
    return tmp_path / "keys"


def names_in(path):
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value


def counting(keys):
    """By node, how many of its keys count."""
    now = datetime.now(UTC)
    return sorted(key.name for key in present_and_former(keys) if key.counts(now))


def trusts(authority, keys):
    """Whether one who knows this certificate alone trusts a server with these keys; shakes hands over a socket."""
    here, there = socket.socketpair()
    shown = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    shown.load_cert_chain(keys / "server.crt", keys / "server.key")
    known = ssl.create_default_context(cafile=str(authority))
    server = threading.Thread(target=shake, args=(shown, there))
    server.start()
    try:
        with known.wrap_socket(here, server_hostname="localhost"):
            return True
    except ssl.SSLCertVerificationError:
        return False
    finally:
        here.close()
        server.join()


def shake(context, end):
    with end, suppress(OSError):
        context.wrap_socket(end, server_side=True).close()


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


def test_a_renewed_server_has_the_same_addresses_and_another_key_and_end(keys):
    before, secret = names_in(keys / "server.crt"), (keys / "server.key").read_bytes()
    end = renew_server(keys, days=700)
    assert names_in(keys / "server.crt") == before
    assert (keys / "server.key").read_bytes() != secret
    assert timedelta(days=699) < end - datetime.now(UTC) < timedelta(days=701)
    assert trusts(keys / "ca.crt", keys)


def test_a_renewed_authority_is_trusted_by_both_its_certificates(tmp_path, days_ago):
    keys = tmp_path / "keys"
    with days_ago(3640):
        certify(keys, [], days=1)
        place = add_node(keys, "a")
    certify(keys, [], days=365)
    old = tmp_path / "old.crt"
    old.write_bytes((keys / "ca.crt").read_bytes())
    end = renew_authority(keys)
    assert end - datetime.now(UTC) > timedelta(days=3600)
    assert (place / "ca.crt").read_bytes() == (keys / "ca.crt").read_bytes() != old.read_bytes()
    assert trusts(old, keys)
    assert trusts(keys / "ca.crt", keys)


def test_with_another_authority_nodes_follow_one_by_one(keys, tmp_path):
    certify(tmp_path / "strangers", [], days=365)
    first, second = tmp_path / "first.crt", tmp_path / "second.crt"
    first.write_bytes((keys / "ca.crt").read_bytes())
    secret = (keys / "ca.key").read_bytes()
    end = change_authority(keys, days=365, overlap=10)
    assert timedelta(days=9) < end - datetime.now(UTC) <= timedelta(days=10)
    assert (keys / "ca.key").read_bytes() != secret
    second.write_bytes((keys / "ca.crt").read_bytes())
    assert trusts(first, keys)
    assert trusts(second, keys)
    change_authority(keys, days=365, overlap=10)  # again, before all have followed
    renew_server(keys, days=365)
    assert [trusts(of, keys) for of in (first, second, keys / "ca.crt")] == [True] * 3
    assert not trusts(tmp_path / "strangers" / "ca.crt", keys)
    check_served(keys)


def test_a_former_authority_counts_no_more_when_its_time_is_over(keys, tmp_path):
    former = tmp_path / "former.crt"
    former.write_bytes((keys / "ca.crt").read_bytes())
    change_authority(keys, days=365, overlap=0)
    assert not trusts(former, keys)
    assert trusts(keys / "ca.crt", keys)
    assert [line for line in listing(keys) if "former" in line] == []
    renew_server(keys, days=365)
    assert (keys / "server.crt").read_bytes().count(b"BEGIN") == 1


def test_an_authority_that_has_ended_has_a_successor_all_the_same(tmp_path, days_ago):
    with days_ago(3651):
        certify(tmp_path, [], days=1)
        add_node(tmp_path, "a")
    change_authority(tmp_path, days=365, overlap=30)
    check_served(tmp_path)
    assert trusts(tmp_path / "ca.crt", tmp_path)


def test_a_former_authority_does_not_outlive_its_own_end(tmp_path, days_ago):
    with days_ago(3640):
        certify(tmp_path, [], days=1)
    assert change_authority(tmp_path, days=365, overlap=365) - datetime.now(UTC) < timedelta(days=11)


def test_an_authority_whose_secret_was_taken_away_is_not_made_anew(keys):
    """Nodes would not know another one."""
    before = (keys / "ca.crt").read_bytes()
    (keys / "ca.key").unlink()
    for change in (lambda: certify(keys, ["x"], 365), lambda: renew_authority(keys), lambda: renew_server(keys, 5)):
        with pytest.raises(ConfigError, match=r"ca\.key is missing, which signs certificates; bring it back"):
            change()
    assert (keys / "ca.crt").read_bytes() == before
    check_served(keys)  # it need not be there to serve


def test_what_does_not_belong_together_is_said_with_what_mends_it(keys, tmp_path):
    certify(tmp_path / "other", [], days=365)
    (keys / "server.key").write_bytes((tmp_path / "other" / "server.key").read_bytes())
    with pytest.raises(ConfigError, match=r"server\.crt is of another key than server\.key; .* --renew-server"):
        check_served(keys)
    renew_server(keys, 365)
    check_served(keys)
    (keys / "ca.key").write_bytes((tmp_path / "other" / "ca.key").read_bytes())
    with pytest.raises(ConfigError, match=r"ca\.crt is of another key than ca\.key; .* --renew-authority"):
        renew_server(keys, 365)


def test_secrets_are_for_their_owner_alone(keys):
    place, reading = add_node(keys, "a"), add_observer(keys, "b", days=9)
    renew_node(keys, "a", overlap=30)
    renew_observer(keys, "b", overlap=30, days=9)
    change_authority(keys, days=365, overlap=30)
    for secret in (keys / "ca.key", keys / "server.key", place / "node.key", reading / "observer.key"):
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    observing = keys / "observing"
    for folder in (
        *(keys, place, reading, keys / "registered", keys / "former", keys / "certificates"),
        *(observing, observing / "registered", observing / "former"),
    ):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["ca.key", "server.key", "nodes/a/node.key", "observers/b/observer.key"])
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_secret_that_others_may_read_is_refused_with_the_command_that_mends_it(keys, name, mode):
    place = add_node(keys, "a")
    add_observer(keys, "b", days=9)
    secret = keys / name
    secret.chmod(mode)
    check = (lambda: check_carried(place)) if "node" in name else (lambda: check_served(keys))
    with pytest.raises(ConfigError, match=f"others may read this secret key .*: chmod 600 {secret}"):
        check()
    secret.chmod(0o600)
    check()


@pytest.mark.parametrize("name", [".", "registered", "former", "observing", "observing/registered", "observing/former"])
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_into_which_others_may_put_keys_is_refused_with_the_command_that_mends_it(keys, name, mode):
    add_node(keys, "a")
    renew_node(keys, "a", overlap=30)
    add_observer(keys, "b", days=9)
    renew_observer(keys, "b", overlap=30, days=9)
    (keys / name).chmod(mode)
    with pytest.raises(ConfigError, match=f"others may write to this folder .*: chmod go-w {keys / name}"):
        check_served(keys)


def test_a_node_does_not_join_with_a_folder_into_which_others_may_put_an_authority(keys):
    place = add_node(keys, "a")
    place.chmod(0o777)
    with pytest.raises(ConfigError, match=f"others may write to this folder .*: chmod go-w {place}"):
        check_carried(place)


def test_a_node_gets_what_it_needs_and_nothing_else(keys):
    place = add_node(keys, "hospital-a")
    assert sorted(path.name for path in place.iterdir()) == ["ca.crt", "node.crt", "node.key"]
    check_carried(place)
    check_served(keys)
    assert list(registered(keys)) == ["hospital-a"]
    assert present_key(registered(keys)["hospital-a"]).pem.startswith(b"-----BEGIN PUBLIC KEY-----")


def certificate_in(place):
    (file,) = (path for path in place.iterdir() if path.suffix == ".crt" and path.stem != "ca")
    return x509.load_pem_x509_certificate(file.read_bytes())


def test_an_observer_gets_what_it_needs_and_takes_no_part(keys):
    place = add_observer(keys, "board", days=30)
    assert sorted(path.name for path in place.iterdir()) == ["ca.crt", "observer.crt", "observer.key"]
    check_served(keys)
    assert registered(keys) == {}
    assert [key.name for key in present_and_former(keys / "observing")] == ["board"]
    certificate = certificate_in(place)
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate((keys / "ca.crt").read_bytes()))
    assert timedelta(days=29) < certificate.not_valid_after_utc - datetime.now(UTC) <= timedelta(days=30)
    (key,) = present_and_former(keys / "observing")
    assert key_in(certificate) == key.pem
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_cert_chain(place / "observer.crt", place / "observer.key")  # as whoever reads with it does


def test_an_observer_is_renewed_and_revoked_as_a_node_is(keys):
    place, observing = add_observer(keys, "board", days=30), keys / "observing"
    old = (place / "observer.key").read_bytes()
    _, end = renew_observer(keys, "board", overlap=7, days=60)
    assert timedelta(days=6) < end - datetime.now(UTC) <= timedelta(days=7)
    assert (place / "observer.key").read_bytes() != old
    assert counting(observing) == ["board", "board"]
    retire_former_keys(observing, "board")
    assert counting(observing) == ["board"]
    revoke_observer(keys, "board")
    assert counting(observing) == []
    assert not place.exists()
    assert not (keys / "certificates" / "board.crt").exists()
    add_node(keys, "board")  # the name is free again
    assert [line.partition(":")[0] for line in listing(keys)[2:]] == ["node board", "observer board"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (add_node, lambda keys, name: add_observer(keys, name, 9)),
        (lambda keys, name: add_observer(keys, name, 9), add_node),
    ],
)
def test_a_name_is_one_nodes_or_one_observers(keys, first, second):
    first(keys, "a")
    for again in (first, second):
        with pytest.raises(ConfigError, match="a has a key; renew it, or revoke a before it gets another one"):
            again(keys, "a")


def test_without_the_authoritys_secret_a_node_gets_a_key_alone_and_an_observer_nothing(keys):
    (keys / "ca.key").rename(keys / "elsewhere")
    place = add_node(keys, "a")
    assert sorted(path.name for path in place.iterdir()) == ["ca.crt", "node.key"]
    for change in (lambda: add_observer(keys, "b", 9), lambda: renew_observer(keys, "b", 9, 9)):
        with pytest.raises(ConfigError, match=r"ca\.key is missing, which signs certificates; bring it back"):
            change()
    assert not (keys / "observing").exists()
    (line,) = uncertified(keys)
    assert re.fullmatch(r"node a has no certificate, and is not let in without; .* --renew-authority", line)
    (keys / "elsewhere").rename(keys / "ca.key")
    renew_authority(keys)
    assert uncertified(keys) == []
    assert key_in(certificate_in(place)) == present_key(registered(keys)["a"]).pem
    (keys / "ca.key").rename(keys / "elsewhere")
    renew_node(keys, "a", overlap=3)  # its certificate is not of the new key
    assert uncertified(keys) == [line]
    assert not (place / "node.crt").exists()


@pytest.mark.parametrize("change", [renew_authority, lambda keys: change_authority(keys, days=365, overlap=30)])
def test_with_a_new_certificate_of_the_authoritys_all_get_new_ones_of_the_keys_that_they_have(keys, change):
    place, reading = add_node(keys, "a"), add_observer(keys, "b", days=9)
    secrets = [(place / "node.key").read_bytes(), (reading / "observer.key").read_bytes()]
    before, ends = certificate_in(place), certificate_in(reading).not_valid_after_utc
    (place / "node.key").unlink()  # as when it has been copied
    change(keys)
    authority = x509.load_pem_x509_certificate((keys / "ca.crt").read_bytes())
    for holder in (place, reading):
        certificate_in(holder).verify_directly_issued_by(authority)
        assert (holder / "ca.crt").read_bytes() == (keys / "ca.crt").read_bytes()
    assert key_in(certificate_in(place)) == key_in(before)
    assert certificate_in(place).serial_number != before.serial_number
    assert certificate_in(place).not_valid_after_utc == authority.not_valid_after_utc
    assert certificate_in(reading).not_valid_after_utc == ends
    assert (reading / "observer.key").read_bytes() == secrets[1]
    assert not (place / "node.key").exists()


def test_a_nodes_certificate_does_not_pass_for_the_servers(keys, tmp_path):
    place = add_node(keys, "localhost")
    shown = tmp_path / "impostor"
    shown.mkdir()
    (shown / "server.crt").write_bytes((place / "node.crt").read_bytes())
    key = load_ssh_private_key((place / "node.key").read_bytes(), None)
    (shown / "server.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    assert trusts(keys / "ca.crt", keys)
    assert not trusts(keys / "ca.crt", shown)


def test_a_certificate_that_will_not_do_is_named_and_one_of_another_key_not_shown(keys, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    place = add_node(keys, "a")
    assert faults_of_certificate(place) == []
    show_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), place)
    assert list((tmp_path / "temporary").iterdir()) == []
    change_authority(keys, days=365, overlap=30)
    (place / "ca.crt").write_bytes((keys / "ca.crt").read_bytes())
    certify(tmp_path / "strangers", [], days=1)
    (place / "node.crt").write_bytes((add_node(tmp_path / "strangers", "a") / "node.crt").read_bytes())
    (line,) = faults_of_certificate(place)
    assert re.search(r"node\.crt is of another key than node\.key, and is not shown; for a server .* copy KEYS/", line)
    show_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), place)
    (place / "node.crt").write_bytes((keys / "certificates" / "a.crt").read_bytes())
    (place / "ca.crt").write_bytes((tmp_path / "strangers" / "ca.crt").read_bytes())
    (line,) = faults_of_certificate(place)
    assert re.search(r"node\.crt is of another authority than ca\.crt; for a server that asks for it, copy", line)
    (place / "node.crt").unlink()
    assert faults_of_certificate(place) == []


def test_a_revoked_node_is_registered_no_more_and_may_get_a_new_key(keys):
    place = add_node(keys, "a")
    old = (place / "node.key").read_bytes()
    revoke_node(keys, "a")
    assert registered(keys) == {}
    assert counting(keys) == []
    assert (add_node(keys, "a") / "node.key").read_bytes() != old
    assert counting(keys) == ["a"]
    revoke_node(keys, "a")
    assert [key.revoked for key in present_and_former(keys)] == [True, True]


def test_a_renewed_node_may_come_with_either_key_until_it_has_come_with_the_new_one(keys):
    place = add_node(keys, "a")
    old, (first,) = (place / "node.key").read_bytes(), present_and_former(keys)
    found, end = renew_node(keys, "a", overlap=7)
    assert (found, (place / "node.key").read_bytes() != old) == (place, True)
    assert timedelta(days=6) < end - datetime.now(UTC) <= timedelta(days=7)
    assert counting(keys) == ["a", "a"]
    retire_former_keys(keys, "a")
    assert counting(keys) == ["a"]
    former, present = present_and_former(keys)
    assert (former.pem, former.revoked, present.ends) == (first.pem, False, None)
    assert present.pem != first.pem


def test_keys_that_are_renewed_twice_or_without_overlap_count_as_said(keys, days_ago):
    add_node(keys, "a")
    with days_ago(20):
        renew_node(keys, "a", overlap=30)
    renew_node(keys, "a", overlap=30)
    assert counting(keys) == ["a"] * 3
    with days_ago(40):
        renew_node(keys, "a", overlap=30)
    assert counting(keys) == ["a"] * 3
    renew_node(keys, "a", overlap=0)
    assert counting(keys) == ["a"] * 3
    revoke_node(keys, "a")
    assert counting(keys) == []


def test_a_command_that_changes_keys_waits_for_no_other_without_end(keys, monkeypatch):
    add_node(keys, "a")
    monkeypatch.setattr("potluck.flower.deploy.keys._ALONE", 0.0)
    with locked(keys / ".lock", 0.0, "here"), pytest.raises(HeldError, match="another command is changing the keys in"):
        renew_node(keys, "a", overlap=3)
    assert counting(keys) == ["a"]


@pytest.mark.parametrize("overlap", [-1, 366, 10**9])
def test_an_overlap_that_is_none_is_refused(keys, overlap):
    add_node(keys, "a")
    expected = f"--overlap {overlap}: expected a number of days from 0 to 365"
    with pytest.raises(ConfigError, match=expected):
        renew_node(keys, "a", overlap)
    with pytest.raises(ConfigError, match=expected):
        change_authority(keys, 365, overlap)
    assert counting(keys) == ["a"]


def test_a_registry_notices_each_change_at_once(keys):
    registry = Registry(keys)
    assert registry.keys() == {}
    for number in range(3):
        add_node(keys, f"n{number}")
        assert len(registry.keys()) == number + 1
    renew_node(keys, "n0", overlap=3)
    assert len(registry.keys()) == 4
    (keys / "registered" / "n1.pub").unlink()
    assert len(registry.keys()) == 3


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"ssh-rsa AAAA", b"\x1b[2J", b"a b renewed 2026-01-01"])
def test_a_file_that_holds_no_key_costs_its_own_node_and_is_named(keys, content):
    for name in "ab":
        add_node(keys, name)
    (keys / "registered" / "b.pub").write_bytes(content)
    assert [key.name for key in Registry(keys).keys().values()] == ["a"]
    with pytest.raises(ConfigError, match=r"b\.pub"):
        expiring(keys)


@pytest.mark.parametrize("ends", ["", "soon", "2026-01-01T00:00:00", "2026-01-01T00:00:00+00:00 more"])
@pytest.mark.parametrize("why", ["renewed", "revoked", "x"])
def test_a_line_on_a_former_key_that_is_none_makes_no_key_count(keys, why, ends):
    add_node(keys, "a")
    (key,) = present_and_former(keys)
    revoke_node(keys, "a")
    (keys / "former" / "a.pub").write_text(f"{key.public} {why} {ends}\n")
    assert Registry(keys).keys() == {}
    with pytest.raises(ConfigError, match=r"a\.pub: expected lines of a public key, why it ended and when"):
        listing(keys)


@pytest.mark.parametrize("address", ["fl.example.org:8443", "", "a b", "-x", "10.0.0.7/8"])
def test_what_is_no_address_is_refused(tmp_path, address):
    with pytest.raises(ConfigError, match="without port"):
        certify(tmp_path, [address], days=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "../up", "a b", "a/b", ".hidden"])
def test_what_is_no_name_is_refused(keys, name):
    for change in (add_node, revoke_node, lambda keys, name: renew_node(keys, name, overlap=3)):
        with pytest.raises(ConfigError, match="expected up to 64"):
            change(keys, name)


def test_a_name_is_given_once(keys):
    add_node(keys, "a")
    with pytest.raises(ConfigError, match=r"revoke a before .* --renew a\Z"):
        add_node(keys, "a")


def test_what_is_missing_is_named_with_its_remedy(keys, tmp_path):
    with pytest.raises(ConfigError, match="registered: none"):
        revoke_node(keys, "b")
    with pytest.raises(ConfigError, match="registered: none"):
        renew_node(keys, "b", overlap=3)
    with pytest.raises(ConfigError, match="make it first"):
        add_node(tmp_path / "none", "a")
    with pytest.raises(ConfigError, match=r"server\.crt not found"):
        renew_server(tmp_path / "none", 365)
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
        (340, r"server\.crt expires on .*; make a new one: potluck keys .* --renew-server"),
        (366, r"server\.crt expired on .*; make a new one: potluck keys .* --renew-server"),
        (3651, r"server\.crt expired on "),
    ],
)
def test_a_server_does_not_start_with_what_has_expired_and_says_what_soon_will(tmp_path, days_ago, age, expected):
    with days_ago(age):
        certify(tmp_path, [], days=365)
    if expected is None or "expires" in expected:
        check_served(tmp_path)
        assert [bool(re.search(expected or "", line)) for line in expiring(tmp_path)] == [True] * (expected is not None)
        assert len(expiring_at_server(tmp_path)) == (expected is not None)
    else:
        with pytest.raises(ConfigError, match=expected):
            check_served(tmp_path)
        assert re.search(expected, expiring(tmp_path)[0])


def test_an_authority_that_ends_is_renewed_and_both_sides_say_so(tmp_path, days_ago):
    keys, aged = tmp_path / "keys", 3651
    with days_ago(aged):
        certify(keys, [], days=365)
        place = add_node(keys, "a")
    certify(keys, [], days=365)
    with pytest.raises(ConfigError, match=r"ca\.crt expired on .*: potluck keys .* --renew-authority"):
        check_served(keys)
    with pytest.raises(ConfigError, match=r"a/ca\.crt expired on .*, so this node trusts no server by it; .*renew"):
        check_carried(place)
    renew_authority(keys)
    check_served(keys)
    check_carried(place)


def test_what_ends_within_a_month_is_warned_of_at_both_ends(keys, tmp_path):
    add_node(keys, "a")
    assert expiring(keys) == []
    renew_node(keys, "a", overlap=29)
    change_authority(keys, days=365, overlap=29)
    authority, node = expiring(keys)
    assert re.fullmatch(
        rf"a former authority counts until {DAY}, and nodes that know no other will refuse this server then; copy .*",
        authority,
    )
    assert re.match(rf"node a has not come with its new key, and its former one counts until {DAY}; copy .*/a ", node)
    soon = datetime.now(UTC) + timedelta(days=3)
    (own,) = expiring_carried(tmp_path, soon)
    assert re.search(rf"ca\.crt expires on {soon:%Y-%m-%d}, and this node will trust no server by it; .*KEYS", own)
    later = datetime.now(UTC) + timedelta(days=31)
    assert expiring_carried(tmp_path, later) == []
    assert expiring_carried(tmp_path, later, later) == []
    (shown,) = expiring_carried(tmp_path, later, soon)
    assert re.search(rf"node\.crt expires on {soon:%Y-%m-%d}; for a server that asks for it, copy", shown)


def test_an_observers_certificate_that_ends_is_named_to_the_operator(keys, days_ago):
    add_observer(keys, "a", days=31)
    assert expiring(keys) == []
    add_observer(keys, "b", days=29)
    with days_ago(9):
        add_observer(keys, "c", days=2)
    found = expiring(keys)
    assert [re.sub(DAY, "DAY", line).partition(";")[0] for line in found] == [
        "the certificate of observer b expires on DAY",
        "the certificate of observer c expired on DAY",
    ]
    assert found[1].endswith("--renew c")
    assert re.fullmatch(f"observer c: ended on {DAY}", listing(keys)[-1])


DAY = r"\d{4}-\d\d-\d\d"


def test_a_warning_comes_once_a_day():
    said, now = [], [0.0]
    daily = Daily(said.append, lambda: now[0])
    for hour in range(49):
        now[0] = 3600.0 * hour
        daily(["a", *(["b"] if hour >= 30 else [])])
    assert said == ["a", "a", "b", "a"]


def test_a_listing_has_each_certificate_and_node_with_its_end(keys):
    for name in ("a", "b", "c"):
        add_node(keys, name)
    revoke_node(keys, "b")
    renew_node(keys, "c", overlap=5)
    change_authority(keys, days=365, overlap=5)
    patterns = [
        f"authority: ends on {DAY}",
        f"a former authority: ends on {DAY}",
        rf"server: ends on {DAY}, for fl\.example\.org, 10\.0\.0\.7, localhost, 127\.0\.0\.1",
        "node a: no end",
        f"node b: revoked on {DAY}",
        f"node c: no end; its former key ends on {DAY}, or when it comes with this one",
    ]
    lines = listing(keys)
    assert len(lines) == len(patterns)
    assert all(re.fullmatch(*both) for both in zip(patterns, lines, strict=True)), lines


def test_what_is_no_certificate_is_said(keys):
    (keys / "server.crt").write_text("none")
    with pytest.raises(ConfigError, match=r"server\.crt holds no certificate"):
        check_served(keys)
