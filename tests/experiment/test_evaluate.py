import pytest
import torch

from potluck.core.inference import predict
from potluck.engines.inprocess import InProcessEngine
from potluck.experiment.assemble import assemble
from potluck.experiment.evaluate import evaluate
from potluck.experiment.presets import experiment_for
from potluck.methods import get_method
from potluck.testing.worlds import World, play, quick, toy_federation


def share_right(net, examples) -> float:
    return float((predict(net, examples).argmax(1) == examples.labels).double().mean())


@pytest.fixture
def judged():
    experiment = experiment_for("fedin", ["federation.models=[{name='cnn2', width=4}, {name='cnn3', width=4}]"])
    engine = InProcessEngine(experiment.method, assemble(experiment).federation)
    state = play(engine, 1)
    return engine, state


@pytest.mark.parametrize("common_test", [True, False])
def test_every_accuracy_equals_one_counted_by_hand(judged, common_test):
    engine, state = judged
    scores = evaluate(engine, state, common_test=common_test).scores
    assert [score.client for score in scores] == sorted(engine.federation.sites)
    for score in scores[:4]:
        site, net = engine.federation.sites[score.client], engine.inference_model(state, score.client)
        assert score.accuracy_personal == share_right(net, site.test)
        assert score.accuracy_validation == share_right(net, site.validation)
        assert score.accuracy_common == (share_right(net, engine.federation.test) if common_test else None)


def test_equal_models_are_run_once(judged, monkeypatch):
    engine, state = judged
    seen = []

    def counting(net, examples, batch_size=250):
        seen.append(len(examples))
        return predict(net, examples, batch_size)

    monkeypatch.setattr("potluck.engines.host.predict", counting)
    evaluate(engine, state)
    whole = len(engine.federation.test)
    assert seen.count(whole) == 2, "two architectures share layers, so there are two different models"


def test_evaluation_leaves_no_trace(judged):
    engine, state = judged
    before = [engine.store.read(id) for id in engine.federation.sites]
    assert evaluate(engine, state) == evaluate(engine, state)
    assert [engine.store.read(id) for id in engine.federation.sites] == before


def test_means_are_over_clients_that_have_examples():
    method = quick(get_method("fedavg"))
    engine = InProcessEngine(method, toy_federation(World()))
    state = play(engine, 1)
    engine.federation.sites[1].test.inputs.resize_(0, 10)
    object.__setattr__(engine.federation.sites[1].test, "targets", torch.zeros(0, dtype=torch.int64))
    evaluation = evaluate(engine, state)
    values = [score.accuracy_personal for score in evaluation.scores]
    assert values[1] is None
    present = [value for value in values if value is not None]
    assert evaluation.mean("accuracy_personal") == pytest.approx(sum(present) / 3)
    assert evaluation.personal_worst == min(present)
    assert evaluation.by_architecture("accuracy_personal")["toy2"] == values[3]


def test_a_global_model_is_judged_where_there_is_one():
    method = quick(get_method("fedavg"))
    one, two = (InProcessEngine(method, toy_federation(World(architectures=n))) for n in (1, 2))
    judged = evaluate(one, state := play(one, 1))
    assert judged.accuracy_global == share_right(one.global_model(state), one.federation.test)
    assert evaluate(two, play(two, 1)).accuracy_global is None
