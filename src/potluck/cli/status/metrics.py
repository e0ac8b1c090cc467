"""The numbers of a served run in the format of Prometheus."""

from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from potluck.cli.status.overview import NODE_STATES, Overview

METRICS_TYPE = CONTENT_TYPE_LATEST
"""The type of the content that `metrics_of` makes."""


def metrics_of(seen: Overview) -> bytes:
    """The numbers of an overview, as text that Prometheus reads."""
    registry = CollectorRegistry()
    registry.register(_Numbers(seen))
    return generate_latest(registry)


class _Numbers(Collector):
    """The metrics of one moment."""

    def __init__(self, seen: Overview) -> None:
        self._seen = seen

    def collect(self) -> Iterator[Metric]:
        """All of them."""
        yield from self._of_run()
        yield from self._of_nodes()
        yield from self._of_gate()
        yield from self._of_machine()

    def _of_run(self) -> Iterator[Metric]:
        seen, now = self._seen, self._seen.progress
        yield InfoMetricFamily("potluck_run", "The run that is served.", {"run": seen.name, "method": now.method})
        yield _gauge("potluck_began_timestamp_seconds", "When this server began.", seen.began)
        yield _gauge("potluck_round", "The number of the current round.", now.round)
        yield _gauge("potluck_rounds", "How many rounds the run has.", now.rounds)
        since = "When the current round began, or this server if that was later."
        yield _gauge("potluck_round_began_timestamp_seconds", since, seen.round_since)
        ended = "When a round ended last, or this server began if that was later."
        yield _gauge("potluck_round_ended_timestamp_seconds", ended, seen.last_end or seen.began)
        waits = "1 while the run waits for nodes, since a round needs more than are there."
        yield _gauge("potluck_waiting", waits, int(now.phase == "waiting"))
        yield CounterMetricFamily("potluck_rounds_finished", "Finished rounds of the run.", seen.done)
        yield CounterMetricFamily("potluck_rounds_lost", "Those of them that changed nothing.", seen.lost)
        payload = CounterMetricFamily("potluck_payload_bytes", "Payload of finished rounds.", labels=["way"])
        ways = {"down": seen.bytes_down, "up": seen.bytes_up, "evaluation": seen.bytes_evaluation}
        for way, count in ways.items() if seen.is_whole else ():
            payload.add_metric([way], count)
        yield payload

    def _of_nodes(self) -> Iterator[Metric]:
        states = GaugeMetricFamily("potluck_node_state", "1 of what it is, 0 of all else.", labels=["node", "state"])
        failed = CounterMetricFamily("potluck_replies_failed", "Replies that did not count.", labels=["node"])
        late = CounterMetricFamily("potluck_replies_late", "Those of them that came too late.", labels=["node"])
        for node in self._seen.nodes:
            for state in NODE_STATES:
                states.add_metric([node.name, state], int(node.state == state))
            failed.add_metric([node.name], node.failed)
            late.add_metric([node.name], node.late)
        yield from (states, failed, late)

    def _of_gate(self) -> Iterator[Metric]:
        spoke = GaugeMetricFamily("potluck_node_spoke_timestamp_seconds", "When a node spoke last.", labels=["node"])
        refused = CounterMetricFamily("potluck_node_refused", "Requests that the gate refused.", labels=["node"])
        passed = CounterMetricFamily("potluck_node_bytes", "Content that passed the gate.", labels=["node", "way"])
        for node in self._seen.nodes:
            if (sighting := node.sighting) is not None:
                spoke.add_metric([node.name], sighting.last)
                refused.add_metric([node.name], sighting.refused)
                if self._seen.is_whole:
                    passed.add_metric([node.name, "down"], sighting.bytes_down)
                    passed.add_metric([node.name, "up"], sighting.bytes_up)
        yield from (spoke, refused, passed)

    def _of_machine(self) -> Iterator[Metric]:
        seen = self._seen
        if seen.disk is not None:
            yield _gauge("potluck_folder_bytes", "What the run's folder takes.", seen.disk)
        if seen.free is not None:
            yield _gauge("potluck_disk_free_bytes", "What is left on the disk of the run's folder.", seen.free)
        ends = "When a certificate of the server's expires."
        expiring = GaugeMetricFamily("potluck_certificate_ends_timestamp_seconds", ends, labels=["file"])
        for name, end in seen.ends.items():
            expiring.add_metric([name], end.timestamp())
        yield expiring


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(name, meaning, value=value)
