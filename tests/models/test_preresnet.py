import pytest
import torch

from potluck.core.ground.errors import ConfigError
from potluck.core.nets.scale import Scale
from potluck.models.cifar_resnet import SubsampleAndPad
from potluck.models.contract import features
from potluck.models.preresnet import PreActivationBlock, PreActivationBottleneck, preresnet18, preresnet20, preresnet152


def outline(channels=3, **options):
    with torch.device("meta"):
        return preresnet18(10, (channels, 32, 32), **options)


# HeteroFL's five levels for CIFAR-10, computed from its released model.
@pytest.mark.parametrize(
    ("rate", "count"),
    [(1.0, 11_172_170), (1 / 2, 2_796_714), (1 / 4, 701_018), (1 / 8, 176_178), (1 / 16, 44_510)],
)
def test_counts(rate, count):
    assert sum(parameter.numel() for parameter in outline(scale=Scale(rate)).parameters()) == count


def test_one_channel_saves_two_thirds_of_the_stem():
    assert sum(parameter.numel() for parameter in outline(channels=1).parameters()) == 11_172_170 - 2 * 64 * 3 * 3


def test_shapes():
    net = outline()
    # Uninitialised storage is enough for shapes, and a forward on the meta device is slow the first time.
    x, net = torch.zeros(1, 3, 32, 32), net.to_empty(device="cpu").eval()
    names = list(dict(net.stages.named_children()))
    shapes = {name: tuple(features(net, x, upto).shape[1:]) for upto, name in enumerate(names, start=1)}
    assert shapes == {
        "stem": (64, 32, 32),
        "layer1": (64, 32, 32),
        "layer2": (128, 16, 16),
        "layer3": (256, 8, 8),
        "layer4": (512, 4, 4),
        "norm": (512, 4, 4),
    }


def test_identity_carries_the_raw_input():
    block = PreActivationBlock(4, 4).eval()
    torch.nn.init.zeros_(block.conv2.weight)
    x = torch.randn(2, 4, 6, 6)
    assert torch.equal(block(x), x)


def test_projection_reads_the_activated_input():
    block = PreActivationBlock(4, 8, stride=2).eval()
    torch.nn.init.zeros_(block.conv2.weight)
    assert not block(-torch.rand(2, 4, 6, 6)).any()
    assert block(torch.rand(2, 4, 6, 6)).any()


def test_only_norms_and_head_have_biases():
    biases = {key for key, _ in outline().named_parameters() if key.endswith("bias")}
    assert all("norm" in key or key == "head.bias" for key in biases)


def test_the_head_reads_a_rectified_norm():
    net = preresnet18(10, (1, 8, 8), width=2)
    h = features(net, torch.randn(8, 1, 8, 8), len(net.stages))
    assert h.min() == 0
    assert h.max() > 0


def outline20(classes=10, **options):
    with torch.device("meta"):
        return preresnet20(classes, (3, 32, 32), **options)


# The released code of FeDepth has 32 parameters in the norm after the stem and 16 * 32 + 32 * 64 in two projections.
@pytest.mark.parametrize(("variant", "counts"), [("textbook", (269_722, 275_572)), ("fedepth", (272_314, 278_164))])
def test_counts_of_preresnet20(variant, counts):
    nets = [outline20(classes, variant=variant) for classes in (10, 100)]
    assert tuple(sum(parameter.numel() for parameter in net.parameters()) for net in nets) == counts


@pytest.mark.parametrize("variant", ["textbook", "fedepth"])
def test_every_block_of_preresnet20_is_a_stage(variant):
    net = outline20(variant=variant).to_empty(device="cpu").eval()
    names = list(dict(net.stages.named_children()))
    assert names == ["stem", *(f"block{number}" for number in range(1, 10)), "norm"]
    shapes = [tuple(features(net, torch.zeros(1, 3, 32, 32), upto).shape[1:]) for upto in range(1, 12)]
    assert shapes == [(16, 32, 32)] * 4 + [(32, 16, 16)] * 3 + [(64, 8, 8)] * 4


# FeDepth, table 1: megabytes of parameters and of twice the outputs of all modules in a batch of 32. The entries are
# those of the textbook's net: with projections block4 would cost 14.06 and block7 7.22.
def test_the_blocks_of_preresnet20_cost_what_fedepth_prints():
    net, costs, outputs = preresnet20(100, (3, 32, 32)), [], []
    x = net.stages[0](torch.zeros(1, 3, 32, 32))
    for block in net.stages[1:10]:
        for module in block.modules():
            module.register_forward_hook(lambda module, inputs, output: outputs.append(output.numel()))
        x = block(x)
        parameters = sum(parameter.numel() for parameter in block.parameters())
        costs.append(round(4 * (parameters + 2 * 32 * sum(outputs)) / 2**20, 2))
        outputs.clear()
    assert costs == [20.02, 20.02, 20.02, 14.05, 10.07, 10.07, 7.21, 5.28, 5.28]


@pytest.mark.parametrize(("variant", "start"), [("textbook", -1.0), ("fedepth", 0.0)])
def test_the_variants_of_preresnet20_carry_raw_or_activated_inputs(variant, start):
    net = preresnet20(10, (3, 8, 8), widths=(2, 3, 4), variant=variant).eval()
    block = net.stages.block1
    torch.nn.init.zeros_(block.conv2.weight)
    x = torch.full((1, 2, 8, 8), -1.0)
    assert torch.equal(block(x), torch.full_like(x, start))


def test_widening_blocks_of_the_textbook_carry_the_raw_input_and_those_of_fedepth_project_the_activated_one():
    x = torch.randn(2, 2, 8, 8)
    for variant in ("textbook", "fedepth"):
        block = preresnet20(10, (3, 8, 8), widths=(2, 3, 4), variant=variant).eval().stages.block4
        torch.nn.init.zeros_(block.conv2.weight)
        expected = SubsampleAndPad(1)(x) if variant == "textbook" else block.shortcut(block.norm1(x).relu())
        assert torch.equal(block(x), expected)


def test_only_the_variant_of_fedepth_has_a_norm_after_the_stem_and_none_a_relu_there():
    assert [name for name, _ in outline20().stages.stem.named_children()] == ["conv"]
    assert [name for name, _ in outline20(variant="fedepth").stages.stem.named_children()] == ["conv", "norm"]


@pytest.mark.parametrize("widths", [(2, 5, 10), [5, 10, 21], (8, 16, 32)])
@pytest.mark.parametrize("variant", ["textbook", "fedepth"])
def test_widths_of_fedepth(widths, variant):
    net = outline20(widths=widths, variant=variant)
    assert [net.stages[index].conv2.out_channels for index in range(1, 10)] == sorted(list(widths) * 3)
    assert net.num_features == widths[-1]


def test_rate_rounds_up_where_fedepth_rounds_down():
    assert outline20(scale=Scale(1 / 6)).num_features == 11
    assert outline20(scale=Scale(1 / 6)).stages.block1.conv1.in_channels == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "other"}, "variant 'other'; expected 'textbook' or 'fedepth'"),
        ({"widths": (16, 32)}, r"widths \(16, 32\); expected three, none smaller than the one before it"),
        ({"widths": (16, 8, 32)}, r"widths \(16, 8, 32\); expected three"),
        ({"widths": (0, 8, 32)}, "width 0; expected at least 1"),
    ],
)
def test_bad_options_of_preresnet20(options, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        outline20(**options)


def outline152(classes=10, **options):
    with torch.device("meta"):
        return preresnet152(classes, (3, 32, 32), **options)


# Five levels of HeteroFL's bottleneck net, as its released constructor counts them.
@pytest.mark.parametrize(
    ("rate", "count"),
    [(1.0, 58_148_938), (1 / 2, 14_578_730), (1 / 4, 3_665_434), (1 / 8, 926_738), (1 / 16, 236_878)],
)
def test_counts_of_preresnet152(rate, count):
    assert sum(parameter.numel() for parameter in outline152(scale=Scale(rate)).parameters()) == count


# Papers that compare with it print the mean over the five levels, of heads with a thousand classes: 16.29 M.
def test_mean_count_of_preresnet152_with_a_thousand_classes():
    rates = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
    counts = [sum(p.numel() for p in outline152(1000, scale=Scale(rate)).parameters()) for rate in rates]
    assert sum(counts) / len(counts) == pytest.approx(16_297_997.6)


def test_layers_of_preresnet152():
    net = outline152()
    weighted = [m for m in net.modules() if isinstance(m, (torch.nn.Conv2d, torch.nn.Linear))]
    assert len(weighted) == 152 + 4  # and a projection in each stage
    assert [len(stage) for name, stage in net.stages.named_children() if name.startswith("layer")] == [3, 8, 36, 3]


def test_a_bottleneck_carries_the_raw_input_or_projects_the_activated_one():
    block = PreActivationBottleneck(8, 2).eval()
    torch.nn.init.zeros_(block.conv3.weight)
    x = torch.randn(2, 8, 6, 6)
    assert torch.equal(block(x), x)
    block = PreActivationBottleneck(4, 2, stride=2, project=True).eval()
    torch.nn.init.zeros_(block.conv3.weight)
    assert not block(-torch.rand(2, 4, 6, 6)).any()
    assert block(torch.rand(2, 4, 6, 6)).shape == (2, 8, 3, 3)


def test_a_narrow_preresnet152_is_a_leading_slice_at_widths_that_do_not_divide():
    full, narrow = outline152(width=12), outline152(width=12, scale=Scale(1 / 5))
    whole = {name: tensor.shape for name, tensor in full.state_dict().items()}
    cut = {name: tensor.shape for name, tensor in narrow.state_dict().items()}
    assert cut.keys() == whole.keys()
    assert all(small <= large for name in cut for small, large in zip(cut[name], whole[name], strict=True))
