"""What a client predicts with is what a file holds: every format, read without the run, against the evaluation."""

import json
import warnings
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from potluck import ConfigError, Examples, Federation, Run, RunConfig, Site, fl, get_method
from potluck.api.export import PROVENANCE, export, format_of
from potluck.core.ground.errors import StorageError
from potluck.core.ground.rng import Key
from potluck.core.nets.scale import Scale, cutting_at
from potluck.models.fitting import FeatureFit, fitted
from potluck.testing.worlds import World, quick, toy_federation

WEIGHTS = ("fedavg", "lgfedavg", "fedgh", "fedkd", "heterofl", "fedrolex", "fjord", "fedselect")
PROGRAMS = ("fedproto", "depthfl", "splitmix", "fedktl", "fedmrl")  # predict with more than a network's own weights
OF_IMAGES = ("flanc",)


class Convolutions(nn.Module):
    """A net of the kind that `flanc` composes."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.second(self.first(x).relu()).relu().mean((2, 3)))


def images() -> Federation:
    generator = torch.Generator().manual_seed(0)

    def draw(count):
        x = torch.randn(count, 1, 6, 6, generator=generator)
        return Examples(x, x.mean((1, 2, 3)).gt(0).long() + x[:, 0, 0, 0].gt(1).long())

    sites = {id: Site(id, "net", draw(40), draw(8), draw(24), capacity) for id, capacity in enumerate((1.0, 0.5, 0.25))}
    return Federation(sites, {"net": Convolutions}, "net", num_classes=3, test=draw(50))


@cache
def finished(method: str):
    """A short run: its models, and each client's scores in its last evaluation."""
    subject = quick(get_method(method))
    federation = (
        images() if method in OF_IMAGES else toy_federation(World(batchnorm=method != "fjord").fit_for(subject))
    )
    run = Run(subject, federation, RunConfig(rounds=2, executor="sequential"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = run.run()
    return run.trained(), {score.client: score for score in result.evaluation.scores}


def accuracy(outputs: torch.Tensor, examples: Examples) -> float:
    return float((outputs.argmax(1) == examples.labels).double().mean())


def of_program(read, examples: Examples) -> torch.Tensor:
    with torch.no_grad():
        return read(examples.batch(torch.arange(len(examples))).inputs)


@pytest.mark.slow
@pytest.mark.parametrize("method", [*WEIGHTS, *PROGRAMS, *OF_IMAGES])
def test_model__predicts_as_the_evaluation_says(method):
    trained, scores = finished(method)
    for client, site in trained.federation.sites.items():
        net = trained.model(client)
        assert not any(module.training for module in net.modules())
        assert accuracy(fl.predict(net, site.test), site.test) == scores[client].accuracy_personal


@pytest.mark.slow
@pytest.mark.parametrize("method", WEIGHTS)
@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_export__weights_make_a_new_network_of_the_architecture_predict_alike(method, name, tmp_path):
    trained, _ = finished(method)
    for client in (0, 1):
        written = export(trained, client, tmp_path / name)
        net = trained.federation.build(written.facts["architecture"], Key(("new",)), Scale(**written.facts["scale"]))
        net.load_state_dict(load_file(written.path) if name.endswith("s") else torch.load(written.path))
        test = trained.federation.sites[client].test
        assert torch.equal(fl.predict(net, test), fl.predict(trained.model(client), test))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "pool"])
def test_export__a_program_of_a_network_with_fitted_features_predicts_as_the_client(kind, tmp_path):
    world = toy_federation(World())
    builders = {key: fitted(b, FeatureFit(6, kind), 4, (10,), key) for key, b in world.architectures.items()}
    run = Run(quick(get_method("fedproto")), replace(world, architectures=builders), RunConfig(rounds=1))
    run.run()
    trained, test = run.trained(), world.sites[1].test
    written = export(trained, 1, tmp_path / "model.pt2")
    outputs = of_program(torch.export.load(written.path).module(), test)
    torch.testing.assert_close(outputs, fl.predict(trained.model(1), test), rtol=1e-3, atol=1e-4)


class Unstaged(nn.Module):
    """Three convolutions with functions between them."""

    def __init__(self):
        super().__init__()
        self.c1, self.c2, self.c3 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 8, 3)
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        x = torch.relu(self.c2(torch.relu(self.c1(x))))
        return self.fc(torch.relu(self.c3(x)).mean((2, 3)))


@cache
def unstaged(method: str):
    run = Run(quick(get_method(method)), replace(images(), architectures={"net": Unstaged}), RunConfig(rounds=1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.run()
    return run.trained()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["depthfl", "fedproto", "fedgkt"])  # end early, at features, and go on from some
@pytest.mark.parametrize("ending", ["pt2", "ts", "onnx"])
def test_export__programs_of_a_network_that_is_cut_predict_as_its_clients(method, ending, tmp_path):
    trained = unstaged(method)
    for client in (0, 2):
        test, written = trained.federation.sites[client].test, tmp_path / f"{client}.{ending}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is deprecated, of late by a FutureWarning
            export(trained, client, written)
            if ending == "onnx":
                session = pytest.importorskip("onnxruntime").InferenceSession(written)
                found = torch.from_numpy(session.run(None, {"input": test.batch(torch.arange(24)).inputs.numpy()})[0])
            else:
                read = torch.export.load(written).module() if ending == "pt2" else torch.jit.load(written)
                found = of_program(read, test)
        torch.testing.assert_close(found, fl.predict(trained.model(client), test), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_export__weights_of_a_network_that_ends_at_an_exit_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^client 2 predicts with CutNet, which is not net as it is built, whose"):
        export(unstaged("depthfl"), 2, tmp_path / "m.safetensors")


@pytest.mark.slow
def test_export__says_where_the_models_table_cuts_the_network(tmp_path):
    chosen = ("c2", "<fc")
    world = replace(images(), architectures={"net": cutting_at(partial(Unstaged), chosen)})
    run = Run(quick(get_method("fedavg")), world, RunConfig(rounds=1))
    run.run()
    facts = export(run.trained(), 0, tmp_path / "m.safetensors").facts
    assert facts["cut"] == ["c2", "<fc"]
    again = replace(world, architectures={"net": cutting_at(partial(Unstaged), tuple(facts["cut"]))})
    parts = [fl.split(one.build("net", Key(("new",)))) for one in (world, again)]
    assert parts[0].intermediate_names == parts[1].intermediate_names == {"c3.weight", "c3.bias"}
    assert export(unstaged("fedproto"), 0, tmp_path / "m.ts").facts["cut"] == []


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.hidden, self.out = nn.Embedding(9, 4), nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, ids, age):
        return {"logits": self.out(self.hidden(torch.cat([self.embed(ids).mean(1), age], 1)).relu())}


def named() -> Federation:
    generator = torch.Generator().manual_seed(0)

    def draw(count):
        ids = torch.randint(9, (count, 5), generator=generator)
        return Examples({"ids": ids, "age": torch.randn(count, 1, generator=generator)}, ids[:, 0] % 3)

    return Federation({id: Site(id, "net", draw(20), draw(8), draw(8)) for id in range(2)}, {"net": Named}, "net", 3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*")  # is deprecated, of late by a FutureWarning
@pytest.mark.parametrize("ending", ["pt2", "ts", "onnx", "safetensors"])
def test_export__a_network_of_inputs_with_names_reads_them_by_these_names(ending, tmp_path):
    run = Run(quick(get_method("local")), named(), RunConfig(rounds=1))
    run.run()
    trained, test = run.trained(), run.trained().federation.sites[1].test
    written, inputs = export(trained, 1, tmp_path / f"model.{ending}"), test.batch(torch.arange(8)).inputs
    expected = fl.predict(trained.model(1), test)
    assert written.facts["input"] == {
        "ids": {"shape": [5], "type": "int64"},
        "age": {"shape": [1], "type": "float32"},
    }
    if ending == "safetensors":
        net = trained.federation.build("net", Key(("new",)))
        net.load_state_dict(load_file(written.path))
        found = fl.predict(net, test)
    elif ending == "onnx":
        session = pytest.importorskip("onnxruntime").InferenceSession(written.path)
        (found,) = map(torch.from_numpy, session.run(None, {name: x.numpy() for name, x in inputs.items()}))
    else:
        read = torch.export.load(written.path).module() if ending == "pt2" else torch.jit.load(written.path)
        found = of_program(read, test)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_export__says_at_which_width_a_sub_model_is_built(tmp_path):
    trained, _ = finished("heterofl")
    assert [export(trained, client, tmp_path / "m.pt").facts["scale"]["width"] for client in (0, 1)] == [1.0, 0.5]
    narrow = export(finished("fjord")[0], 1, tmp_path / "m.pt").facts["scale"]["width"]
    assert 0.4 <= narrow < 0.5  # its level below the capacity of 0.5; 7 of 16 channels


@pytest.mark.slow
@pytest.mark.parametrize("method", [*PROGRAMS, *OF_IMAGES])
def test_export__refuses_weights_that_alone_do_not_predict_as_the_client(method, tmp_path):
    trained, _ = finished(method)
    with pytest.raises(
        ConfigError, match=r"^client 0 predicts with \w+, which is not .* write it as a program: .*\.pt2"
    ):
        export(trained, 0, tmp_path / "model.pt")
    assert not list(tmp_path.iterdir())


def test_export__depthfl_s_shallowest_client_predicts_with_one_classifier_and_others_with_several():
    trained, _ = finished("depthfl")
    kinds = {client: type(trained.model(client)).__name__ for client in trained.federation.sites}
    assert "Ensemble" in kinds.values()


@pytest.mark.slow
@pytest.mark.parametrize("method", [*WEIGHTS[:5], *PROGRAMS, *OF_IMAGES])
def test_export__a_torchscript_program_predicts_as_the_client(method, tmp_path):
    trained, scores = finished(method)
    for client in (0, 1):
        written = export(trained, client, tmp_path / "model.ts")
        test = trained.federation.sites[client].test
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is deprecated, of late by a FutureWarning
            outputs = of_program(torch.jit.load(written.path), test)
        assert accuracy(outputs, test) == scores[client].accuracy_personal
        torch.testing.assert_close(outputs, fl.predict(trained.model(client), test))


@pytest.mark.slow
@pytest.mark.parametrize("method", [*WEIGHTS, *PROGRAMS, *OF_IMAGES])
@pytest.mark.parametrize("name", ["model.pt2", "model.onnx"])
def test_export__programs_of_torch_and_onnx_predict_as_the_client(method, name, tmp_path):
    trained, scores = finished(method)
    written = export(trained, 1, tmp_path / name)
    test = trained.federation.sites[1].test
    if name.endswith(".onnx"):
        import onnxruntime

        session = onnxruntime.InferenceSession(written.path)
        outputs = of_program(lambda x: torch.from_numpy(session.run(None, {"input": x.numpy()})[0]), test)
        kept = session.get_modelmeta().custom_metadata_map
        assert (kept["client"], kept["round"]) == ("1", "2")
    else:
        kept = {PROVENANCE: ""}
        outputs = of_program(torch.export.load(written.path, extra_files=kept).module(), test)
        assert json.loads(kept[PROVENANCE])["client"] == 1
    assert accuracy(outputs, test) == scores[1].accuracy_personal
    torch.testing.assert_close(outputs, fl.predict(trained.model(1), test), rtol=1e-3, atol=1e-4)


def test_export__the_global_model(tmp_path):
    trained, _ = finished("heterofl")
    written = export(trained, None, tmp_path / "model.pt")
    assert written.facts["client"] == "global"
    net = trained.federation.build(None, Key(("new",)))
    net.load_state_dict(torch.load(written.path))
    test = trained.federation.test
    assert torch.equal(fl.predict(net, test), fl.predict(trained.global_model(), test))
    without, _ = finished("fedproto")
    with pytest.raises(ConfigError, match="FedProto has no single global model"):
        export(without, None, tmp_path / "model.pt")


def test_export__provenance_is_in_the_file_or_beside_it(tmp_path):
    trained, _ = finished("fedavg")
    facts = [
        json.loads((export(trained, 1, tmp_path / "m.pt", run={"run": "r"}).path.with_name("m.pt.json")).read_text())
    ]
    with safe_open(export(trained, 1, tmp_path / "m.safetensors", run={"run": "r"}).path, "pt") as file:
        facts.append(json.loads(file.metadata()[PROVENANCE]))
    kept = {PROVENANCE: ""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated, of late by a FutureWarning
        torch.jit.load(export(trained, 1, tmp_path / "m.ts", run={"run": "r"}).path, _extra_files=kept)
    facts.append(json.loads(kept[PROVENANCE]))
    for found in facts:
        assert (found["run"], found["client"], found["round"], found["architecture"]) == ("r", 1, 2, "toy2")
        assert (found["outputs"], found["input"]) == (4, {"shape": [10], "type": "float32"})


def test_export__preprocessing_is_told_step_by_step(tmp_path):
    from dataclasses import replace

    from potluck.data.transforms import Normalise, Pipeline, RandomFlip

    trained, _ = finished("fedavg")
    prepared = Pipeline((Normalise(mean=(0.5,)),), after=(RandomFlip(),))
    sites = {
        id: replace(site, test=replace(site.test, preprocess=prepared)) for id, site in trained.federation.sites.items()
    }
    other = replace(trained.federation, sites=sites)
    engine = type("Engine", (), {"federation": other, "inference_model": trained.engine.inference_model})()
    steps = export(replace(trained, engine=engine), 0, tmp_path / "m.pt").facts["preprocessing"]
    assert steps == [{"step": "Normalise", "mean": (0.5,), "std": (1.0,), "largest": 255.0}]


class Fixed(nn.Module):
    """A net that works for one number of inputs once it is traced."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(10, 4)

    def forward(self, x):
        return self.out(x) + torch.zeros(len(x), 4)


class Odd(nn.Module):
    """A net with an operator that ONNX lacks."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(10, 4)

    def forward(self, x):
        return self.out(torch.special.bessel_j0(x))


def of_net(net):
    federation = toy_federation(World())
    from dataclasses import replace

    federation = replace(federation, architectures={"toy1": net, "toy2": net})
    run = Run(quick(get_method("fedavg")), federation, RunConfig(rounds=1, executor="sequential"))
    run.run()
    return run.trained()


def test_export__a_net_that_depends_on_the_number_of_inputs_is_refused_and_nothing_is_left(tmp_path):
    trained = of_net(Fixed)
    with pytest.raises(ConfigError, match=r"^client 0: the traced program of Fixed fails .* write x\.shape\[0\]"):
        export(trained, 0, tmp_path / "model.ts")
    assert not list(tmp_path.iterdir())
    assert export(trained, 0, tmp_path / "model.pt").path.is_file()


@pytest.mark.slow
def test_export__names_the_operator_that_onnx_lacks(tmp_path):
    trained = of_net(Odd)
    with pytest.raises(ConfigError, match=r"^client 0: Odd cannot be written as onnx: .*bessel_j0") as refused:
        export(trained, 0, tmp_path / "model.onnx")
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=r"Fixed cannot be written as exported: its forward works with sizes"):
        export(of_net(Fixed), 0, tmp_path / "model.pt2")


def test_export__an_earlier_file_stays_if_the_new_one_is_refused(tmp_path):
    (tmp_path / "model.pt").write_text("mine")
    trained, _ = finished("fedproto")
    with pytest.raises(ConfigError):
        export(trained, 0, tmp_path / "model.pt")
    assert (tmp_path / "model.pt").read_text() == "mine"


def test_export__refuses_unknown_clients_formats_and_places(tmp_path):
    trained, _ = finished("fedavg")
    with pytest.raises(ConfigError, match="client 9: expected one of the 4 from 0 to 3"):
        export(trained, 9, tmp_path / "m.pt")
    with pytest.raises(ConfigError, match="its name says no format"):
        format_of(Path("model.bin"))
    with pytest.raises(ConfigError, match="expected one of state-dict, exported, torchscript, onnx"):
        format_of(Path("model.pt"), "pickle")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"^cannot write .*file/m\.pt"):
        export(trained, 0, tmp_path / "file" / "m.pt")
