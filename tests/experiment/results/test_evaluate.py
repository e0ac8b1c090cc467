from dataclasses import replace

import pytest
import torch

from potluck.core.ground.tree import pack
from potluck.core.method import on_client
from potluck.core.requests.inference import predict, predictions
from potluck.core.roles import ClientFailure, Failure
from potluck.engine.client.runtime import EvalResult
from potluck.engine.executors.sequential import Sequential
from potluck.engine.rounds.engine import Engine
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.results.evaluate import evaluate
from potluck.experiment.settings.presets import experiment_for
from potluck.methods import get_method
from potluck.testing.worlds import CLASSES, World, quick, run_rounds, toy_federation


def share_right(net, examples) -> float:
    return float((predict(net, examples).argmax(1) == examples.labels).double().mean())


@pytest.fixture
def evaluated():
    experiment = experiment_for("fedin", ["federation.models=[{name='cnn2', width=4}, {name='cnn3', width=4}]"])
    engine = Engine(experiment.method, assemble(experiment).federation)
    state = run_rounds(engine, 1)
    return engine, state


@pytest.mark.parametrize("common_test", [True, False])
def test_every_accuracy_equals_one_counted_by_hand(evaluated, common_test):
    engine, state = evaluated
    scores = evaluate(engine, state, common_test=common_test).scores
    assert [score.client for score in scores] == sorted(engine.federation.sites)
    for score in scores[:4]:
        site, net = engine.federation.sites[score.client], engine.inference_model(state, score.client)
        assert score.accuracy_personal == share_right(net, site.test)
        assert score.accuracy_validation == share_right(net, site.validation)
        assert score.accuracy_common == (share_right(net, engine.federation.test) if common_test else None)


def test_equal_models_are_run_once(evaluated, monkeypatch):
    engine, state = evaluated
    seen = []

    def counting(net, examples, batch_size=100):
        seen.append(len(examples))
        return predictions(net, examples, batch_size)

    monkeypatch.setattr("potluck.engine.client.runtime.predictions", counting)
    evaluate(engine, state)
    whole = len(engine.federation.test)
    assert seen.count(whole) == 2, "two architectures share layers, so there are two different models"


def test_evaluation_leaves_no_trace(evaluated):
    engine, state = evaluated
    before = [engine.store.read(id) for id in engine.federation.sites]
    assert evaluate(engine, state) == evaluate(engine, state)
    assert [engine.store.read(id) for id in engine.federation.sites] == before


def test_means_are_over_clients_that_have_examples():
    method = quick(get_method("fedavg"))
    engine = Engine(method, toy_federation(World()))
    state = run_rounds(engine, 1)
    object.__setattr__(engine.federation.sites[1].test, "rows", torch.zeros(0, dtype=torch.int64))
    evaluation = evaluate(engine, state)
    values = [score.accuracy_personal for score in evaluation.scores]
    assert values[1] is None
    present = [value for value in values if value is not None]
    assert evaluation.mean("accuracy_personal") == pytest.approx(sum(present) / 3)
    assert evaluation.personal_worst == min(present)
    assert evaluation.by_architecture("accuracy_personal")["toy2"] == values[3]


class Evaluating(Sequential):
    """An executor that changes what one client says of its model."""

    def __init__(self, trusted, lie, liar=0):
        self.trusted = trusted
        self._lie, self._liar = lie, liar

    def run(self, host, tasks):
        for outcome in super().run(host, tasks):
            changed = isinstance(outcome, EvalResult) and outcome.client == self._liar
            yield self._lie(outcome) if changed else outcome


def all_wrong(result):
    """As if the model were the others', which is where equal models once spoke for each other, and always wrong."""
    if "common" not in result.sums:
        return result
    table = result.sums["common"]["confusion"]
    wrong = torch.zeros_like(table)
    wrong[torch.arange(CLASSES), (torch.arange(CLASSES) + 1) % CLASSES] = table.sum(1)
    return replace(result, payload=pack({**result.sums, "common": {"confusion": wrong}}))


def evaluation_of(executor, **options):
    federation = toy_federation(World(architectures=1))
    engine = Engine(quick(get_method("fedavg")), federation, executor=executor, **options)
    return evaluate(engine, run_rounds(engine, 1))


def rows(evaluation):
    return {score.client: score for score in evaluation.scores}


def test_machines_that_are_not_trusted_are_judged_to_the_same_numbers():
    assert evaluation_of(Evaluating(False, lambda result: result)) == evaluation_of(Sequential())


@pytest.mark.parametrize("liar", [0, 2])
def test_a_client_that_lies_about_an_equal_model_changes_its_own_row_alone(liar):
    honest, lied = rows(evaluation_of(Sequential())), evaluation_of(Evaluating(False, all_wrong, liar))
    changed = rows(lied)
    assert [client for client in honest if changed[client] != honest[client]] == [liar]
    assert lied.accuracy_global == evaluation_of(Sequential()).accuracy_global


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("liar", [0, 2])
def test_a_client_that_cannot_be_judged_costs_its_own_row(trusted, liar):
    def fails(result):
        return Failure(result.client, "evaluation", "MemoryError: none left")

    honest = rows(evaluation_of(Sequential()))
    lacking = evaluation_of(Evaluating(trusted, fails, liar), tolerate_failures=True)
    assert rows(lacking) == {client: row for client, row in honest.items() if client != liar}
    assert lacking.missing == 1
    others = [row.accuracy_personal for client, row in honest.items() if client != liar]
    assert lacking.mean("accuracy_personal") == pytest.approx(sum(others) / 3)


def test_a_client_that_fails_over_the_common_set_costs_nobody_else_that_number():
    def fails(result):
        return result if "common" not in result.sums else Failure(result.client, "evaluation", "MemoryError: none left")

    honest = rows(evaluation_of(Sequential()))
    lacking = rows(evaluation_of(Evaluating(True, fails), tolerate_failures=True))
    assert lacking == honest, "another client with an equal model speaks for it"


def test_a_model_that_cannot_be_judged_here_costs_its_own_row_and_ends_a_strict_run_in_a_line():
    class Breaks(get_method("fedavg")):
        @on_client
        def inference_model(self, client, message):
            if client.id == 1:
                raise MemoryError("none\nleft")
            return super().inference_model(client, message)

    def engine(**options):
        return Engine(quick(Breaks), toy_federation(World()), **options)

    tolerant, strict = engine(tolerate_failures=True), engine()
    state = tolerant.start()
    assert sorted(rows(evaluate(tolerant, state))) == [0, 2, 3]
    with pytest.raises(
        ClientFailure,
        match=r"^client 1 failed in evaluation: MemoryError: none left; .*test_evaluate\.py, line \d+; run\.tolerate",
    ):
        evaluate(strict, state)


def test_a_global_model_is_judged_where_there_is_one():
    method = quick(get_method("fedavg"))
    one, two = (Engine(method, toy_federation(World(architectures=n))) for n in (1, 2))
    evaluated = evaluate(one, state := run_rounds(one, 1))
    assert evaluated.accuracy_global == share_right(one.global_model(state), one.federation.test)
    assert evaluate(two, run_rounds(two, 1)).accuracy_global is None
