import dataclasses
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image

from potluck.core.ground.errors import CheckpointError, ConfigError, DataError
from potluck.core.ground.rng import Key
from potluck.data.datasets import load
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.folder.folder import open_folder
from potluck.experiment.running.execute import prepare
from potluck.experiment.running.run import Run
from potluck.experiment.settings.presets import experiment_for
from potluck.experiment.settings.schema import RunConfig


def assembled(*assignments: str, method: str = "fedin"):
    return assemble(experiment_for(method, list(assignments)))


def rows(examples) -> set[int]:
    return set(examples.rows.tolist())


def test_no_example_is_in_two_places():
    sites = assembled().federation.sites.values()
    train = [row for site in sites for row in (*rows(site.train), *rows(site.validation))]
    test = [row for site in sites for row in rows(site.test)]
    assert len(train) == len(set(train)) == 1438
    assert len(test) == len(set(test)) == 359


def test_every_client_has_validation_and_its_models_are_dealt_in_turn():
    sites = assembled().federation.sites
    assert all(len(site.validation) > 0 for site in sites.values())
    assert [site.architecture for site in sites.values()][:6] == [f"cnn{n}(width=32)" for n in (2, 3, 4, 5, 6, 2)]


AT_RANDOM = ["federation.models=['mlp2', 'mlp3', 'mlp4']", "federation.dealing=random"]


def test_models_dealt_at_random_are_each_clients_own_draw_by_the_seed():
    def dealt(clients, seed=0):
        experiment = experiment_for("local", [*AT_RANDOM, f"federation.clients={clients}", f"run.seed={seed}"])
        return [str(experiment.model_of(client)) for client in range(clients)]

    many = dealt(900)
    assert all(250 < many.count(name) < 350 for name in ("mlp2", "mlp3", "mlp4"))  # 300, with a deviation of 14
    pairs = Counter(pairwise(many))
    assert len(pairs) == 9  # in no order
    assert all(60 < count < 140 for count in pairs.values())
    assert dealt(50) == many[:50]  # whatever other clients there are
    assert dealt(900, seed=1) != many


def test_dealing_at_random_changes_nothing_but_who_has_which_model():
    settings = [*AT_RANDOM, "federation.capacities=[0.25, 1.0]", "federation.public=holdout"]
    experiment = experiment_for("local", settings)
    turn, random = assembled(*settings, "federation.dealing=turn", method="local"), assemble(experiment)
    assert turn.partition_fingerprint == random.partition_fingerprint
    assert turn.federation.public.inputs.equal(random.federation.public.inputs)
    architectures = []
    for there, here in zip(turn.federation.sites.values(), random.federation.sites.values(), strict=True):
        assert (rows(there.validation), there.capacity) == (rows(here.validation), here.capacity)
        architectures.append((there.architecture, here.architecture))
    assert [one for one, _ in architectures][:4] == ["mlp2", "mlp3", "mlp4", "mlp2"]
    assert [other for _, other in architectures] == [str(experiment.model_of(client)) for client in range(10)]
    assert any(one != other for one, other in architectures)


def test_server_architecture__is_the_smallest_model_unless_one_is_named():
    models = "federation.models=['cnn4', 'cnn2', 'cnn3']"
    assert assembled(models).federation.server_architecture == "cnn2"
    assert assembled(models, "federation.server_model=cnn3").federation.server_architecture == "cnn3"


def test_the_seed_decides_the_partition():
    first, again, other = assembled(), assembled(), assembled("run.seed=1")
    assert first.partition_fingerprint == again.partition_fingerprint != other.partition_fingerprint
    assert first.data_checksum == other.data_checksum


def test_held_out_public_examples_are_nobodys_training_examples_and_have_no_labels():
    federation = assembled("federation.public=holdout", method="fedmd").federation
    held = sum(len(site.train) + len(site.validation) for site in federation.sites.values())
    assert federation.public is not None
    assert held + len(federation.public) == 1438
    assert not federation.public.labels.any()
    private = {
        tuple(federation.sites[0].train.inputs[row].flatten().tolist())
        for s in federation.sites.values()
        for row in s.train.rows
    }
    public = {tuple(image.flatten().tolist()) for image in federation.public.inputs}
    assert not private & public


def test_public_images_of_another_data_set_are_fitted_to_the_task(tmp_path):
    images = np.random.default_rng(0).integers(0, 255, (12, 20, 20, 3), dtype=np.uint8)
    labels = np.arange(12) % 2
    np.savez(tmp_path / "other.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    federation = assembled(f"federation.public={tmp_path / 'other.npz'}", method="fedmd").federation
    assert federation.public is not None
    inputs, _, _ = federation.public.batch(torch.arange(12))
    assert inputs.shape == (12, 1, 8, 8)


@pytest.mark.parametrize("size", [4, 12])
def test_images_have_one_size_wherever_they_come_from(tmp_path, size):
    images = np.random.default_rng(0).integers(0, 255, (40, 20, 20), dtype=np.uint8)
    labels = np.arange(40) % 10
    path = tmp_path / "other.npz"
    np.savez(path, x_train=images, y_train=labels, x_test=images, y_test=labels)
    sized = (f"federation.image_size={size}", f"federation.public={path}")
    own = (f"federation.data=['{path}', '{path}']", "federation.clients=2")
    for federation in (
        assembled(*sized, method="fedmd").federation,
        assembled(*sized, *own, method="fedmd").federation,
    ):
        parts = [part for site in federation.sites.values() for part in (site.train, site.validation, site.test)]
        assert {examples.input_shape for examples in (*parts, federation.public, federation.test)} == {(1, size, size)}
    if size == 4:  # the mean of 5 x 5 pixels
        means = images.reshape(40, 4, 5, 4, 5).mean((2, 4)).round()
        assert np.array_equal(federation.public.inputs[:, 0].numpy(), means)
    else:
        assert federation.public.inputs.shape[2:] == (12, 12)  # not first as small as digits are


def test_public_labels_are_those_of_the_examples_held_out():
    federation = assembled("federation.public=holdout", "federation.public_labels=true", method="fedmd").federation
    assert federation.public_labels
    digits = load("digits")
    labelled = zip(digits.train_inputs, digits.train_targets, strict=True)
    numbers = {tuple(image.flatten().tolist()): int(label) for image, label in labelled}
    found = federation.public.labels.tolist()
    assert found == [numbers[tuple(image.flatten().tolist())] for image in federation.public.inputs]
    assert len(set(found)) == 10


@pytest.mark.parametrize(("classes", "fits"), [(10, True), (2, False)])
def test_public_labels_of_another_data_set_must_mean_the_tasks_classes(tmp_path, classes, fits):
    images = np.random.default_rng(0).integers(0, 255, (20, 8, 8), dtype=np.uint8)
    labels = np.arange(20) % classes
    np.savez(tmp_path / "other.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    options = (f"federation.public={tmp_path / 'other.npz'}", "federation.public_labels=true")
    if fits:
        assert assembled(*options, method="fedmd").federation.public.labels.tolist() == labels.tolist()
    else:
        with pytest.raises(ConfigError, match=r"federation\.public_labels: .* has other classes than digits; set"):
            assembled(*options, method="fedmd")


@pytest.mark.parametrize(
    ("method", "assignments", "expected"),
    [
        ("fedmd", [], "it needs public data, and the federation has none; set federation.public"),
        (
            "fedmd",
            ["federation.public=holdout", "method.public_labels=true"],
            "it learns from labelled public data, and there are none; set federation.public_labels, with",
        ),
        ("fedmd", ["federation.public_labels=true"], "public_labels: expected false without federation.public, found"),
        ("fedavg", ["method.sharing.scope=model"], "client 0 has cnn2(width=32) and client 1 has cnn3(width=32)"),
        ("fedavg", ['federation.models=["mlp2", "cnn3"]'], "averages layers by name, but head.weight has shape"),
        ("heterofl", ['federation.models=["mlp2", "mlp3"]'], "needs one architecture"),
        (
            "heterofl",
            ["federation.models=mlp2", "federation.server_model=mlp3"],
            "client 0 has mlp2 and the server mlp3; give federation.models one name, and federation.server_model no",
        ),
    ],
)
def test_unmet_needs_are_told_before_data_are_loaded(method, assignments, expected, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("data were loaded")

    monkeypatch.setattr("potluck.experiment.federation.assemble.load", refuse)
    with pytest.raises(ConfigError) as caught:
        assembled(*assignments, method=method)
    assert expected in str(caught.value)


def test_more_clients_than_samples_is_refused():
    with pytest.raises(DataError, match="3000 clients but only 1438 examples"):
        assembled("federation.clients=3000")


@pytest.mark.usefixtures("global_generator_unchanged")
def test_assembling_leaves_the_global_generator_alone():
    assembled()


def test_a_federation_of_ones_own_is_checked_too():
    from potluck.methods import get_method
    from potluck.testing.worlds import World, toy_federation

    federation = dataclasses.replace(toy_federation(World()), public=None)
    run = Run(get_method("fedmd")(), federation, RunConfig(rounds=1))
    with pytest.raises(ConfigError, match="FedMD cannot run here: it needs public data"):
        run.run()


def test_a_fraction_of_the_training_set_is_dealt_and_the_seed_draws_it():
    def used(*assignments):
        sites = assembled("federation.train_fraction=0.25", *assignments).federation.sites.values()
        return {row for site in sites for row in (*rows(site.train), *rows(site.validation))}

    first, again, other = used(), used(), used("run.seed=1")
    assert len(first) == len(other) == 360
    assert first == again != other


def test_public_examples_come_from_the_fraction_that_is_used():
    options = ("federation.train_fraction=0.5", "federation.public=holdout", "federation.public_fraction=0.2")
    federation = assembled(*options, method="fedmd").federation
    assert len(federation.public) == round(0.2 * 719)
    assert sum(len(site.train) + len(site.validation) for site in federation.sites.values()) == 719 - 144


def test_a_fraction_that_is_no_example_is_refused():
    with pytest.raises(ConfigError, match=r"train_fraction: 1e-05 of 1438 examples is none"):
        assembled("federation.train_fraction=0.00001")


COLOURS = {"ant": 10, "cat": 60, "dog": 120, "owl": 180, "zebra": 240}


def write_pets(root, *classes: str, test: tuple[str, ...] | None = None) -> str:
    """A folder of six images a class to train on and two to test on, each of its class's shade."""
    for part, count, names in (("train", 6, classes), ("test", 2, test or classes)):
        for name in names:
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                Image.new("L", (8, 8), COLOURS[name]).save(root / part / name / f"{number}.png")
    return str(root)


def classes_of(examples, names: tuple[str, ...]) -> set[tuple[str, str]]:
    """What the images show and what their labels say."""
    shown = {shade: name for name, shade in COLOURS.items()}
    pairs = zip(examples.inputs[:, 0, 0, 0].tolist(), examples.targets.tolist(), strict=True)
    return {(shown[shade], names[label]) for shade, label in pairs}


@pytest.mark.parametrize("tested", [("cat", "dog", "owl"), ("ant", "cat", "dog", "owl")])
def test_clients_classes_are_matched_by_name(tmp_path, tested):
    """Three clients of three classes each, five in all, not all of which the common test set has."""
    held = [("cat", "dog", "owl"), ("cat", "dog", "zebra"), ("ant", "dog", "owl")]
    places = [write_pets(tmp_path / str(client), *classes) for client, classes in enumerate(held)]
    common = write_pets(tmp_path / "pets", *tested)
    assembly = assembled(f"federation.dataset={common}", f"federation.data={places}", "federation.clients=3")
    assert assembly.classes == ("ant", "cat", "dog", "owl", "zebra")
    federation = assembly.federation
    assert federation.num_classes == 5
    assert federation.build(None, Key(())).head.out_features == 5
    for client, classes in enumerate(held):
        site, own = federation.sites[client], {(name, name) for name in classes}
        assert classes_of(site.train, assembly.classes) == classes_of(site.test, assembly.classes) == own
    assert classes_of(federation.test, assembly.classes) == {(name, name) for name in tested}


def test_clients_with_few_of_the_classes_change_nothing_for_the_others(tmp_path):
    """Where everybody has all classes labels stay as they were, and so do runs."""
    common, whole = (write_pets(tmp_path / name, "cat", "dog", "owl") for name in ("pets", "whole"))
    part = write_pets(tmp_path / "part", "owl", test=("owl",))
    options = (f"federation.dataset={common}", "federation.clients=2")
    alike = assembled(*options, f"federation.data={[whole, whole]}")
    unlike = assembled(*options, f"federation.data={[whole, part]}")
    assert alike.federation.sites[0].train.targets.tolist() == [0] * 6 + [1] * 6 + [2] * 6
    assert torch.equal(alike.federation.sites[0].train.targets, unlike.federation.sites[0].train.targets)
    assert set(unlike.federation.sites[1].train.targets.tolist()) == {2}
    assert alike.data_checksum == unlike.data_checksum == load(common).checksum


def write_numbers(path, count: int, **more) -> str:
    labels = np.arange(4 * count) % count
    images = np.zeros((4 * count, 8, 8), dtype=np.uint8)
    np.savez(path, x_train=images, y_train=labels, x_test=images, y_test=labels, **more)
    return str(path)


def test_an_archive_without_the_highest_class_is_welcome(tmp_path):
    places = [write_numbers(tmp_path / f"{count}.npz", count) for count in (10, 7)]
    assembly = assembled(f"federation.data={places}", "federation.clients=2")
    assert assembly.classes == tuple("0123456789")
    assert set(assembly.federation.sites[1].train.targets.tolist()) == set(range(7))


def test_an_archive_that_names_its_classes_is_matched_by_name(tmp_path):
    common = write_numbers(tmp_path / "common.npz", 3, classes=np.array(["owl", "cat", "dog"]))
    own = write_numbers(tmp_path / "own.npz", 2, classes=np.array(["dog", "owl"]))
    assembly = assembled(f"federation.dataset={common}", f"federation.data={[own]}", "federation.clients=1")
    assert assembly.classes == ("owl", "cat", "dog")
    assert assembly.federation.sites[0].train.targets.tolist() == [2, 0] * 4


@pytest.mark.parametrize(
    ("common", "own", "message"),
    [
        (["cat", "dog"], ["Cat", "dog"], r"client 0 \(.*own\.npz\) calls a class 'Cat', and common 'cat'; spell it"),
        (None, ["cat", "dog"], r"client 0 \(.*own\.npz\) names its classes, cat, dog, and common numbers them"),
    ],
)
def test_classes_that_cannot_be_matched_are_told_before_data_are_loaded(tmp_path, monkeypatch, common, own, message):
    places = [
        write_numbers(tmp_path / f"{name}.npz", 2, **({} if names is None else {"classes": np.array(names)}))
        for name, names in (("common", common), ("own", own))
    ]
    monkeypatch.setattr("potluck.experiment.federation.assemble.load", lambda *_, **__: pytest.fail("data were loaded"))
    with pytest.raises(DataError, match=message):
        assembled(f"federation.dataset={places[0]}", f"federation.data={places[1:]}", "federation.clients=1")


def test_the_manifest_names_the_classes_and_notices_when_they_are_renamed(tmp_path):
    common = write_pets(tmp_path / "pets", "cat", "dog")
    options = [f"federation.dataset={common}", f"federation.data={[common]}", "federation.clients=1"]
    experiment = experiment_for("local", [*options, "federation.models=['mlp2']", "run.executor=sequential"])
    prepare(experiment, assemble(experiment), tmp_path / "run")
    assert open_folder(tmp_path / "run")["classes"] == ["cat", "dog"]
    for part in ("train", "test"):
        (tmp_path / "pets" / part / "cat").rename(tmp_path / "pets" / part / "ant")
    with pytest.raises(CheckpointError, match=r"classes was \['cat', 'dog'\] and now is \['ant', 'dog'\]"):
        prepare(experiment, assemble(experiment), tmp_path / "run")
