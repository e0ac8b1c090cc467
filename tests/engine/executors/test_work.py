"""The tasks of one exchange, whose processes come to an end over them; no process is needed to see what follows."""

import logging
from dataclasses import dataclass

import pytest

from potluck.core.ground.rng import Key
from potluck.core.roles import Failure
from potluck.engine.client.runtime import EvalRequest
from potluck.engine.client.session import Answer, Call
from potluck.engine.executors import Pending
from potluck.engine.executors.work import Work


class Host:
    """Of the host, work needs the names of handlers."""

    def full_name(self, handler):
        return f"Method.{handler}"


@dataclass
class Exchange:
    """Carries out bundles as a process would that deadly clients end, and notes who was together."""

    deadly: frozenset[int] = frozenset()
    deadly_together: frozenset[int] = frozenset()
    killed_from_outside: int = 0
    clients: int = 5
    questions: bool = False

    def play(self, at_once=10):
        self.made, self.together = [], []
        tasks = [Pending(lambda client=client: self.make(client)) for client in range(self.clients)]
        work = Work(Host(), tasks, at_once, tries=2)
        while bundle := work.take():
            clients = [job.client for job in bundle.jobs]
            self.together.append(clients)
            if self.dies(clients):
                work.lose(bundle, "process 7", "it was killed")
            else:
                alone = len(clients) == 1
                work.finish(bundle, [Answer(client, b"alone" if alone else b"", None, ()) for client in clients])
        return work.done

    def make(self, client):
        self.made.append(client)
        return EvalRequest(client, b"", None, ()) if self.questions else Call("work", client, b"", None, Key(()))

    def dies(self, clients):
        self.killed_from_outside -= 1
        deadly = self.deadly & set(clients) or (len(clients) > 1 and self.deadly_together & set(clients))
        return self.killed_from_outside >= 0 or bool(deadly)


def test_a_bundle_whose_process_was_killed_is_carried_out_again_as_it_was():
    exchange = Exchange(killed_from_outside=1)
    done = exchange.play()
    assert exchange.together == [[2, 3, 4], [2, 3, 4], [0, 1]]
    assert all(isinstance(outcome, Answer) for outcome in done.values())


def test_a_task_alone_is_forgiven_one_process():
    exchange = Exchange(killed_from_outside=1, clients=1)
    assert exchange.play()[0] == Answer(0, b"alone", None, ())


def test_a_task_that_ends_its_process_is_found_and_the_others_are_together_again():
    exchange = Exchange(deadly=frozenset({3}))
    done = exchange.play()
    first, *tried = exchange.together[:2], *exchange.together[2:6]
    assert first == [[2, 3, 4], [2, 3, 4]]
    assert sorted(tried) == [[2], [3], [3], [4]]
    assert exchange.together[6:] == [[2, 4], [0, 1]]
    assert done[3] == Failure(3, "Method.work", "it was killed")
    assert {place: done[place].payload for place in (0, 1, 2, 4)} == dict.fromkeys((0, 1, 2, 4), b"")


def test_several_that_end_their_process_are_all_named():
    exchange = Exchange(deadly=frozenset({0, 2, 3}))
    done = exchange.play()
    assert sorted(place for place, outcome in done.items() if isinstance(outcome, Failure)) == [0, 2, 3]
    assert exchange.together.count([4]) == exchange.together.count([1]) == 1  # nobody is left for them to be with


def test_a_bundle_that_ends_its_process_only_together_fails_whole_and_says_so():
    exchange = Exchange(deadly_together=frozenset({4}))
    done = exchange.play()
    reason = "it was killed 2 times with clients 2, 3, 4 together, and not alone"
    assert {place: done[place] for place in (2, 3, 4)} == {
        place: Failure(place, "Method.work", reason) for place in (2, 3, 4)
    }
    assert isinstance(done[0], Answer)


def test_a_second_who_is_deadly_in_company_is_found_after_the_first():
    exchange = Exchange(deadly=frozenset({2}), deadly_together=frozenset({4}))
    assert {place for place, outcome in exchange.play().items() if isinstance(outcome, Failure)} == {2, 3, 4}


@pytest.mark.parametrize("deadly", [(), (0,), (1, 4), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("killed", [0, 1, 3])
@pytest.mark.parametrize("at_once", [1, 2, 10])
def test_whatever_happens_every_task_is_made_once_and_has_an_outcome(deadly, killed, at_once):
    exchange = Exchange(deadly=frozenset(deadly), killed_from_outside=killed)
    done = exchange.play(at_once)
    assert sorted(exchange.made) == sorted(done) == list(range(5))
    assert all(outcome.client == place for place, outcome in done.items())
    if killed < 2:
        assert {place for place, outcome in done.items() if isinstance(outcome, Failure)} == set(deadly)


def test_a_lost_question_is_a_failure_to_be_evaluated():
    exchange = Exchange(deadly=frozenset({1}), questions=True)
    assert exchange.play()[1] == Failure(1, "evaluation", "it was killed")


def test_every_loss_is_logged_with_process_and_clients(caplog):
    with caplog.at_level(logging.WARNING):
        Exchange(deadly=frozenset({3})).play()
    told = [record.message for record in caplog.records]
    assert told[0] == "process 7, at work for clients 2, 3, 4, was lost: it was killed; its work is done again"
    assert told[1].endswith("each is tried alone, to find the one that ends it")
    assert told[-1] == "process 7, at work for client 3, was lost: it was killed; it is named as the failure"
