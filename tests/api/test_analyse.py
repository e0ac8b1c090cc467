"""`result.analyse` on real runs: its numbers are those of the models that the runs have trained."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.metrics import silhouette_score

import potluck
from potluck import ConfigError, fl

SMALL = {"federation.train_fraction": 0.1, "run.workers": 1, "method.training.epochs": 1}
MODELS = [{"name": "cnn2", "width": 4}, {"name": "cnn3", "width": 4}]


@pytest.fixture
def small(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(method, **keywords):
        settings = {**SMALL, **keywords.pop("settings", {})}
        given = {"clients": 3, "models": MODELS, "rounds": 1, "to": "runs", "settings": settings, **keywords}
        return potluck.run(method, **given)

    return run


def seen(net, layer, examples):
    """What a module of a network puts out, by a hook and in one batch, flattened."""
    found = []
    handle = net.get_submodule(layer).register_forward_hook(lambda module, args, output: found.append(output))
    with torch.no_grad():
        net(examples.batch(torch.arange(len(examples))).inputs)
    handle.remove()
    return found[0].flatten(1).double().numpy()


def feature_cka(x, y):
    x, y = x - x.mean(0), y - y.mean(0)
    return np.linalg.norm(y.T @ x) ** 2 / (np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y))


def shown(result, count):
    test = result._trained(False).federation.test
    return test.take(torch.linspace(0, len(test) - 1, count).round().long())


@pytest.mark.slow
def test_analyse__similarity_is_of_what_the_stages_of_the_trained_networks_put_out(small):
    local = small("local")
    table = local.analyse(examples=60).frames["similarity"]
    assert len(table) == 7 * 6 / 2  # of two stages, three, and two
    examples = shown(local, 60)
    for row in table[(table.client == 0) & (table.other_client == 1)].itertuples():
        one, other = (
            seen(local.model(client), f"stages.{place}", examples)
            for client, place in ((0, row.place), (1, row.other_place))
        )
        assert row.cka == pytest.approx(feature_cka(one, other), abs=1e-5)
    assert set(table.examples) == {60}


@pytest.mark.slow
def test_analyse__of_networks_cut_by_their_dataflow_too(small, tmp_path):
    (tmp_path / "nets.py").write_text(
        "from torch import nn\n\n\n"
        "class Small(nn.Module):\n"
        "    def __init__(self, num_classes, width=6):\n"
        "        super().__init__()\n"
        "        self.first = nn.Conv2d(1, width, 3, padding=1)\n"
        "        self.second = nn.Conv2d(width, 8, 3)\n"
        "        self.out = nn.Linear(8, num_classes)\n\n"
        "    def forward(self, x):\n"
        "        x = self.second(self.first(x).relu()).relu()\n"
        "        return self.out(x.mean((2, 3)))\n"
    )
    local = small("local", models=["nets.py:Small", {"name": "nets.py:Small", "width": 9}])
    table = local.analyse(examples=50).frames["similarity"]
    rows = table[(table.client == 0) & (table.other_client == 1) & (table.stage == 0) & (table.other_stage == 0)]
    (row,) = rows.itertuples()
    first, second = (seen(local.model(client), "first", shown(local, 50)) for client in (0, 1))
    candidates = [feature_cka(first, second), feature_cka(first.clip(0), second.clip(0))]  # before or behind the ReLU
    assert min(abs(row.cka - one) for one in candidates) < 1e-5
    last = table[(table.client == 0) & (table.other_client == 2)].iloc[-1]
    features = [fl.split(local.model(client)).features for client in (0, 2)]
    inputs = shown(local, 50).batch(torch.arange(50)).inputs
    with torch.no_grad():
        one, other = (of(inputs).double().numpy() for of in features)
    assert last.cka == pytest.approx(feature_cka(one, other), abs=1e-5)


@pytest.mark.slow
def test_analyse__maps_the_features_that_heads_read_of_clients_with_one_width(small):
    models = [{"name": "cnn2", "width": 4}, {"name": "cnn2", "width": 6}]
    local = small("local", models=models)
    found = local.analyse(examples=40)
    test = shown(local, 40)
    inputs = test.batch(torch.arange(40)).inputs
    with torch.no_grad():
        features = np.concatenate([fl.split(local.model(client)).features(inputs).numpy() for client in (0, 2)])
    (row,) = found.frames["separation"].itertuples()
    assert (row.clients, row.width, row.points) == (2, 4, 80)
    assert row.silhouette_by_client == pytest.approx(silhouette_score(features, [0] * 40 + [2] * 40), abs=1e-5)
    assert row.silhouette_by_class == pytest.approx(silhouette_score(features, test.labels.tolist() * 2), abs=1e-5)
    points = found.frames["map"]
    assert list(points.label) == test.labels.tolist() * 2
    expected = PCA(2).fit_transform(features.astype(np.float64))
    np.testing.assert_allclose(np.abs(points[["pca_x", "pca_y"]]), np.abs(expected), atol=1e-5)
    (of_one,) = (mapped := local.analyse(examples=40, map_class=3).frames)["separation"].itertuples()
    threes = test.labels.numpy() == 3
    assert list(mapped["map"].label) == [3] * 2 * threes.sum()
    chosen = np.concatenate([features[:40][threes], features[40:][threes]])
    owners = [0] * threes.sum() + [2] * threes.sum()
    assert of_one.silhouette_by_client == pytest.approx(silhouette_score(chosen, owners), abs=1e-5)
    assert of_one.silhouette_by_class is None  # of one class


def test_analyse__drift_and_calibration_are_of_the_trained_networks(small):
    local = small("local")
    frames = local.analyse(examples=16).frames
    drift = frames["drift"].set_index("layer")
    weights = [local.model(client).state_dict()["stages.stem.conv.weight"].double().flatten() for client in range(3)]
    middle = sum(weights) / 3
    away = [float((one - middle).norm() / middle.norm()) for one in weights]
    assert drift.loc["stages.stem.conv", "mean"] == pytest.approx(np.mean(away))
    assert drift.loc["stages.stem.conv", "largest"] == pytest.approx(max(away))
    table = frames["calibration"].set_index("whose")
    for score in local.scores:
        assert table.loc[f"client {score.client}", "accuracy"] == pytest.approx(score.accuracy_personal)
    test = local._trained(False).federation.sites[1].test
    shares = fl.predict(local.model(1), test).softmax(1)
    actual = torch.nn.functional.one_hot(test.labels, 10)
    assert table.loc["client 1", "brier"] == pytest.approx(float((shares - actual).square().sum(1).mean()), abs=1e-6)
    assert table.loc["all", "examples"] == sum(score.examples_test for score in local.scores)
    assert frames["bins"].query("whose == 'all'").examples.sum() == table.loc["all", "examples"]


@pytest.mark.slow
def test_analyse__says_who_profits_beside_other_runs(small):
    local, fedavg = small("local"), small("fedavg", models=MODELS[:1])
    other = small("local", models=MODELS[:1])
    found = fedavg.analyse(local, other.folder, clients=2)
    table = found.frames["clients"]
    gains = [a.accuracy_personal - b.accuracy_personal for a, b in zip(fedavg.scores, other.scores, strict=True)]
    assert list(table.gain) == [pytest.approx(gain) for gain in gains]
    assert found.frames["gains"].gain.item() == pytest.approx(np.mean(gains))
    same = found.frames["similarity"].query("experiment == 'fedavg' and stage == other_stage")
    assert list(same.cka) == [pytest.approx(1)] * 2  # stages of one pair
    drift = found.frames["drift"]
    assert drift[drift.experiment == "fedavg"]["mean"].max() < 1e-6 < drift["mean"].max()
    assert "With fedavg" in str(found)


@pytest.mark.slow
def test_analyse__draws_over_the_rounds_that_a_run_has_kept(small, tmp_path):
    settings = {"run.keep_every": 1}
    long, short = small("local", rounds=3, settings=settings), small("local", rounds=1)
    found, before = long.analyse(examples=40), short.analyse(examples=40)
    curve = found.frames["similarity_by_round"]
    assert list(dict.fromkeys(curve["round"])) == [1, 2, 3]
    for number, of in ((1, before), (3, found)):
        rows = of.frames["similarity"].query("client != other_client and stage == other_stage")
        ours = curve[curve["round"] == number].set_index("stage")
        for stage, mean in rows.groupby("stage").unbiased_cka.mean().items():
            assert ours.loc[stage, "unbiased_cka"] == pytest.approx(mean)
    drift = found.frames["drift_by_round"].query("round == 1").reset_index()
    assert list(drift["mean"]) == [pytest.approx(value) for value in before.frames["drift"]["mean"]]
    separation = found.frames["separation_by_round"].silhouette_by_client
    assert separation.iloc[0] == pytest.approx(before.frames["separation"].silhouette_by_client.item())
    assert "similarity_by_round" not in before.frames
    page = found.write("out")
    assert {"similarity-over-rounds.pdf", "drift-over-rounds.svg"} <= {p.name for p in page.parent.rglob("*")}
    next((long.folder / "checkpoint").glob("round-000001.json")).write_text("{")
    remarks = potluck.open_run(long.folder).analyse(examples=40).findings.remarks
    assert any("no further rounds" in remark and "is damaged" in remark for remark in remarks)


@pytest.mark.slow
def test_analyse__looks_at_the_network_inside_what_a_method_predicts_with(small):
    proto = small("fedproto")
    found = proto.analyse(examples=30)
    (row,) = found.frames["similarity"].query("other_client - client == 2 and stage == other_stage == 1").itertuples()
    nets = [proto.model(client).net for client in (0, 2)]
    layer = f"stages.{row.place}"
    assert "stages.stem.conv" in set(found.frames["drift"].layer)
    expected = feature_cka(*(seen(net, layer, shown(proto, 30)) for net in nets))
    assert row.cka == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_analyse__tells_from_records_alone_where_models_cannot_be_made(small, tmp_path):
    draws = np.random.default_rng(0)
    arrays = {"x_train": draws.normal(size=(60, 8)).astype(np.float32), "y_train": draws.integers(2, size=60)}
    arrays |= {"x_test": draws.normal(size=(30, 8)).astype(np.float32), "y_test": draws.integers(2, size=30)}
    np.savez("own.npz", **arrays)
    keywords = {"dataset": "own.npz", "models": ["mlp4"], "settings": {"federation.train_fraction": 1.0}}
    local, fedavg = (small(method, **keywords) for method in ("local", "fedavg"))
    (tmp_path / "own.npz").unlink()
    found = potluck.open_run(fedavg.folder).analyse(local)
    assert {"gains", "fairness", "costs"} <= set(found.frames)
    assert not {"similarity", "drift", "calibration"} & set(found.frames)
    assert sum("nothing of its models" in remark for remark in found.findings.remarks) == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"clients": 1}, "clients: expected a whole number of at least 2, found 1"),
        ({"examples": 5000}, "examples: expected at most 4096, found 5000; every stage of every client keeps"),
        ({"measure": "global"}, "measure 'global': who profits is told by scores of single clients"),
        ({"target": 60.0}, "target 60: accuracy is a share; expected 0 to 1, such as 0.6"),
        ({"map_class": 10}, "map_class: expected a class with two of the 359 common test examples, one of 0, 1, .* 10"),
        ({"alone": "fedper"}, "no experiment 'fedper' to compare with"),
    ],
)
def test_analyse__refuses_in_one_line(small, words, expected):
    local = small("local")
    with pytest.raises(ConfigError, match=expected):
        local.analyse(**words)


def test_analyse__needs_a_folder(small):
    with pytest.raises(ConfigError, match="has no folder to read; run it with to='runs'"):
        small("local", to=None).analyse()
