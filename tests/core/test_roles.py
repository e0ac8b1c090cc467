import pytest
import torch
from torch import nn

from potluck.core.ground.errors import EntryError, PotluckError
from potluck.core.ground.rng import Key
from potluck.core.message import Message
from potluck.core.method import Method, on_client, runs_on_client
from potluck.core.requests.beside_training import NormStatistics, Predict
from potluck.core.requests.examples import Batch, Examples
from potluck.core.requests.fit import Fit, LocalTraining
from potluck.core.roles import ClientFailure, Failure, Replies, Server, Supervised


def test_replies_come_in_order_of_client_ids():
    replies = Replies({10: Message(n=1), 2: Message(n=2), 7: Message(n=3)}, {3: Failure(3, "M.work", "no")})
    assert list(replies) == [2, 7, 10]
    assert replies.entries("n") == [2, 3, 1]
    assert len(replies) == 3
    assert 3 not in replies
    assert list(replies.failures) == [3]


def test_replies_that_are_read_by_an_entrys_name_say_how_to_read_it():
    replies = Replies({1: Message(n=1)}, {})
    with pytest.raises(EntryError, match=r"indexed by client id; found 'n': write \.entries\('n'\)"):
        replies["n"]
    assert "n" not in replies


def test_entries_that_an_answer_lacks_are_refused():
    with pytest.raises(EntryError, match="no entry 'n'"):
        Replies({1: Message(n=1), 2: Message()}, {}).entries("n")


def test_a_failure_reads_as_one_line():
    failure = Failure(3, "FedAvg.local_update", "MemoryError: none left", trace="long\nlong")
    assert str(failure) == "client 3 failed in FedAvg.local_update: MemoryError: none left"
    assert issubclass(ClientFailure, PotluckError)


def test_the_tasks_objective_is_the_criterion_on_the_outputs():
    inputs, targets = torch.tensor([[2.0], [4.0]]), torch.tensor([[1.0], [1.0]])
    assert Supervised(nn.functional.mse_loss)(nn.Identity(), Batch(inputs, targets, {}), {}).item() == 5.0


def test_every_request_of_the_server_has_its_own_key():
    asked = []
    server = Server({}, torch.Generator(), None, 2, (1,), None, None, lambda *asks: asked.append(asks), Key((1,)), None)
    data = Examples(torch.zeros(2, 1), torch.zeros(2))
    fits = [Fit(nn.Identity(), [], data, LocalTraining()) for _ in range(2)]
    predict, measure = Predict(nn.Identity(), data), NormStatistics(nn.Identity(), data)
    server.fit(fits[0])
    server.predict(predict)
    server.measure(measure)
    server.fit(fits[1])
    assert [request for request, _ in asked] == [fits[0], predict, measure, fits[1]]
    assert len({key for _, key in asked}) == 4


def test_a_handler_is_what_was_marked():
    class Marked(Method):
        @on_client
        def work(self, client, message):
            return message

        def helper(self):
            return None

    assert runs_on_client(Marked().work)
    assert runs_on_client(Marked().inference_model)
    assert not runs_on_client(Marked().helper)
    assert not runs_on_client(Marked().round)
    assert not runs_on_client(object())


def test_a_method_has_no_needs_no_message_and_no_global_model_unless_it_says_so():
    method = Method()
    assert method.needs() == frozenset()
    assert dict(method.inference_message(None, 0, None)) == {}
    assert method.global_model(None, None) is None
    assert method.keeps_model


@pytest.mark.parametrize("half", ["init", "round"])
def test_a_method_must_say_how_it_starts_and_goes_on(half):
    with pytest.raises(NotImplementedError):
        getattr(Method(), half)(*[None] * (1 if half == "init" else 3))


def test_a_method_cannot_be_changed():
    with pytest.raises(AttributeError):
        Method().anything = 1
