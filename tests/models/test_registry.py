import inspect
import subprocess
import sys
from dataclasses import MISSING
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest

from potluck import models
from potluck.core.ground.errors import ConfigError
from potluck.core.nets.scale import Scale
from potluck.experiment.federation.parts import part_of
from potluck.experiment.settings.keys import options_of
from potluck.models import get_model, image_size, list_models


def offer(monkeypatch, **contents):
    """Let an installed distribution offer a family module with these contents."""
    family = ModuleType("their_family")
    family.__dict__.update(contents)
    monkeypatch.setitem(sys.modules, "their_family", family)
    point = EntryPoint("theirs", "their_family", "potluck.models")
    monkeypatch.setattr(models, "plugins", lambda group: {"theirs": point} if group == "potluck.models" else {})


def test_numbers_are_listed_in_counting_order(monkeypatch):
    offer(monkeypatch, VARIANTS={"resnet9": lambda: None})
    assert [name for name in list_models("resnet*") if name[-1].isdigit()] == [
        f"resnet{number}" for number in (9, 10, 14, 18, 20, 22, 26, 32, 34, 56, 110)
    ]


def test_pattern_selects():
    assert list_models("cnn*") == ["cnn2", "cnn3", "cnn4", "cnn5", "cnn6"]
    assert list_models("nothing*") == []
    assert {"heterofl_cnn", "preresnet18", "mlp2"} < set(list_models())


def test_every_name_leads_to_the_function_of_that_name():
    assert [get_model(name).__name__ for name in list_models()] == list_models()


def test_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ConfigError) as caught:
        get_model("resnet19")
    assert str(caught.value).startswith("unknown model 'resnet19'; nearest: ")
    assert "resnet18" in str(caught.value)
    assert str(caught.value).endswith("; all: potluck list models")


NETS = """
from torch import nn

def small(num_classes, input_shape, width=4):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, num_classes))
"""


def test_a_function_of_a_file_is_a_model(tmp_path):
    (tmp_path / "nets.py").write_text(NETS)
    net = get_model(f"{tmp_path}/nets.py:small")(10, (1, 8, 8), width=3)
    assert net[1].out_features == 3
    with pytest.raises(ConfigError, match="has no 'large' that fits; expected a function that builds a network"):
        get_model(f"{tmp_path}/nets.py:large")
    with pytest.raises(ConfigError, match="no such file; expected a Python file"):
        get_model(f"{tmp_path}/other.py:small")


def test_installed_families_are_found(monkeypatch):
    def tiny():
        pass

    offer(monkeypatch, VARIANTS={"tiny": tiny})
    assert get_model("tiny") is tiny


def test_a_name_may_be_offered_only_once(monkeypatch):
    offer(monkeypatch, VARIANTS={"mlp2": lambda: None})
    with pytest.raises(ConfigError, match=r"'mlp2' is in potluck\.models\.mlp and in their_family"):
        list_models()


def test_a_family_without_variants_is_named(monkeypatch):
    offer(monkeypatch)
    with pytest.raises(ConfigError, match="their_family has no VARIANTS"):
        list_models()


def test_importing_the_registry_imports_no_family():
    code = "import sys, potluck.models; print([name for name in sys.modules if 'potluck.models.' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


WITH_WIDTH = [name for name in list_models() if "width" in inspect.signature(get_model(name)).parameters]


@pytest.mark.parametrize("name", WITH_WIDTH)
def test_every_variant_with_a_width_refuses_one_below_one(name):
    with pytest.raises(ConfigError, match=r"^width 0; expected at least 1$"):
        get_model(name)(3, (1, 8, 8), width=0)


def test_the_width_of_few_variants_is_fixed_or_has_another_option():
    assert set(list_models()) - set(WITH_WIDTH) == {
        "mnist1d_logistic",
        "mobilenetv2",
        "preresnet20",
        "shufflenetv2",
    }


def test_image_size_asks_for_an_image():
    assert image_size((3, 32, 24)) == (3, 24)
    with pytest.raises(ConfigError, match=r"input shape \(10,\); expected an image"):
        image_size((10,))
    with pytest.raises(ConfigError, match=r"input shape \(8, 8\); .*; give grey images an axis for .*: x\[:, None\]"):
        image_size((8, 8))
    with pytest.raises(ConfigError, match="image of 32 x 4; expected at least 8 x 8"):
        image_size((3, 32, 4), smallest=8)


OWN_NETS = """
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes, width=4):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.LazyLinear(width), nn.Linear(width, num_classes))

def swapped(input_shape, num_classes):
    return nn.Linear(input_shape[0], num_classes)

def with_option(num_classes, hidden):
    return nn.Linear(hidden, num_classes)

def sized(scale):
    return nn.Linear(scale.of(8), 3)

def either_way(**anything):
    return nn.Linear(len(anything) + 1, 3)

net = nn.Linear(2, 3)
"""


@pytest.fixture
def own_nets(tmp_path):
    (tmp_path / "nets.py").write_text(OWN_NETS)
    return str(tmp_path / "nets.py")


def test_get_model__calls_what_a_file_has_with_the_arguments_that_it_names(own_nets):
    assert get_model(f"{own_nets}:Net")(3, (2,), width=5).layers[2].weight.shape == (3, 5)
    assert get_model(f"{own_nets}:swapped")(3, (2,)).weight.shape == (3, 2)
    assert get_model(f"{own_nets}:sized")(3, (2,), scale=Scale(width=0.5)).weight.shape == (3, 4)
    assert get_model(f"{own_nets}:either_way")(3, (2,)).weight.shape == (3, 1)


def test_get_model__hands_no_fact_over_for_an_argument_of_another_name(own_nets):
    build = get_model(f"{own_nets}:with_option")
    with pytest.raises(ConfigError, match=r"needs an argument hidden; .* by these names; .* hidden = \.\.\.}"):
        build(3, (2,))
    assert build(3, (2,), hidden=7).weight.shape == (3, 7)


def test_get_model__refuses_a_network_that_all_clients_would_share(own_nets):
    with pytest.raises(ConfigError, match=r":net is a network; expected the class or a function that builds one"):
        get_model(f"{own_nets}:net")


@pytest.mark.parametrize("name", ["Net", "swapped", "with_option"])
def test_kind_of__tells_a_model_by_its_base_and_by_the_names_of_its_arguments(own_nets, name):
    assert part_of(f"{own_nets}:{name}")[1] == "model"


def test_options_of__says_of_an_option_that_it_has_no_default(own_nets):
    (hidden,) = options_of(get_model(f"{own_nets}:with_option"))
    assert hidden.default is MISSING
    (width,) = options_of(get_model(f"{own_nets}:Net"))
    assert width.default == 4
