"""Internal cross-layer gradients: which layers are mixed, and the arithmetic, against numbers worked out by hand."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError
from potluck.core.needs import Offer
from potluck.core.nets.modes import to_training
from potluck.core.nets.splitting import Splits
from potluck.models.mlp import mlp2, mlp3
from potluck.models.preresnet import preresnet18
from potluck.models.resnet import VARIANTS as RESNETS
from potluck.models.vit import vit
from potluck.parts.crosslayer import CrossLayer, across_blocks, inside_blocks
from potluck.testing.checks.networks import unstaged

FREE = {"clip": 1000.0}


def kernel(values):
    """A convolution's weight of one 3 x 3 kernel."""
    return torch.tensor(values, dtype=torch.float32).view(1, 1, 3, 3)


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


SHALLOW = kernel([[1, 0, 0], [0, 1, 0], [0, 0, 1]])
OPPOSED = kernel([[-1, 2, 0], [0, -1, 0], [0, 0, -1]])


def test_across_blocks_pairs_a_resnet_as_the_authors_code_does():
    pairs = across_blocks(RESNETS["resnet26"](10, (3, 32, 32), width=4))
    expected = {
        f"stages.layer{stage}.{block}.conv{conv}.weight": f"stages.layer{stage}.0.conv2.weight"
        for stage in (1, 2, 3, 4)
        for block in (1, 2)
        for conv in (1, 2)
    }
    assert pairs == expected


def test_inside_blocks_pairs_a_transformer_as_the_authors_code_does():
    pairs = inside_blocks(vit(10, (3, 32, 32), width=16, depth=3, heads=2))
    assert pairs == {f"stages.block{i}.norm2.weight": f"stages.block{i}.norm1.weight" for i in (1, 2, 3)}


def test_across_blocks_pairs_each_block_of_a_transformer_with_its_first():
    pairs = across_blocks(vit(10, (3, 32, 32), width=16, depth=3, heads=2))
    assert pairs["stages.block3.attention.qkv.weight"] == "stages.block1.attention.qkv.weight"
    assert pairs["stages.block2.mlp.narrow.weight"] == "stages.block1.mlp.narrow.weight"
    assert not any(name.startswith(("stages.block1.", "stages.stem.", "head")) for name in pairs)


def test_across_blocks_leaves_out_biases_batch_norm_frozen_layers_and_the_head():
    layers = [nn.Linear(4, 4) for _ in range(3)]
    layers[1].requires_grad_(False)
    net = nn.Sequential(layers[0], nn.BatchNorm1d(4), layers[1], nn.BatchNorm1d(4), layers[2])
    assert across_blocks(net) == {"4.weight": "0.weight"}
    square = mlp3(8, (6,), width=8)  # the head's weight has the shape of a hidden layer's
    assert square.head.weight.shape == square.get_parameter(next(iter(across_blocks(square)))).shape
    assert "head.weight" not in across_blocks(square)


def test_mixed_is_the_released_code_on_opposed_updates():
    """alpha = 3, beta = -3, norms sqrt(3) and sqrt(7), so theta = 1."""
    found = CrossLayer(**FREE).mixed(OPPOSED, SHALLOW)
    expected = kernel([[0.436436, 1.654654, 0], [0, 0.436436, 0], [0, 0, 0.436436]])
    assert_close(found, expected, rtol=0, atol=1e-5)
    limited = CrossLayer().mixed(OPPOSED, SHALLOW)
    assert_close(limited, kernel([[0.1, 0.1, 0], [0, 0.1, 0], [0, 0, 0.1]]))


def test_mixed_goes_along_the_shallow_update_in_the_code_and_against_it_in_the_paper_where_they_agree():
    agreeing = -OPPOSED  # beta = 3
    along, against = (CrossLayer(rule, **FREE).mixed(agreeing, SHALLOW) for rule in ("released", "paper"))
    norms = (7**0.5, 3**0.5)
    for found, sign in ((along, 1), (against, -1)):
        expected = (agreeing / norms[0] + sign * SHALLOW / norms[1]) * sum(norms) / 2
        assert_close(found, expected, rtol=1e-5, atol=1e-5)
    opposed = [CrossLayer(rule, **FREE).mixed(OPPOSED, SHALLOW) for rule in ("released", "paper")]
    assert_close(*opposed, rtol=1e-5, atol=1e-5)


def test_mixed_under_the_theorem_is_a_projection_that_opposes_the_shallow_update_no_longer():
    rule = CrossLayer("theorem", normalise=False, granularity="tensor", **FREE)
    for seed in range(20):
        deep, shallow = 1e-4 * drawn(5, 4, seed=seed), 1e-4 * drawn(5, 4, seed=seed + 100)
        found, opposed = rule.mixed(deep, shallow), (deep * shallow).sum() < 0
        if opposed:
            assert_close(found, deep - (deep * shallow).sum() / (shallow * shallow).sum() * shallow)
            assert (found * shallow).sum().abs() < 1e-12
        else:
            assert torch.equal(found, deep)


@pytest.mark.parametrize("rule", ["released", "paper", "theorem"])
def test_mixed_of_orthogonal_updates_keeps_the_direction_and_has_the_mean_norm(rule):
    deep, shallow = kernel([[3, 0, 0], [0, 0, 0], [0, 0, 0]]), kernel([[0, 0, 0], [0, 0, 5], [0, 0, 0]])
    assert_close(CrossLayer(rule, **FREE).mixed(deep, shallow), deep / 3 * 4)


def test_mixed_without_optimisation_and_without_normalisation_are_the_sums_of_the_ablations():
    norms = (7**0.5, 3**0.5)
    summed = (OPPOSED / norms[0] + SHALLOW / norms[1]) * sum(norms) / 2
    assert_close(CrossLayer("sum", **FREE).mixed(OPPOSED, SHALLOW), summed, rtol=1e-5, atol=1e-6)
    assert_close(CrossLayer("sum", normalise=False, **FREE).mixed(OPPOSED, SHALLOW), OPPOSED + SHALLOW)


def test_mixed_limits_theta_and_entries():
    deep, shallow = torch.tensor([100.0, 0.0]), torch.tensor([1.0, 0.0])  # beta / alpha = 100
    assert_close(CrossLayer(normalise=False, **FREE).mixed(deep, shallow), torch.tensor([105.0, 0.0]))
    assert_close(CrossLayer(normalise=False, cap=2.0, **FREE).mixed(deep, shallow), torch.tensor([102.0, 0.0]))
    assert CrossLayer(clip=0.25).mixed(deep, shallow).tolist() == [0.25, 0.0]
    assert CrossLayer(clip=0.25).mixed(-deep, shallow).abs().max() <= 0.25


def test_mixed_works_kernel_by_kernel_and_else_on_the_whole_tensor():
    deep, shallow = drawn(3, 2, 3, 3), drawn(3, 2, 3, 3, seed=1)
    by_kernel = CrossLayer(**FREE).mixed(deep, shallow)
    for out in range(3):
        for read in range(2):
            one = CrossLayer(granularity="tensor", **FREE).mixed(deep[out, read], shallow[out, read])
            assert_close(by_kernel[out, read], one)
    whole = CrossLayer(granularity="tensor", **FREE).mixed(deep, shallow)
    assert_close(whole.flatten(), CrossLayer(**FREE).mixed(deep.flatten(), shallow.flatten()))
    matrix = CrossLayer(**FREE).mixed(drawn(4, 3), drawn(4, 3, seed=1))
    assert_close(matrix, CrossLayer(granularity="tensor", **FREE).mixed(drawn(4, 3), drawn(4, 3, seed=1)))


@pytest.mark.parametrize("rule", ["released", "paper", "theorem", "sum"])
def test_mixed_with_kernels_that_have_not_moved_has_no_nan(rule):
    deep, shallow = drawn(2, 2, 3, 3), drawn(2, 2, 3, 3, seed=1)
    deep[0, 0], shallow[0, 0], shallow[1, 1] = 0, 0, 0
    found = CrossLayer(rule, **FREE).mixed(deep, shallow)
    assert found.isfinite().all()
    assert not found[0, 0].any()


def test_moved_changes_deep_layers_alone_and_only_if_both_have_moved():
    before = {name: drawn(4, 4, seed=seed) for seed, name in enumerate("abcd")}
    after = {name: tensor + 0.01 * drawn(4, 4, seed=9) for name, tensor in before.items()}
    rule, pairs = CrossLayer(), {"b": "a", "c": "a"}
    found = rule.moved(before, after, pairs)
    assert torch.equal(found["a"], after["a"])
    assert torch.equal(found["d"], after["d"])
    for deep in "bc":
        assert_close(found[deep], before[deep] + rule.mixed(after[deep] - before[deep], after["a"] - before["a"]))
        assert not torch.allclose(found[deep], after[deep])
    still = rule.moved(before, {**after, "b": before["b"]}, pairs)
    assert torch.equal(still["b"], before["b"])
    unled = rule.moved(before, {**after, "a": before["a"]}, pairs)
    assert all(torch.equal(unled[name], after[name]) for name in "bcd")


def test_a_federation_without_two_layers_of_one_shape_is_refused_in_one_line():
    offer = partial(Offer, assigned={0: "net"}, server_architecture="net", public=False, unvalidated=())
    shallow, deep = partial(mlp2, 3, (6,), width=8), partial(mlp3, 3, (6,), width=8)
    need = CrossLayer().need()
    assert need.problem(offer({"net": deep})) is None
    found = need.problem(offer({"net": shallow}))
    assert found == (
        "it mixes the updates of two layers of one type and shape in different blocks, and there are none in net;"
        " choose models with such layers, or the method without InCo, such as fedavg"
    )
    inside = CrossLayer(pairs="inside").need().problem(offer({"net": deep}))
    assert inside.endswith(
        "in one block, and there are none in net; choose models with such layers, or method.inco.pairs = 'across'"
    )  # which is met, see above
    transformer = partial(vit, 3, (3, 32, 32), width=16, depth=1, heads=2)
    assert CrossLayer(pairs="inside").need().problem(offer({"net": transformer})) is None


def pointwise(*names):
    """Before and after a round, weights of two 1 x 1 convolutions of one shape."""
    before = {name: drawn(4, 4, 1, 1, seed=seed) for seed, name in enumerate(names)}
    return before, {name: tensor + 0.01 * drawn(4, 4, 1, 1, seed=9) for name, tensor in before.items()}


def test_moved_by_kernel_leaves_convolutions_of_one_position_as_they_are():
    """By kernel each number would be a direction of its own; as a whole tensor they are mixed like a matrix."""
    before, after = pointwise("a", "b")
    assert CrossLayer().moved(before, after, {"b": "a"}) == after
    flat = [{name: tensor.flatten(1) for name, tensor in weights.items()} for weights in (before, after)]
    found = CrossLayer(granularity="tensor").moved(before, after, {"b": "a"})
    assert_close(found["b"].flatten(1), CrossLayer().moved(*flat, {"b": "a"})["b"])
    assert not torch.allclose(found["b"], after["b"])


def test_a_federation_whose_pairs_are_all_of_one_position_is_refused_by_kernel_alone():
    net = partial(nn.Sequential, *(nn.Conv2d(4, 4, 1) for _ in range(2)))
    offer = Offer({"net": net}, {0: "net"}, "net", False, ())
    found = CrossLayer().need().problem(offer)
    assert found.endswith(
        "none but 1 x 1 convolutions in net; choose models with such layers, or method.inco.granularity = 'tensor'"
    )
    assert CrossLayer(granularity="tensor").need().problem(offer) is None


def test_a_limit_of_zero_is_refused():
    with pytest.raises(ConfigError, match=r"clip: expected .*above 0, found 0"):
        CrossLayer(clip=0.0)


@pytest.mark.parametrize("build", [partial(preresnet18, 3, (3, 16, 16), width=4), partial(mlp3, 3, (6,), width=8)])
def test_blocks_that_are_hidden_in_one_child_are_found_by_the_dataflow(build):
    """A net without stages whose layers are all in one module has the pairs of the same net with stages."""
    splits = Splits((3, 16, 16) if build.func is preresnet18 else (6,), True)
    hidden = splits.remember(to_training(unstaged(build)), ("net",))
    assert across_blocks(hidden) == across_blocks(build())
    assert across_blocks(hidden)
