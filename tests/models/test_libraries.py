"""`timm:NAME` and `hf:CONFIG.json`, on stand-ins for the two libraries: `make zoo` has the real ones."""

import json
import sys

import pytest
import torch

from potluck.core.ground.access import only
from potluck.core.ground.errors import ConfigError, PotluckWarning
from potluck.core.ground.inputs import Form, sized, zeros
from potluck.core.nets.scale import Cuts, Scale, built
from potluck.core.nets.splitting import Splits, plan_of
from potluck.core.nets.weights import frozen_names
from potluck.experiment.federation.assemble import builder_of
from potluck.experiment.settings.presets import experiment_for
from potluck.experiment.settings.schema import ModelSpec
from potluck.flower.node.asked import asked
from potluck.flower.node.config import NodeConfig
from potluck.models import get_model

TIMM = """
from types import SimpleNamespace

from torch import nn


def list_models():
    return ["convnet_a", "vit_b"]


def get_pretrained_cfg(name):
    return SimpleNamespace(fixed_input_size=name == "vit_b")


def create_model(name, num_classes, in_chans, width=8, img_size=None, **options):
    assert (img_size is not None) == (name == "vit_b"), img_size
    if options:
        raise TypeError(f"unexpected {sorted(options)}")
    return nn.Sequential(
        nn.Conv2d(in_chans, width, 3), nn.ReLU(), nn.Conv2d(width, width, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(width, num_classes),
    )
"""
TRANSFORMERS = """
from types import SimpleNamespace

from torch import nn

CONFIG_MAPPING = {"tiny": None}


class AutoConfig:
    @staticmethod
    def for_model(kind, **fields):
        return SimpleNamespace(kind=kind, **{"num_channels": 7, "image_size": 9, **fields})


class TinyForImageClassification(nn.Module):
    def __init__(self, config):
        super().__init__()
        assert config.image_size == 8
        first, last = nn.Conv2d(config.num_channels, config.hidden, 3), nn.Conv2d(config.hidden, 4, 3)
        self.body = nn.Sequential(first, nn.ReLU(), last)
        self.classifier = nn.Linear(4, config.num_labels)

    def forward(self, pixel_values):
        return SimpleNamespace(logits=self.classifier(self.body(pixel_values).mean((2, 3))), loss=None)


class AutoModelForImageClassification:
    @staticmethod
    def from_config(config):
        return TinyForImageClassification(config)


def not_a_network(config):
    raise AssertionError("a configuration chooses no other function")
"""


@pytest.fixture(autouse=True)
def stand_ins(tmp_path, monkeypatch):
    for name, text in (("timm", TIMM), ("transformers", TRANSFORMERS)):
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / "site" / name).mkdir(parents=True)
        (tmp_path / "site" / name / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield
    for name in ("timm", "transformers"):
        sys.modules.pop(name, None)


@pytest.fixture
def config(tmp_path):
    """A configuration file of transformers' form."""

    def write(folder="net", **fields):
        place = tmp_path / folder / "config.json"
        place.parent.mkdir(exist_ok=True)
        place.write_text(json.dumps({"model_type": "tiny", "hidden": 5, **fields}))
        return place

    return write


def as_used(name, shape, **options):
    """A net for three classes, as a federation builds it."""
    builder = builder_of(ModelSpec(name, options), 3, shape)
    return built(builder, Scale(), "net", Cuts(shape), Splits(shape, real_inputs=True))


@pytest.mark.parametrize("name", ["timm:convnet_a", "timm:vit_b"])
def test_timm__a_net_is_built_for_the_task_and_is_cut_by_its_dataflow(name):
    net = as_used(name, (1, 8, 8), width=6)
    assert net(torch.zeros(2, 1, 8, 8)).shape == (2, 3)
    assert plan_of(net).features.shape == (6,)


def test_timm__a_narrower_net_is_cut_out_of_the_full_one():
    builder = builder_of(ModelSpec("timm:convnet_a", {"width": 6}), 3, (1, 8, 8))
    narrow = built(builder, Scale(width=0.5), "net", Cuts((1, 8, 8)), Splits((1, 8, 8), real_inputs=True))
    assert narrow[0].weight.shape == (3, 1, 3, 3)


def test_timm__a_net_begins_with_a_file_trains_its_head_and_is_still_cut_narrower(tmp_path):
    tensors = builder_of(ModelSpec("timm:convnet_a", {"width": 6}), 9, (1, 8, 8))().state_dict()
    torch.save(tensors, tmp_path / "a.pt")
    spec = ModelSpec("timm:convnet_a", {"width": 6}, weights=str(tmp_path / "a.pt"), train_only=("head",))
    with pytest.warns(PotluckWarning, match=r"5\.weight, 5\.bias begin as drawn"):
        builder = builder_of(spec, 3, (1, 8, 8))
    for scale in (Scale(), Scale(width=0.5)):
        net = built(builder, scale, "net", Cuts((1, 8, 8)), Splits((1, 8, 8), real_inputs=True))
        assert torch.equal(net[0].weight, tensors["0.weight"][: len(net[0].weight)])
        assert frozen_names(net) == {f"{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")}


@pytest.mark.parametrize("place", ["net/config.json", "net"])
@pytest.mark.parametrize("named", [{}, {"architectures": ["TinyForImageClassification"]}])
def test_hf__a_net_is_built_from_its_configuration_for_the_task_and_gives_logits(tmp_path, config, place, named):
    config(**named)
    net = as_used(f"hf:{tmp_path / place}", (2, 8, 8), hidden=4)
    assert net(torch.zeros(2, 2, 8, 8)).shape == (2, 3)
    assert net.body[0].weight.shape == (4, 2, 3, 3)


@pytest.mark.parametrize("also", [{}, {"age": Form((1,), torch.float32)}])
def test_hf__an_image_among_named_inputs_is_read_by_its_name(config, also):
    shape = {"pixel_values": Form((2, 8, 8), torch.float32), **also}
    net = as_used(f"hf:{config()}", shape)
    inputs = sized(shape, 4, zeros)
    assert net(inputs).shape == (4, 3)
    assert torch.equal(net(inputs), net(inputs["pixel_values"]))


@pytest.mark.parametrize(
    ("name", "options", "shape", "expected"),
    [
        ("timm:nonet", {}, (1, 8, 8), "timm has no 'nonet'; nearest: "),
        ("timm:hf_hub:someone/net", {}, (1, 8, 8), "timm has no 'hf_hub:someone/net'"),
        ("timm:convnet_a", {"pretrained": True}, (1, 8, 8), "weights are not downloaded"),
        ("timm:convnet_a", {"checkpoint_path": "x.pth"}, (1, 8, 8), "checkpoint_path: found 'x.pth'; expected numbers"),
        (
            "timm:convnet_a",
            {"pretrained_cfg": {"file": "x"}},
            (1, 8, 8),
            "pretrained_cfg: found {'file': 'x'}; e",
        ),
        ("timm:convnet_a", {"colour": 3}, (1, 8, 8), "TypeError: unexpected ['colour']"),
        ("timm:convnet_a", {}, (64,), "inputs (64,); expected (channels, height, width)"),
        ("hf:none/config.json", {}, (2, 8, 8), "none/config.json cannot be read"),
    ],
)
def test_what_cannot_be_built_is_said_in_one_line(name, options, shape, expected):
    with pytest.raises(ConfigError) as found:
        builder_of(ModelSpec(name, options), 3, shape)
    assert expected in str(found.value)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({"model_type": "huge"}, "found 'huge'"), ({"model_type": None}, "found None")],
)
def test_hf__what_a_configuration_must_say(config, fields, expected):
    with pytest.raises(ConfigError, match=f"model_type: {expected}; expected one of transformers"):
        get_model(f"hf:{config(**fields)}")(3, (2, 8, 8))


def test_hf__a_configuration_names_a_classifier_and_no_other_function(config):
    place = config(architectures=["not_a_network"])
    assert as_used(f"hf:{place}", (2, 8, 8))(torch.zeros(1, 2, 8, 8)).shape == (1, 3)


def test_a_library_that_is_not_there_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"timm is not installed: pip install 'potluck\[timm\]'"):
        get_model("timm:convnet_a")


def test_an_experiment_names_them_with_options_and_keeps_the_configuration(tmp_path, config):
    config()
    (tmp_path / "one.toml").write_text(
        "[federation]\ndataset = 'digits'\nmodels = ['hf:net', {name = 'timm:vit_b', width = 4, cut = ['0', '5']}]\n"
    )
    experiment = experiment_for(str(tmp_path / "one.toml"), [])
    assert experiment.files == (str(tmp_path / "net/config.json"),)
    assert [str(spec) for spec in experiment.models] == [
        f"hf:{tmp_path / 'net/config.json'}", "timm:vit_b(cut=['0', '5'], width=4)"
    ]  # fmt: skip


def test_a_node_opens_no_configuration_but_its_owners(tmp_path, config):
    mine, other = config("mine"), config("other")
    node = NodeConfig(state=tmp_path, model=f"hf:{mine}")
    assert node.named == [mine]
    with only(node.named):
        assert get_model(f"hf:{mine}")(3, (2, 8, 8))
        with pytest.raises(ConfigError, match="is no file that this node's owner named"):
            get_model(f"hf:{other}")(3, (2, 8, 8))


@pytest.mark.parametrize("model", ["timm:convnet_a", "hf:/etc/config.json", {"name": "timm:vit_b", "width": 4}])
def test_a_server_chooses_no_model_of_a_library_that_a_nodes_owner_has_not(tmp_path, model):
    tree = {"federation": {"dataset": "digits", "models": [model]}, "method": {"name": "fedproto"}}
    with pytest.raises(ConfigError, match="is not installed here"):
        asked(tree, NodeConfig(state=tmp_path), 0, None)


@pytest.mark.parametrize(
    ("cut", "expected"),
    [(["<layer1.0", "fc#2"], None), (["../secret", "fc"], "found '../secret'"), (["fc", 3], "found 3")],
)
def test_a_server_says_where_a_nodes_model_is_cut_by_names_of_modules_alone(tmp_path, cut, expected):
    node = NodeConfig(state=tmp_path, model="timm:vit_b")
    tree = {
        "federation": {"dataset": "digits", "models": ["mlp2"], "server_model": {"name": "timm:vit_b", "cut": cut}},
        "method": {"name": "fedproto"},
    }
    if expected is None:
        server = asked(tree, node, 0, None).server_model
        assert server is not None
        assert server.cut == tuple(cut)
        return
    with pytest.raises(ConfigError, match=f"cut: expected a module's name, {expected}"):
        asked(tree, node, 0, None)
