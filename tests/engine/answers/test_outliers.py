"""A reply that is far larger than the others': refused, or undone, and never held against an honest client."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.ground.tree import pack
from potluck.core.message import Message
from potluck.core.schema import Probabilities, Schema, Undeclared, booleans, floats, like, number, optional
from potluck.engine.answers.outliers import Before, Outlier, Outliers, Size, sizes_of, standing_out
from potluck.engine.client.session import Answer
from potluck.engine.executors.sequential import Sequential
from potluck.engine.rounds.engine import Engine
from potluck.methods import get_method
from potluck.testing.checks.clients import Without
from potluck.testing.lying import LIAR, POISON, Lying, spoilt
from potluck.testing.worlds import World, packed_state, quick, toy_federation

FACTOR = 100.0
REMEMBERED = 10.0


def engine(executor, name="fedavg", clients=6, factor=FACTOR, **options):
    world = World(clients=clients, architectures=1, batchnorm=True).fit_for(quick(get_method(name)))
    options = {"tolerate_failures": True, "outlier_factor": factor, **options}
    return Engine(quick(get_method(name)), toy_federation(world), executor=executor, **options)


def played(subject, rounds=3, clients=6):
    """State, what clients keep, and the reports after some rounds of everybody."""
    state, reports = subject.start(), []
    for number_of in range(1, rounds + 1):
        state, report = subject.round(number_of, state, range(clients))
        reports.append(report)
    return packed_state(state), [subject.store.read(id) for id in range(clients)], reports


SENDING = ["fedavg", "scaffold", "fedproto", "heterofl", "felo", "fedkd", "fedgen", "fedfomo", "fedgkt", "fccl"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SENDING)
def test_poison_within_the_bound_costs_its_sender_that_reply_and_nobody_anything_else(name):
    *with_poison, reports = played(engine(Lying(1), name), 1)
    *without, _ = played(engine(Without(LIAR), name), 1)
    assert with_poison == without
    assert list(reports[0].failures) == [LIAR]
    assert "expected at most" in reports[0].failures[LIAR].reason
    assert reports[0].failures[LIAR].reason.endswith("by the median of 6 clients, by run.outlier_factor 100")


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_after_poison_the_honest_go_on(name):
    _, _, reports = played(engine(Lying(1), name))
    assert [list(report.failures) for report in reports] == [[LIAR], [], []]
    assert [report.lost for report in reports] == [None] * 3


def test_without_the_comparison_all_are_spoilt_by_one():
    _, _, reports = played(engine(Lying(1), factor=None))
    assert [bool(report.lost) for report in reports] == [False, True, True]
    assert set(reports[1].failures) == set(range(6))


@pytest.mark.parametrize("factor", [None, 0.0])
def test_nothing_is_compared_unless_it_is_asked_for(factor):
    assert engine(Sequential(), factor=factor).outliers is None


# Fewer than five


def few(*rounds, clients=4, **options):
    return engine(Lying(*rounds), clients=clients, **options)


@pytest.mark.parametrize("clients", [3, 4])
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "moon"])
def test_among_few_a_round_on_which_all_diverge_is_undone_and_its_outlier_named(name, clients):
    subject = few(1, name=name, clients=clients)
    start = subject.start()
    poisoned, first = subject.round(1, start, range(clients))
    assert first.replied == list(range(clients))
    state, second = subject.round(2, poisoned, range(clients))
    assert packed_state(state) == packed_state(start)
    assert [subject.store.read(id) for id in range(clients)] == [None] * clients
    assert (second.undone, second.outlier) == (1, LIAR)
    assert second.lost.startswith(f"all diverged on a reply of client {LIAR}'s in round 1: its ")
    assert second.lost.endswith("; round 1 is undone")
    for client, failure in second.failures.items():
        assert client == LIAR or failure.reason == f"it diverged on what client {LIAR}'s reply of round 1 had spoilt"
    _, third = subject.round(3, state, range(clients))
    assert third.replied == list(range(clients))
    assert (third.lost, third.undone, third.outlier) == (None, None, None)


def test_who_spoils_two_rounds_is_left_out_of_the_rest():
    subject = few(1, 3, 5, 6, 7)
    _, _, reports = played(subject, 7, 4)
    assert [report.undone for report in reports] == [None, 1, None, 3, None, None, None]
    assert [report.lost is None for report in reports] == [True, False, True, False, True, True, True]
    for report in reports[4:]:
        assert report.replied == [0, 2, 3]
        assert report.failures[LIAR].reason == "it is left out, since everybody else diverged on its replies 2 times"
    assert {(number, LIAR) for number in (5, 6, 7)}.isdisjoint(subject.executor.asked)


def test_a_round_of_those_who_are_left_out_alone_is_lost():
    subject = few(1)
    state = subject.start()
    subject.outliers.named[LIAR] = 2
    same, report = subject.round(1, state, [LIAR])
    assert same is state
    assert "nobody is left to ask; client 1 failed" in report.lost


class Feigning(Lying):
    """The liar answers in the round after as if nothing were wrong."""

    def run(self, host, tasks):
        for outcome in super().run(host, tasks):
            if (2, LIAR) in self.asked and outcome.client == LIAR:
                outcome = Answer(LIAR, self.harmless, None, (0.5,))
            elif outcome.client == LIAR:
                self.harmless = pack(spoilt(dict(Message.decode(outcome.payload)), 0.01))
            yield outcome


def test_a_liar_that_answers_where_all_others_diverge_is_not_taken_for_the_only_honest_one():
    subject = engine(Feigning(1), clients=4)
    start = subject.start()
    poisoned, _ = subject.round(1, start, range(4))
    state, report = subject.round(2, poisoned, range(4))
    assert packed_state(state) == packed_state(start)
    assert (report.undone, report.outlier) == (1, LIAR)


def diverging(*who):
    """An executor under which these clients say that they diverged."""

    class Diverging(Lying):
        def run(self, host, tasks):
            for outcome in super().run(host, tasks):
                yield replace(outcome, losses=(float("nan"),)) if outcome.client in who else outcome

    return Diverging


def test_who_only_says_that_it_diverged_undoes_nothing():
    subject = engine(diverging(0)(1), clients=4)
    state = subject.start()
    for number_of in (1, 2):
        state, report = subject.round(number_of, state, [0, LIAR] if number_of == 1 else [0])
        assert report.undone is None
    assert "no client answered" in report.lost


def test_where_nothing_stood_out_all_diverge_without_anything_undone_or_anybody_named():
    subject = engine(diverging(*range(4))(), clients=4)
    _, _, reports = played(subject, 2, 4)
    assert [(report.undone, report.outlier) for report in reports] == [(None, None)] * 2
    assert all(report.lost.startswith("no client answered") for report in reports)


def test_only_the_last_round_is_undone():
    subject = few(1)
    state = subject.start()
    state, _ = subject.round(1, state, range(4))
    subject.executor = Without(0)
    lost, report = subject.round(2, state, [0])
    assert report.lost
    subject.executor = Lying()
    after, report = subject.round(3, lost, range(4))
    assert report.undone is None
    assert after is lost


@pytest.mark.parametrize(("earlier", "later", "undone"), [(1e8, 20.0, True), (20.0, 1e8, False)])
def test_the_reply_that_stood_out_most_is_blamed_be_it_of_this_round_or_of_the_one_before(earlier, later, undone):
    outliers = Outliers(FACTOR, {})
    one, other = (Outlier(client, "w", False, size, 1.0, 3, False) for client, size in ((0, earlier), (1, later)))
    outliers.begin(1)
    outliers._remember([one])
    outliers.end(1, "state", "mark")
    outliers.begin(2)
    outliers._remember([other])
    assert outliers.blamed([], [2, 3]) is (one if undone else other)
    assert outliers.undo() == (Before(1, "state", "mark", one) if undone else None)
    assert outliers.named == {0 if undone else 1: 1}


# Honest clients


def skewed(world, sizes):
    """A federation whose clients have these numbers of examples, of one class each if they are few."""
    whole = toy_federation(world)
    rows = max(whole.sites.values(), key=lambda site: len(site.train)).train
    sites = {}
    for client, size in enumerate(sizes):
        picked = torch.randint(len(rows), (size,), generator=torch.Generator().manual_seed(client))
        if size < 20:
            labels = rows.batch(torch.arange(len(rows)))[1]
            picked = (labels == client % 4).nonzero().flatten()[:size]
        sites[client] = replace(whole.sites[client], train=rows.take(picked))
    return replace(whole, sites=sites)


QUICK = ["fedavg", "scaffold", "heterofl", "fedproto"]
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in SENDING if name not in QUICK]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("name", [*QUICK, *OTHERS])
def test_honest_clients_however_unequal_are_all_kept(name, optimizer):
    """One client takes fifty steps where others take one, and those have a single class each."""
    method = quick(
        get_method(name), optimizer=optimizer, batch_size=8, epochs=1, lr={"sgd": 0.05, "adam": 0.01}[optimizer]
    )
    world = World(clients=6, architectures=1, batchnorm=True).fit_for(method)
    sizes = [8, 8, 9, 10, 16, 400]

    def end(factor):
        subject = Engine(method, skewed(world, sizes), tolerate_failures=True, outlier_factor=factor)
        return played(subject, 2)

    *compared, reports = end(FACTOR)
    *plain, _ = end(None)
    assert [report.failures for report in reports] == [{}, {}]
    assert compared == plain


CLIENTS = st.integers(5, 12)
ABOVE = st.floats(1.01, 1e9)


def free(size):
    """A tensor that was not sent."""
    return {("w",): Size(size, None, size)}


def moved(by, sent=0.1):
    """A tensor that was sent."""
    return {("w",): Size(by, sent, sent + by)}


def refused(sizes, examples=None):
    found = standing_out(sizes, examples or dict.fromkeys(sizes, 30), FACTOR)
    return {one.client for one in found if one.refused}


def remembered(sizes):
    return {one.client for one in standing_out(sizes, dict.fromkeys(sizes, 30), FACTOR) if not one.refused}


@given(st.data(), CLIENTS, st.floats(1e-6, 1e6), st.sampled_from([free, moved]))
def test_who_is_within_the_factor_of_the_median_is_kept_whatever_the_scale(data, clients, scale, kind):
    for factor, concerned in ((FACTOR, refused), (REMEMBERED, remembered)):
        sizes = data.draw(st.lists(st.floats(1.0, factor), min_size=clients, max_size=clients))
        of = {client: kind(scale * size) for client, size in enumerate(sizes)}
        assert concerned(of) == set()


@given(st.data(), CLIENTS, ABOVE, st.sampled_from([free, moved]))
def test_if_less_than_half_lie_all_who_do_are_refused_and_nobody_else(data, clients, beyond, kind):
    liars = data.draw(st.sets(st.integers(0, clients - 1), min_size=1, max_size=(clients - 1) // 2))
    sizes = data.draw(st.lists(st.floats(1.0, FACTOR), min_size=clients, max_size=clients))
    largest = max(size for client, size in enumerate(sizes) if client not in liars)
    of = {client: kind(largest * FACTOR * beyond if client in liars else size) for client, size in enumerate(sizes)}
    assert refused(of) == liars


@given(st.integers(1, 10**9), st.floats(1.0, FACTOR))
def test_more_examples_allow_more_up_to_a_hundredfold(examples, size):
    work = min(max(1.0, examples / 30), 100.0)
    counts = dict.fromkeys(range(5), 30) | {5: examples}
    honest = {client: free(1.0) for client in range(5)}
    assert refused(honest | {5: free(size * work)}, counts) == set()
    assert refused(honest | {5: free(1.01 * FACTOR * work)}, counts) == {5}


def test_who_leaves_a_tensor_as_it_is_is_none_of_its_owners():
    """In a net trained by parts most clients leave a layer alone; the one that trains it is no outlier for that."""
    of = {client: moved(0.0) for client in range(8)} | {8: moved(100.0)}
    assert refused(of) | remembered(of) == set()


@pytest.mark.parametrize(
    ("others", "one", "expected"),
    [
        (moved(0.01, 0.1), moved(11.0, 0.1), "refused"),
        (moved(0.01, 0.0), moved(11.0, 0.0), "refused"),
        (free(0.01), free(11.0), "refused"),
        (moved(0.01, 0.1), moved(9.0, 0.1), "remembered"),  # small numbers
        (free(0.01), free(9.0), "remembered"),
        (moved(1.0, 0.1), moved(99.0, 0.1), "remembered"),  # within the factor
        (moved(0.01, 10.0), moved(50.0, 10.0), "remembered"),  # it is not much larger than it was
        (moved(0.01, 1.0), moved(0.9, 1.0), ""),
        (moved(1e-9, 0.0), moved(1e-4, 0.0), ""),  # noise
        (free(1e-9), free(1e-4), ""),
    ],
)
def test_what_stands_out_is_refused_if_it_is_large_remembered_if_it_may_matter_and_else_ignored(others, one, expected):
    of = dict.fromkeys(range(6), others) | {6: one}
    assert refused(of) == ({6} if expected == "refused" else set())
    assert remembered(of) == ({6} if expected == "remembered" else set())
    few_of_them = dict.fromkeys(range(3), others) | {6: one}
    assert refused(few_of_them) == set()
    assert remembered(few_of_them) == ({6} if expected else set())


def test_sizes_are_of_what_has_no_bound_of_its_own():
    of = Schema(
        weights=like({"a.b": torch.zeros(2, 2), "count": torch.zeros((), dtype=torch.int64)}),
        shares=Probabilities(3, 2),
        mask=booleans(2),
        bounded=floats(2, most=1.0),
        features=optional(floats(3)),
        quality=number(0, 1e9),
    )
    weights = {"a.b": torch.full((2, 2), 3.0), "count": torch.tensor(5)}
    more = {"shares": torch.full((3, 2), 0.5), "mask": torch.ones(2, dtype=torch.bool), "bounded": torch.zeros(2)}
    reply = Message(weights=weights, **more, features=torch.tensor([0.0, 3.0, 4.0]), quality=1e8)
    sent = Message(weights={"a.b": torch.ones(2, 2), "count": torch.tensor(3)}, features=torch.zeros(9))
    of.check(reply)
    five = pytest.approx((25 / 3) ** 0.5)
    assert sizes_of(reply, sent, of) == {
        ("weights", "a.b"): Size(2.0, 1.0, 3.0),
        ("weights", "count"): Size(2.0, 3.0, 5.0),
        ("features",): Size(five, None, five),
    }
    assert sizes_of(Message(weights=weights, **more, quality=0), Message(), of) == {
        ("weights", "a.b"): Size(3.0, None, 3.0),
        ("weights", "count"): Size(5.0, None, 5.0),
    }


def test_replies_that_a_method_does_not_declare_are_compared_too():
    member = toy_federation(World()).roster[0]
    reply = Message(deep={"er": {"t": torch.ones(4)}}, mask=torch.ones(2, dtype=torch.bool), rate=2.0)
    assert sizes_of(reply, Message(), Undeclared(member)) == {("deep", "er", "t"): Size(1.0, None, 1.0)}


def test_an_outlier_is_described_on_one_line():
    most = "(root mean square); expected at most 0.25 by the median of 7 clients"
    assert str(Outlier(3, "weights.bias", True, POISON, 0.25, 7, True)) == f"its weights.bias moved by 9e+08 {most}"
    assert str(Outlier(3, "logits", False, POISON, 0.25, 7, True)) == f"its logits is of the size 9e+08 {most}"


# Memory


def test_replies_that_wait_go_to_files_beyond_a_cap(monkeypatch):
    monkeypatch.setattr("potluck.engine.executors.held.MOST_BYTES", 1)
    *in_files, _ = played(engine(Lying(1)), 2)
    monkeypatch.undo()
    *in_memory, _ = played(engine(Lying(1)), 2)
    assert in_files == in_memory
