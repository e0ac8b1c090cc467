"""A file of initial weights, and the modules that are trained: of any network, by what a model's table says."""

import pickle
import re

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from potluck.core.ground.access import only
from potluck.core.ground.errors import ConfigError, PotluckWarning
from potluck.core.ground.rng import Key, isolated
from potluck.core.nets.modes import held_layers, to_training
from potluck.core.nets.scale import Cuts, Scale, built
from potluck.core.nets.splitting import Splits
from potluck.core.nets.weights import frozen_names, learnt_of
from potluck.experiment.federation.assemble import builder_of
from potluck.experiment.settings.schema import ModelSpec
from potluck.models.initial import HEAD, file_digest, head_names, tensors_in

SHAPE = (1, 8, 8)
NETS = """
from torch import nn


class Net(nn.Module):
    def __init__(self, num_classes, width=4, asleep=False):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, width, 3), nn.BatchNorm2d(width)
        self.second, self.fc = nn.Conv2d(width, 6, 3), nn.Linear(6, num_classes)
        self.train(not asleep)

    def forward(self, x):
        return self.fc(self.second(self.norm(self.first(x)).relu()).mean((2, 3)))


def options(num_classes, weights="none", train_only="none"):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.Linear(3, num_classes, bias=weights == "biased"))
"""


@pytest.fixture
def nets(tmp_path):
    (tmp_path / "nets.py").write_text(NETS)
    return str(tmp_path / "nets.py")


@pytest.fixture
def build(nets):
    """The builder of the net in the file, or another one."""

    def made(classes=3, name=f"{nets}:Net", options=None, **said):
        return builder_of(ModelSpec(name, options or {}, **said), classes, SHAPE)

    return made


@pytest.fixture
def stored(tmp_path, build):
    """The net for seven classes, and its tensors in a file."""

    def saved(file="net.pt", change=lambda tensors: tensors, **said):
        tensors, place = build(classes=7, **said)().state_dict(), tmp_path / file
        save = save_file if file.endswith(".safetensors") else torch.save
        save(change(tensors), place)
        return tensors, str(place)

    return saved


def as_drawn(builder, draw="a"):
    with isolated(Key((draw,))):
        return builder()


@pytest.mark.parametrize("name", ["net.safetensors", "net.pt", "net.pth", "net.bin"])
@pytest.mark.parametrize("prefix", ["", "model.", "module.", "module.model."])
def test_the_tensors_are_the_files_and_a_head_of_another_shape_is_as_drawn(build, stored, name, prefix):
    tensors, file = stored(name, lambda found: {prefix + key: tensor for key, tensor in found.items()})
    warned = r"9 of the network's 11 tensors are the file's; fc\.weight, fc\.bias begin as drawn$"
    with pytest.warns(PotluckWarning, match=warned):
        builder = build(weights=file)
    found, drawn = as_drawn(builder).state_dict(), as_drawn(build()).state_dict()
    for key, tensor in found.items():
        assert torch.equal(tensor, (drawn if key.startswith("fc.") else tensors)[key]), key


def test_a_head_that_fits_is_loaded_too_and_nothing_is_said(build, stored):
    tensors, file = stored()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in build(7, weights=file)().state_dict().items())


def test_what_a_file_lacks_and_what_it_has_too_much_is_said(build, stored):
    def changed(tensors):
        return {"old.bias": torch.ones(2), **{name: t for name, t in tensors.items() if name != "second.bias"}}

    _, file = stored(change=changed)
    with pytest.warns(
        PotluckWarning, match=r"10 of .* 11 .*; second\.bias begins as drawn; the network has no old\.bias$"
    ):
        build(7, weights=file)


def test_the_head_is_what_the_split_finds_or_says(build):
    assert head_names(build()(), SHAPE) == {"fc.weight", "fc.bias"}
    behind = {"second.weight", "second.bias", "fc.weight", "fc.bias"}
    assert head_names(build()(), SHAPE, ("first", "<second")) == behind
    with pytest.raises(ConfigError):
        head_names(build()(), SHAPE, ("first", "nowhere"))
    assert head_names(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), SHAPE) == {
        "1.weight",
        "1.bias",
    }  # nothing to split


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda net: {"a.b": torch.ones(2)},
            "none of its 1 tensors is one of the network's 11; found a.b; expected first.",
        ),
        (
            lambda net: {**net, "first.weight": torch.ones(5, 1, 3, 3)},
            "first.weight has the shape (5, 1, 3, 3); expected",
        ),
        (lambda net: {**net, "a": 3}, "found 'a' of type int in it; expected tensors by name: save net.state_dict()"),
        (lambda net: {"state_dict": net}, "found 'state_dict' of type OrderedDict in it; expected tensors by name"),
        (lambda net: [1], "found something of type list in it; expected tensors by name"),
        (lambda net: {}, "found no tensor in it; expected tensors by name"),
        (
            lambda net: {"x." + name: t for name, t in net.items()},
            "found x.first.weight, x.first.bias, x.norm.weight and",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_refused_in_one_line(build, stored, change, expected):
    _, file = stored(change=change)
    with pytest.raises(ConfigError, match=re.escape(expected)) as found:
        build(weights=file)
    assert "\n" not in str(found.value)


class Code:
    def __reduce__(self):
        return print, ("ran",)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("gone.pt", None, "gone.pt: cannot be read: No such file"),
        ("folder.pt", "folder", "folder.pt: cannot be read"),
        ("net.npz", b"x", "found the ending '.npz'; expected a file of tensors by name: .safetensors, .pt"),
        ("net.safetensors", b"x", "net.safetensors: cannot be read"),
        ("net.pt", b"x", "net.pt: cannot be read as tensors alone"),
        ("code.pt", pickle.dumps(Code()), "code.pt: cannot be read as tensors alone"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_and_no_code_in_it_runs(build, tmp_path, capsys, name, content, expected):
    if content == "folder":
        (tmp_path / name).mkdir()
    elif content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(expected)) as found:
        build(weights=str(tmp_path / name))
    assert "\n" not in str(found.value)
    assert "ran" not in capsys.readouterr().out


def test_a_file_is_read_again_when_it_has_changed_and_only_then(stored, monkeypatch):
    _, file = stored()
    before, digest = tensors_in(file), file_digest(file)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "load", None)
        assert tensors_in(file).keys() == before.keys()
    torch.save({"a": torch.ones(3)}, file)
    assert tensors_in(file).keys() == {"a"}
    assert file_digest(file) != digest


def test_access_is_asked_each_time_also_of_a_file_that_was_read(stored, tmp_path):
    _, file = stored()
    tensors_in(file)
    with only([tmp_path / "other.pt"]):
        for reads in (tensors_in, file_digest):
            with pytest.raises(ConfigError, match="owner named"):
                reads(file)


@pytest.mark.parametrize(
    ("train_only", "trained", "held"),
    [
        ((HEAD,), {"fc.weight", "fc.bias"}, {"norm"}),
        (("fc",), {"fc.weight", "fc.bias"}, {"norm"}),
        (("norm", HEAD), {"norm.weight", "norm.bias", "fc.weight", "fc.bias"}, set()),
    ],
)
@pytest.mark.parametrize("asleep", [False, True])
def test_all_but_what_is_named_is_frozen_and_batchnorm_in_it_stays_in_evaluation_mode(
    build, train_only, trained, held, asleep
):
    net = to_training(build(train_only=train_only, options={"asleep": asleep})())
    assert {name for name, parameter in net.named_parameters() if parameter.requires_grad} == trained
    assert {name for name, module in net.named_modules() if module in held_layers(net)} == held
    assert learnt_of(net).keys() == net.state_dict().keys() - frozen_names(net)
    assert ("norm.running_mean" in frozen_names(net)) == bool(held)


@pytest.mark.parametrize("name", ["fcc", "fc.weight"])
def test_a_name_of_no_module_is_refused_with_the_nearest(build, name):
    with pytest.raises(ConfigError, match=f"train_only: found '{name}', which is no module of Net; .*; nearest: .*fc"):
        build(train_only=(name,))


def test_nothing_left_to_train_is_refused(build):
    with pytest.raises(ConfigError, match="train_only: found pool, in which nothing is trained"):
        build(name="cnn2", train_only=("pool",))


def test_what_is_frozen_at_random_beside_a_file_is_refused(build, stored):
    _, file = stored(change=lambda net: {name: t for name, t in net.items() if not name.startswith("second.")})
    expected = r"lacks second\.weight, second\.bias, which train_only freezes"
    with pytest.warns(PotluckWarning), pytest.raises(ConfigError, match=expected):
        build(weights=file, train_only=(HEAD,))
    with pytest.warns(PotluckWarning):
        assert build(weights=file, train_only=(HEAD, "second"))
    _, file = stored(change=lambda net: {name: t for name, t in net.items() if "running_mean" not in name})
    with pytest.warns(PotluckWarning), pytest.raises(ConfigError, match=r"lacks norm\.running_mean, which train_only"):
        build(weights=file, train_only=(HEAD,))
    _, file = stored(change=lambda net: {name: t for name, t in net.items() if "num_batches" not in name})
    with pytest.warns(PotluckWarning):
        assert build(weights=file, train_only=(HEAD,))


@pytest.mark.filterwarnings("ignore::potluck.PotluckWarning")
@pytest.mark.parametrize("scale", [Scale(width=0.5), Scale(depth=3), Scale(width=0.5, depth=4)])
def test_a_narrower_or_shallower_net_begins_with_its_part_of_the_file_and_trains_its_head(build, stored, scale):
    model = {"name": "preresnet20", "options": {"widths": [8, 16, 32]}}
    tensors, file = stored(**model)
    net = built(build(weights=file, train_only=(HEAD,), **model), scale, "net", Cuts(SHAPE), Splits(SHAPE, True))
    for name, tensor in net.state_dict().items():
        if name in tensors and not name.startswith(("head.", "exits.")):
            assert torch.equal(tensor, tensors[name][tuple(map(slice, tensor.shape))]), name
    trained = {name for name, parameter in net.named_parameters() if parameter.requires_grad}
    assert trained == {n for n, _ in net.named_parameters() if n.startswith("exits." if scale.depth else "head.")}


@pytest.mark.filterwarnings("ignore::potluck.PotluckWarning")
def test_a_net_that_is_cut_narrower_by_its_channels_keeps_what_is_frozen(build, stored):
    tensors, file = stored()
    builder = build(weights=file, train_only=(HEAD,))
    net = to_training(built(builder, Scale(width=0.5), "net", Cuts(SHAPE), Splits(SHAPE, True)))
    assert torch.equal(net.first.weight, tensors["first.weight"][:2])
    assert frozen_names(net) == net.state_dict().keys() - {"fc.weight", "fc.bias"}


def test_an_option_of_the_builders_own_is_the_builders(nets):
    from potluck.experiment.settings.resolve import resolve

    table = {"name": f"{nets}:options", "weights": "biased", "train_only": "x"}
    (spec,) = resolve({"federation": {"dataset": "digits", "models": [table]}}).models
    assert (spec.weights, spec.train_only) == (None, ())
    assert spec.options == {"weights": "biased", "train_only": "x"}


def test_an_architecture_is_called_by_the_digest_of_its_file_wherever_that_lies(stored, tmp_path):
    _, file = stored()
    (tmp_path / "copy.pt").write_bytes((tmp_path / "net.pt").read_bytes())
    names = {ModelSpec("cnn2", {}, weights=place).architecture for place in (file, str(tmp_path / "copy.pt"))}
    assert names == {f"cnn2(weights={file_digest(file)[:8]})"}
