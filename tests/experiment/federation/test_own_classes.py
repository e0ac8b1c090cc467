"""`federation.classes = "own"`: what every client's network has outputs for, learns, and is measured on."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import potluck
from potluck.core.ground.errors import ConfigError
from potluck.core.message import Message
from potluck.core.nets.classes import own_classes_of
from potluck.core.nets.weights import parameters_of
from potluck.core.requests.inference import predict
from potluck.engine.executors.hearing import Hearing
from potluck.engine.rounds.engine import Engine
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.settings.resolve import resolve
from potluck.methods import get_method, list_methods
from potluck.records import CHECKPOINT, LAST, Checkpoint
from potluck.testing.worlds import quick

OWN = {
    "dataset": "digits",
    "classes": "own",
    "clients": 4,
    "partition": {"name": "pathological", "classes": 3},
    "models": ["mlp2"],
}


def assembled(method="fedavg", **federation):
    return assemble(resolve({"method": {"name": method}, "federation": {**OWN, **federation}})).federation


def test_a_network_has_outputs_for_the_classes_that_its_client_learns_and_no_others():
    federation = assembled()
    for id, site in federation.sites.items():
        own = federation.classes_of(id)
        labels = {*site.train.labels.tolist(), *site.validation.labels.tolist()}
        assert own.numbers == tuple(sorted(labels))
        assert {*site.test.labels.tolist()} <= labels
        assert site.architecture == f"mlp2[{own}]"
        assert federation.roster[id].shapes["head.weight"][0] == len(own.numbers)
        assert federation.roster[id].base == "mlp2"


def test_clients_of_one_architecture_begin_alike_whatever_their_classes():
    federation = assembled()
    server = Engine(quick(get_method("fedavg")), federation).server(0)
    whole = parameters_of(server.build("mlp2"))
    for id, site in federation.sites.items():
        mine, own = parameters_of(server.build(site.architecture)), torch.tensor(federation.classes_of(id).numbers)
        for name, tensor in mine.items():
            assert torch.equal(tensor, whole[name][own] if name.startswith("head.") else whole[name]), name


def test_fedavg_averages_each_row_of_the_head_over_those_who_have_its_class():
    federation = assembled()
    engine = Engine(quick(get_method("fedavg")), federation, executor=(heard := Hearing()))
    before = engine.start()
    after, _ = engine.round(1, before, [0, 1, 2])
    replies = {call.client: Message.decode(answer.payload) for call, answer in heard.exchanges}
    old, found = (state.weights["all"]["head.weight"] for state in (before, after))
    for label in range(10):
        rows = [
            (reply["weights"]["head.weight"][own.numbers.index(label)], reply["examples"])
            for id, reply in replies.items()
            if label in (own := federation.classes_of(id)).numbers
        ]
        expected = sum(row * n for row, n in rows) / sum(n for _, n in rows) if rows else old[label]
        assert_close(found[label], expected)
    assert any(all(label not in federation.classes_of(id).numbers for id in replies) for label in range(10))


def test_the_common_test_set_counts_what_a_client_could_know():
    federation = assembled("local")
    engine = Engine(quick(get_method("local")), federation)
    state, _ = engine.round(1, engine.start(), [0])
    (result,) = engine.evaluate(state, {0: ("common", "own")})
    own = federation.classes_of(0)
    known = torch.isin(federation.test.labels, torch.tensor(own.numbers))
    confusion = result.sums["common"]["confusion"]
    assert confusion.sum() == known.sum() < len(federation.test)
    assert confusion[:, own.lacking].sum() == confusion[own.lacking].sum() == 0
    predicted = predict(engine.inference_model(state, 0), federation.test.take(known.nonzero().flatten())).argmax(1)
    assert confusion.diagonal().sum() == (predicted == federation.test.labels[known]).sum()


def test_who_has_all_classes_has_the_network_that_everyone_has_otherwise():
    federation = assembled(partition={"name": "iid"})
    assert {site.architecture for site in federation.sites.values()} == {"mlp2"}
    assert own_classes_of(Engine(quick(get_method("fedavg")), federation).server(0).build("mlp2")) is None


def test_a_configuration_that_does_not_speak_of_classes_has_the_name_that_it_had():
    plain = {key: value for key, value in OWN.items() if key != "classes"}
    experiment = resolve({"method": {"name": "fedavg"}, "federation": plain})
    assert "classes" not in experiment.tree()["federation"]


@pytest.mark.parametrize("name", [name for name in list_methods() if not get_method(name).aligns_classes])
def test_methods_that_do_not_align_classes_are_refused_before_any_data_are_loaded(name):
    with pytest.raises(ConfigError, match=r"own classes alone; leave out federation\.classes, or use a method that"):
        assemble(resolve({"method": {"name": name}, "federation": {**OWN, "public": "holdout", "public_labels": True}}))


def test_a_task_without_classes_has_none_of_ones_own(tmp_path):
    x, y = np.zeros((20, 4), np.float32), np.tile(np.array([[1, 0, 1]], np.float32), (20, 1))
    np.savez(tmp_path / "signs.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    with pytest.raises(ConfigError, match=r"federation.classes: found 'own', and multilabel has no single class"):
        assembled("local", dataset=str(tmp_path / "signs.npz"), task="multilabel", partition={"name": "iid"})


NET = """
from torch import nn

def fixed(input_shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
"""


def test_a_network_with_a_fixed_number_of_outputs_is_told_to_take_num_classes(tmp_path):
    (tmp_path / "net.py").write_text(NET)
    with pytest.raises(ConfigError, match=r"fixed has the same outputs whatever the classes; expected .* num_classes"):
        assembled("local", models=[f"{tmp_path / 'net.py'}:fixed"])


def run(method, to=None, rounds=2, **keys):
    settings = {"federation.classes": "own", "federation.partition.classes": 3, **keys}
    return potluck.run(
        method, dataset="digits", clients=3, partition="pathological", models=["mlp2"], rounds=rounds, to=to,
        settings=settings, progress=False,
    )  # fmt: skip


@pytest.mark.slow
def test_a_client_deploys_its_own_outputs_with_their_names(tmp_path):
    result = run("local", tmp_path)
    whole = result.model(1)
    own = own_classes_of(whole)
    for name in ("one.safetensors", "one.pt2"):
        facts = result.export(1, tmp_path / name).facts
        assert facts["classes"] == [str(number) for number in own.numbers]
        assert facts["outputs"] == len(own.numbers)
    program = torch.export.load(tmp_path / "one.pt2").module()
    inputs = torch.rand(5, 1, 8, 8)
    with torch.no_grad():
        assert_close(program(inputs), whole(inputs)[:, list(own.numbers)])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "felo"])
def test_the_run_is_the_same_to_the_last_bit_in_processes_and_resumed(tmp_path, method):
    def last(to):
        (folder,) = (tmp_path / to).iterdir()
        return Checkpoint.read(folder / CHECKPOINT / LAST).digest

    run(method, tmp_path / "whole", 3, **{"run.executor": "sequential"})
    run(method, tmp_path / "workers", 3, **{"run.executor": "workers", "run.workers": 2})
    run(method, tmp_path / "halves", 1, **{"run.executor": "sequential"})
    (folder,) = (tmp_path / "halves").iterdir()
    potluck.resume(folder, rounds=3, progress=False)
    assert last("whole") == last("workers") == last("halves")
