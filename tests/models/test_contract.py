"""What methods rely on, asked of every registered variant at a small size."""

import inspect
import math

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap

from potluck.core.ground.errors import ConfigError
from potluck.core.ground.rng import fold_in, isolated
from potluck.core.nets.batchnorm import batch_norms
from potluck.core.nets.scale import Scale
from potluck.models import get_model, list_models
from potluck.models.contract import StagedNet, features, resume
from potluck.models.split import split

CLASSES = 3
SHAPE = (2, 8, 8)
NAMES = list_models()
# The leading slices of these are no networks of the family.
WHOLE = ["shufflenetv2", *list_models("vit*"), "mnist1d_gru", "mnist1d_logistic"]
SINGLE = ["mlp1_norm", "mnist1d_gru", "mnist1d_logistic"]  # nothing lies between the one stage and the head
POSITIONS = 16  # of the last feature map of `mnist1d_cnn`, all of which are features
# Small enough to be quick, by the option that makes a family small. Twelve divides by the heads of every ViT.
SMALL = {"width": 8, "widths": (4, 8, 16), "size": 0.5, "patch": 4}

every_variant = pytest.mark.parametrize("name", NAMES)
every_variant_in_parts = pytest.mark.parametrize("name", [name for name in NAMES if name not in SINGLE])
every_variant_that_narrows = pytest.mark.parametrize("name", [name for name in NAMES if name not in WHOLE])


def build(name: str, seed: int = 0, width: float = 1.0) -> StagedNet:
    variant = get_model(name)
    options = inspect.signature(variant).parameters
    small = {option: value for option, value in SMALL.items() if option in options}
    if "patch" in options:
        small["width"] = 12
    with isolated(fold_in(seed, "model")):
        return variant(CLASSES, SHAPE, scale=Scale(width), **small)


def images(seed: int = 0) -> Tensor:
    return torch.randn(2, *SHAPE, generator=fold_in(seed, "images").generator())


def used(name: str, seed: int = 0) -> StagedNet:
    """A net in eval mode whose norms have seen data, so that running statistics matter."""
    net = build(name, seed)
    net(images(seed + 1))
    return net.eval()


@every_variant
def test_signature_is_the_agreed_one(name):
    parameters = list(inspect.signature(get_model(name)).parameters.values())
    assert [parameter.name for parameter in parameters[:3]] == ["num_classes", "input_shape", "scale"]
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters[2:])
    assert all(parameter.default is not parameter.empty for parameter in parameters[2:])


@pytest.mark.slow
@every_variant
def test_shapes_at_every_stage(name):
    net = used(name)
    h = images()
    for number, stage in enumerate(net.stages, start=1):
        h = stage(h)
        assert len(h) == 2
        assert h.numel() > 0
        assert torch.equal(h, features(net, images(), number))
    assert net.pool(h).shape == (2, net.num_features)
    assert net(images()).shape == (2, CLASSES)
    assert net.head.out_features == CLASSES
    assert not list(net.pool.parameters())


@pytest.mark.slow
@every_variant
def test_resume_continues_where_features_stopped(name):
    net = used(name)
    expected = net(images())
    for cut in range(len(net.stages) + 1):
        assert torch.equal(resume(net, features(net, images(), cut), cut), expected)


@every_variant_in_parts
def test_split_composes_to_the_network(name):
    net = used(name)
    parts = split(net)
    assert torch.equal(parts.classifier(parts.intermediate(parts.extractor(images()))), net(images()))
    inner, first = split(net).intermediate_names, list(dict(net.stages.named_children()))[: net.extractor_stages]
    assert first[0] == "stem"
    assert inner
    assert not any(parameter.startswith((*(f"stages.{stage}." for stage in first), "head.")) for parameter in inner)


@pytest.mark.parametrize("name", SINGLE)
def test_a_net_of_one_stage_cannot_be_split(name):
    with pytest.raises(TypeError, match="StagedNet has 1 stages, its extractor 1; there must be at least one stage"):
        split(build(name))


@every_variant
def test_every_parameter_gets_a_gradient(name):
    net = used(name)
    net(images()).square().sum().backward()
    without = [key for key, parameter in net.named_parameters() if parameter.grad is None]
    assert without == []
    assert [key for key, parameter in net.named_parameters() if not parameter.grad.any()] == []


@every_variant
def test_builds_under_one_seed_are_equal(name):
    first, again, other = (
        build(name, 5).state_dict(),
        build(name, 5).state_dict(),
        build(name, 6).state_dict(),
    )
    assert list(first) == list(again) == list(other)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


@every_variant
def test_norm_statistics_are_in_the_state_and_learnt_in_training(name):
    net = build(name)
    before = {key: tensor.clone() for key, tensor in net.state_dict().items()}
    net(images())
    after = net.state_dict()
    for key in batch_norms(net):
        assert after[f"{key}.num_batches_tracked"] == 1
        assert not torch.equal(before[f"{key}.running_mean"], after[f"{key}.running_mean"])
        assert not torch.equal(before[f"{key}.running_var"], after[f"{key}.running_var"])


@pytest.mark.slow
@every_variant
def test_vmap_equals_the_loop(name):
    nets = [used(name, 1), used(name, 2)]
    parameters, buffers = stack_module_state(nets)

    def forward(parameters, buffers, x):
        return functional_call(nets[0], (parameters, buffers), (x,))

    together = vmap(forward, in_dims=(0, 0, None))(parameters, buffers, images())
    one_by_one = torch.stack([net(images()) for net in nets])
    torch.testing.assert_close(together, one_by_one)


@pytest.mark.slow
@pytest.mark.parametrize("width", [0.5, 0.25, 0.3])
@every_variant_that_narrows
def test_leading_slices_fit_the_narrower_net(name, width):
    full, lower = build(name).state_dict(), build(name, width=width).state_dict()
    assert list(lower) == list(full)
    for key, tensor in lower.items():
        assert tensor.dim() == full[key].dim()
        for size, whole in zip(tensor.shape, full[key].shape, strict=True):
            kept = {groups * math.ceil(width * whole / groups) for groups in (1, 4, POSITIONS)}  # bottlenecks: 4
            assert size in {whole, *kept}, key
    slices = {key: full[key][tuple(map(slice, tensor.shape))] for key, tensor in lower.items()}
    net = build(name, width=width)
    net.load_state_dict(slices, strict=True)
    assert net.eval()(images()).shape == (2, CLASSES)


@every_variant_that_narrows
def test_a_leading_slice_computes_what_the_net_computes_with_its_other_channels_silent(name):
    full, lower = build(name), build(name, width=0.3)
    weights = full.state_dict()
    with torch.no_grad():
        for key, narrow in lower.named_parameters():
            at = tuple(map(slice, narrow.shape))
            sliced = weights[key][at] + 0.3 * torch.randn(narrow.shape, generator=fold_in(0, key).generator())
            weights[key].zero_()[at] = sliced
            narrow.copy_(sliced)
    torch.testing.assert_close(full.eval()(images()), lower.eval()(images()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", WHOLE)
def test_what_cannot_be_narrowed_says_what_to_do_instead(name):
    with pytest.raises(
        ConfigError, match=r"^width 0\.5; expected 1: a slice of .* is no .*; choose a (`width`|`features`|size)$"
    ):
        build(name, width=0.5)


@every_variant_that_narrows
def test_width_spares_the_input_and_the_classes(name):
    full, lower = build(name), build(name, width=0.25)
    first, narrow = next(iter(full.parameters())), next(iter(lower.parameters()))
    assert narrow.shape[1:] == first.shape[1:]
    assert lower.head.out_features == full.head.out_features == CLASSES
    assert lower.num_features == math.ceil(0.25 * full.num_features)
