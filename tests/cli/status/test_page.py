"""The operator's page and its numbers: what they hold, and what nothing in them can do."""

import base64
import hashlib
import re
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser

import pytest
from prometheus_client.parser import text_string_to_metric_families

from potluck.cli.status.metrics import metrics_of
from potluck.cli.status.overview import NODE_STATES, FailedReply, NodeStanding, Overview
from potluck.cli.status.page import page_of, policy_of_page
from potluck.flower.deploy.sightings import Sighting
from potluck.records import Progress, RoundRecord

NOW = 2e9
HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</style><style>*{display:none}</style>",
    "{{ seen.ends }}{% raw %}",
    "a\nb",
    'x"} 1\npotluck_forged{node="y',
    "\\",
]


def overview(**facts):
    record = dict.fromkeys(RoundRecord.__dataclass_fields__)
    sent = {"cohort": [0, 1], "replied": [0], "failed": {}, "bytes_down": 10, "bytes_up": 5, "bytes_evaluation": 1}
    usual = {
        "at": NOW,
        "name": "first",
        "progress": Progress("fedavg", "training", 3, 9, 1, 2, 2.5, 0.5, "accuracy 71.5 %", 15, 72.0),
        "began": NOW - 100,
        "round_since": NOW - 65,
        "done": 2,
        "last_end": NOW - 66,
        "bytes_down": 2_500_000,
        "nodes": tuple(
            NodeStanding(f"node-{number}", number, state, f"is {state}", NOW - 9, Sighting("192.0.2.1", NOW - 3))
            for number, state in enumerate(NODE_STATES)
        ),
        "failures": (FailedReply(2, "node-1", "no answer within 9 s", True),),
        "finished": (RoundRecord(**{**record, **sent, "round": 2}),),
        "said": ((NOW - 5, "open at 0.0.0.0:8443"),),
        "ends": {"server.crt": datetime.fromtimestamp(NOW + 86400 * 10.5, UTC)},
        "disk": 3_000_000_000,
        "free": None,
    }
    return Overview(**{**usual, **facts})


def hostile(text):
    """An overview that has a text wherever somebody else's may come."""
    node = NodeStanding(text, None, "takes no part", text, None, Sighting(text, NOW, refused=1, why=text), why=text)
    failure = FailedReply(1, text, text, False)
    found = overview(name=text, nodes=(node,), failures=(failure,), said=((NOW, text),), ends={})
    lost = replace(found.finished[0], lost=text)
    return replace(found, finished=(lost,), progress=found.progress.changed(method=text, score=text))


class Page(HTMLParser):
    """The elements of a page, and its text."""

    def __init__(self, content):
        super().__init__()
        self.tags, self.words = [], []
        self.feed(content.decode())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def test_the_page_shows_the_run_and_every_state_of_nodes():
    page = Page(page_of(overview()))
    for words in (
        *("fedavg: round 3 of 9", "client 1/2", "1:05 min ago", "about 1:12 min left", "2.5 MB", "3.0 GB"),
        *("server.crt expires 2033-05-28, in 10 days", "no answer within 9 s", "open at 0.0.0.0:8443", "1 of 2"),
    ):
        assert words in page.text, words
    for state in NODE_STATES:
        assert f"is {state}" in page.text
        assert ("td", {"class": f"state {state.replace(' ', '-')}"}) in page.tags
    assert ("meta", {"http-equiv": "refresh", "content": "5"}) in page.tags


def test_a_page_before_anything_is_known_can_be_shown():
    page = Page(page_of(Overview(NOW, "", Progress(), NOW, NOW)))
    assert "no node is registered, and none has come" in page.text
    assert "the run has not begun" in page.text


def test_the_page_loads_nothing_and_allows_its_own_style_alone():
    content = page_of(overview()).decode()
    (style,) = re.findall(r"<style>(.*?)</style>", content, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = dict(part.split(" ", 1) for part in policy_of_page().split("; "))
    assert policy == {
        "default-src": "'none'",
        "style-src": f"'sha256-{digest}'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    page = Page(page_of(overview()))
    assert not {tag for tag, _ in page.tags} & {"script", "iframe", "object", "embed", "form", "img", "base"}
    named = {value for _, words in page.tags for name, value in words.items() if name in ("src", "href", "action")}
    assert named == {"data:,", "/metrics"}
    assert not [words for _, words in page.tags if "style" in words or any(name.startswith("on") for name in words)]
    assert "url(" not in style
    assert "@import" not in style


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_names_and_reasons_are_text_whatever_they_hold(text):
    page, plain = Page(page_of(hostile(text))), Page(page_of(hostile("plain")))
    assert page.tags == plain.tags
    assert " ".join(text.split()) in page.text
    families = list(text_string_to_metric_families(metrics_of(hostile(text)).decode()))
    assert [family.name for family in families] == [
        family.name for family in text_string_to_metric_families(metrics_of(hostile("plain")).decode())
    ]
    (spoke,) = [family for family in families if family.name == "potluck_node_spoke_timestamp_seconds"]
    assert [sample.labels["node"] for sample in spoke.samples] == [text]


def test_the_numbers_are_read_by_prometheus_parser():
    found = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics_of(overview()).decode())
        for sample in family.samples
    }
    assert found["potluck_run_info", ("method", "fedavg"), ("run", "first")] == 1
    assert found["potluck_round",] == 3
    assert found["potluck_rounds_finished_total",] == 2
    assert found["potluck_round_ended_timestamp_seconds",] == NOW - 66
    assert found["potluck_payload_bytes_total", ("way", "down")] == 2_500_000
    assert found["potluck_folder_bytes",] == 3_000_000_000
    assert ("potluck_disk_free_bytes",) not in found
    assert found["potluck_certificate_ends_timestamp_seconds", ("file", "server.crt")] == NOW + 86400 * 10.5
    for number, state in enumerate(NODE_STATES):
        ones = [
            other for other in NODE_STATES if found["potluck_node_state", ("node", f"node-{number}"), ("state", other)]
        ]
        assert ones == [state]


def test_a_run_that_waits_for_nodes_says_so():
    waiting = overview(progress=Progress("fedavg", "waiting", 3, 9, 1, 3))
    assert b"\npotluck_waiting 1.0\n" in metrics_of(waiting)
    assert "waiting: 1 of 3 clients are there" in Page(page_of(waiting)).text
    assert b"\npotluck_waiting 0.0\n" in metrics_of(overview())
