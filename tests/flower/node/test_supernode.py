import ast
import inspect
from types import SimpleNamespace

import httpx
import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supernode import start_client_internal

from potluck.flower.node import supernode
from potluck.flower.node.supernode import Noting, Patience, Signs


class Clock:
    """A clock that goes on by what is slept."""

    def __init__(self):
        self.now, self.slept = 1000.0, []

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(supernode, "time", found)
    return found


def slept(clock, patience, seconds, times):
    before = len(clock.slept)
    for _ in range(times):
        patience.sleep(seconds)
    return clock.slept[before:]


def test_a_node_looks_soon_after_its_last_answer_and_seldom_when_nobody_asks(clock):
    found = slept(clock, Patience(), 3, 90)
    assert found[:16] == [0.2] * 16
    assert found == sorted(found)
    assert found[-1] == 3
    waited = [sum(found[:number]) for number in range(len(found))]
    assert all(one <= max(0.2, before / 16 + 1e-9) for one, before in zip(found, waited, strict=True))


def test_after_a_message_it_is_as_soon_again(clock):
    patience = Patience()
    slept(clock, patience, 3, 90)
    assert slept(clock, patience, 0.5, 60)[-1] == 0.5
    assert slept(clock, patience, 3, 2) == [0.2, 0.2]


def test_an_answer_is_looked_for_more_often_than_a_message(clock):
    found = slept(clock, Patience(), 0.5, 60)
    assert found[:16] == [0.05] * 16
    assert found == sorted(found)


def test_flowers_program_uses_nothing_else_of_the_module_time():
    tree = ast.parse(inspect.getsource(start_client_internal))
    uses = [one for one in ast.walk(tree) if isinstance(one, ast.Attribute) and getattr(one.value, "id", "") == "time"]
    assert {one.attr for one in uses} == {"sleep"}
    assert {one.args[0].value for one in ast.walk(tree) if isinstance(one, ast.Call) and one.func in uses} == {3, 0.5}


BROKEN = {
    "by a changed byte": httpx.ReadError("[SSL: DECRYPTION_FAILED_OR_BAD_RECORD_MAC] decryption failed (_ssl.c:2580)"),
    "by a changed byte, as the server says": httpx.WriteError("[SSL: SSLV3_ALERT_BAD_RECORD_MAC] (_ssl.c:2580)"),
    "in the handshake": httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed (_ssl.c:1006)"),
}


@pytest.mark.parametrize("error", BROKEN.values(), ids=BROKEN)
def test_whatever_breaks_a_connection_flower_makes_the_request_again(error, tmp_path):
    def breaks(context):
        raise error

    flowers = make_simple_http_retry_invoker()
    assert flowers.should_giveup(error)  # and drops the message that it is at work on
    with pytest.raises(type(error)) as broken:
        Noting(Signs(tmp_path)).intercept(SimpleNamespace(request=httpx.Request("POST", "https://x/y")), breaks)
    assert not flowers.should_giveup(broken.value)
    assert isinstance(broken.value, flowers.recoverable_exceptions)
    assert broken.value.__cause__ is error
    assert Signs(tmp_path).seen()[1] > 0
