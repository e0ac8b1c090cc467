import dataclasses

import pytest
import torch

from potluck.core.errors import ConfigError, DataError
from potluck.experiment.assemble import assemble
from potluck.experiment.config import RunConfig
from potluck.experiment.presets import experiment_for
from potluck.experiment.run import Run


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
    import numpy as np

    images = np.random.default_rng(0).integers(0, 255, (12, 20, 20, 3), dtype=np.uint8)
    labels = np.arange(12) % 2
    np.savez(tmp_path / "other.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    federation = assembled(f"federation.public={tmp_path / 'other.npz'}", method="fedmd").federation
    assert federation.public is not None
    inputs, _ = federation.public.batch(torch.arange(12))
    assert inputs.shape == (12, 1, 8, 8)


@pytest.mark.parametrize(
    ("method", "assignments", "expected"),
    [
        ("fedmd", [], "needs public data and federation.public is 'none'"),
        ("fedavg", ["method.sharing.scope=model"], "client 0 has cnn2(width=32) and client 1 has cnn3(width=32)"),
        ("fedavg", ['federation.models=["mlp2", "cnn3"]'], "averages layers by name, but head.weight has shape"),
        ("heterofl", ['federation.models=["mlp2", "mlp3"]'], "needs one architecture"),
    ],
)
def test_unmet_needs_are_told_before_data_are_loaded(method, assignments, expected, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("data were loaded")

    monkeypatch.setattr("potluck.experiment.assemble.load", refuse)
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
        run.play()


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
