"""What a node keeps, for how long, and whom it serves."""

import numpy as np
import pytest
import torch

from potluck.core.ground.errors import CheckpointError, ConfigError, DataError
from potluck.core.ground.rng import Key
from potluck.engine.client.runtime import EvalRequest, EvalResult
from potluck.engine.disk.store import Layout
from potluck.experiment.settings.resolve import resolve
from potluck.flower.node.asked import asked
from potluck.flower.node.config import NodeConfig
from potluck.flower.node.service import Node, node_at, own_of
from potluck.flower.node.store import NodeStore
from potluck.flower.server.elsewhere import KeptElsewhere
from potluck.flower.wire.classes import Classes
from potluck.models.split import split


def kept(store):
    return {path.name for path in store._folder.iterdir()} - {"rounds.json", "client.json"}


def test_a_record_is_found_again_by_its_name(tmp_path):
    store = NodeStore(tmp_path)
    name = store.write(b"one", None, 1)
    assert store.read(name.decode()) == b"one"
    assert NodeStore(tmp_path).read(name.decode()) == b"one"


def test_nothing_kept_has_no_name(tmp_path):
    assert NodeStore(tmp_path).write(None, None, 1) is None


def test_a_round_can_be_played_again_from_where_it_began(tmp_path):
    store = NodeStore(tmp_path)
    start = store.write(b"start", None, 1)
    first = store.write(b"first", start, 5)
    second = store.write(b"second", first, 5)
    assert kept(store) == {name.decode() for name in (start, first, second)}
    again = store.write(b"again", start, 5)
    assert store.read(again.decode()) == b"again"
    later = store.write(b"later", second, 9)
    assert kept(store) == {second.decode(), later.decode()}


def test_a_reply_that_came_too_late_is_forgotten(tmp_path):
    store = NodeStore(tmp_path)
    accepted = store.write(b"accepted", None, 1)
    store.write(b"too late", accepted, 2)
    store.write(b"another", accepted, 3)
    new = store.write(b"new", accepted, 4)
    store.write(b"newer", new, 5)
    assert "too late" not in {(tmp_path / name).read_text() for name in kept(store)}


def test_the_round_before_the_last_can_be_undone(tmp_path):
    store = NodeStore(tmp_path)
    start = store.write(b"start", None, 1)
    spoilt = store.write(b"spoilt", start, 5)
    store.write(b"diverged", spoilt, 6)
    assert store.read(start.decode()) == b"start"
    again = store.write(b"again", start, 7)
    assert store.read(again.decode()) == b"again"
    end = store.write(b"end", again, 9)
    assert kept(store) == {again.decode(), end.decode()}


@pytest.mark.parametrize("name", ["0" * 32, "../secret", ""])
def test_what_is_not_there_is_said(tmp_path, name):
    with pytest.raises(CheckpointError, match="is missing"):
        NodeStore(tmp_path).read(name)


def test_damage_is_noticed(tmp_path):
    store = NodeStore(tmp_path)
    name = store.write(b"one", None, 1).decode()
    (tmp_path / name).write_bytes(b"two")
    with pytest.raises(CheckpointError, match="damaged"):
        store.read(name)


def test_the_server_keeps_names_that_a_checkpoint_can_hold():
    store, other = KeptElsewhere(), KeptElsewhere()
    store.write(3, b"a" * 32)
    mark = store.mark()
    store.write(4, b"b" * 32)
    back = other.restore(store.save(mark))
    assert (other.read(3), other.read(4), other.read(5)) == (b"a" * 32, b"b" * 32, None)
    other.roll_back(back)
    assert (other.read(3), other.read(4)) == (b"a" * 32, None)
    for wrong in ("a" * 31, "../" + "a" * 29, 7, None):
        with pytest.raises(CheckpointError, match="not a name of client 4"):
            other.restore(Layout(names={4: wrong}))
    other.adopt({3: f"3-{'c' * 32}.safetensors"})
    assert other.read(3) == b"c" * 32
    with pytest.raises(CheckpointError, match="not a name of client 4"):
        other.adopt({4: f"3-{'a' * 32}.safetensors"})


def header(**more):
    experiment = {"federation": {"dataset": "digits", "clients": 2}, "method": {"name": "local"}}
    return {"experiment": experiment, "run": "run-1", "client": 0, "classes": {"count": 10, "names": None}, **more}


def test_an_owner_says_where_things_may_be_kept():
    with pytest.raises(ConfigError, match="'state'"):
        NodeConfig.of({})


@pytest.mark.parametrize("run", ["../up", ".hidden", "", "a/b"])
def test_a_server_cannot_name_another_folder(tmp_path, run):
    with pytest.raises(ConfigError, match="name of a run"):
        node_at(NodeConfig(tmp_path), header(run=run))


def test_a_client_that_the_experiment_lacks_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has 2 clients"):
        node_at(NodeConfig(tmp_path), header(client=2))


def digits_in(path, *, names=None, digits=10):
    """An archive of digits in a client's own order of classes."""
    rng = np.random.default_rng(0)
    labels = np.arange(4 * digits) % digits
    images = rng.integers(0, 17, (len(labels), 8, 8), dtype=np.uint8)
    named = {} if names is None else {"classes": np.array(names)}
    np.savez(path, x_train=images, y_train=labels, x_test=images, y_test=labels, **named)
    return path


def test_a_nodes_classes_are_matched_by_name_with_the_experiments(tmp_path):
    experiment = resolve(header()["experiment"])
    data = digits_in(tmp_path / "own.npz", names=["9", "2"], digits=2)
    own = own_of(NodeConfig(tmp_path, data, "cnn2"), experiment, 0, Classes(count=10, names=None))
    assert set(own.federation.sites[0].train.labels.tolist()) == {9, 2}
    assert (own.federation.num_classes, own.classes) == (10, ("9", "2"))


def test_a_nodes_images_are_brought_to_the_experiments_size_and_augmented_as_it_says(tmp_path):
    images, labels = np.random.default_rng(0).integers(0, 256, (40, 12, 8), dtype=np.uint8), np.arange(40) % 10
    np.savez(tmp_path / "own.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    home, tree = NodeConfig(tmp_path, tmp_path / "own.npz", "cnn2"), header()["experiment"]
    sized = {**tree["federation"], "image_size": 4, "augmentation": ["cutout"]}
    own = own_of(home, asked({**tree, "federation": sized}, home, 0, None), 0, Classes(count=10, names=None))
    site, test = own.federation.sites[0], own.federation.test
    assert site.train.input_shape == test.input_shape == (1, 4, 4)
    means = images.reshape(40, 4, 3, 4, 2).mean((2, 4)).round()
    assert np.array_equal(site.train.inputs[:, 0].numpy(), means)
    positions = torch.arange(len(site.train))
    plain, augmented = (site.train.batch(positions, key).inputs for key in (None, Key(("cut",))))
    assert not torch.equal(plain, augmented)
    assert torch.equal(torch.where(augmented == 0, 0, plain), augmented)


@pytest.mark.parametrize("fit", ["linear", "pool"])
def test_a_nodes_own_model_has_features_of_the_experiments_width(tmp_path, fit):
    home, tree = NodeConfig(tmp_path, digits_in(tmp_path / "own.npz"), "mlp2"), header()["experiment"]
    sized = {**tree["federation"], "models": ["cnn2"], "feature_width": 9, "feature_fit": fit}
    experiment = asked({**tree, "federation": sized}, home, 0, None)
    federation = own_of(home, experiment, 0, Classes(count=10, names=None)).federation
    assert federation.sites[0].architecture == "mlp2"
    assert split(federation.build("mlp2", Key(("net",)))).num_features == 9


def test_a_node_whose_class_the_experiment_lacks_is_refused(tmp_path):
    data = digits_in(tmp_path / "own.npz", names=[str(digit) for digit in range(1, 11)])
    with pytest.raises(
        DataError, match=r"client 0 \(.*own\.npz\): class '10' is none of the 10 of the server's data set; nearest"
    ):
        node_at(NodeConfig(tmp_path, data, "cnn2"), header())


def test_a_node_whose_model_cannot_be_trained_says_so_before_it_introduces_itself(tmp_path):
    (tmp_path / "nets.py").write_text(
        "from torch import nn\ndef narrow(num_classes, input_shape):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 7))\n"
    )
    home = NodeConfig(tmp_path, digits_in(tmp_path / "own.npz"), f"{tmp_path / 'nets.py'}:narrow")
    with pytest.raises(ConfigError, match=r"nets\.py:narrow: returns a tensor of shape \(batch, 7\); expected logits"):
        node_at(home, header())


def test_a_model_of_its_own_needs_data_of_its_own(tmp_path):
    with pytest.raises(ConfigError, match="--model and --capacity need --data"):
        node_at(NodeConfig(tmp_path, model="cnn2"), header())


def test_a_client_that_has_changed_since_the_run_began_is_refused(tmp_path):
    store = NodeStore(tmp_path / "run")
    store.pin({"client": 0, "data": "abc"})
    store.pin({"client": 0, "data": "abc"})
    with pytest.raises(CheckpointError, match="the data was abc when the run began and is xyz now"):
        NodeStore(tmp_path / "run").pin({"client": 0, "data": "xyz"})


def test_a_node_has_as_many_threads_as_the_run_whatever_the_machine_has(tmp_path):
    seen = []

    class Host:
        def execute(self, job):
            seen.append(torch.get_num_threads())
            return EvalResult(job.client, "model", b"")

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        Node(0, None, Host(), NodeStore(tmp_path), torch_threads=1).execute(EvalRequest(0, b"", None, ()))
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)
