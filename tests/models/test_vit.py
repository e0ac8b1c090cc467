import itertools
import logging

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from potluck.core.ground.errors import ConfigError
from potluck.core.ground.rng import fold_in, isolated
from potluck.core.nets.scale import Scale
from potluck.models.contract import features
from potluck.models.split import feature_shapes, split
from potluck.models.vit import VARIANTS, AttentionBlock, Stem

DEPTHS = range(8, 13)
TINY = {"width": 12, "patch": 4}
SHAPE = (3, 8, 8)


def outline(name, shape=(3, 224, 224), **options):
    with torch.device("meta"):
        return VARIANTS[name](10, shape, **options)


def parameter_count(net):
    return sum(parameter.numel() for parameter in net.parameters())


def tiny(name="vit_s8", seed=0, classes=10, shape=SHAPE, **options):
    with isolated(fold_in(seed, "model")):
        return VARIANTS[name](classes, shape, **TINY, **options)


# A block has 12 * 384^2 + 13 * 384 = 1,774,464; the rest 295,296 + 384 + 197 * 384 + 768 + 3,850, or with patches
# of 4 on 32 x 32 18,816 + 384 + 65 * 384 + 768 + 3,850.
@pytest.mark.parametrize(
    ("depth", "large", "small"),
    [
        (8, 14_571_658, 14_244_490),
        (9, 16_346_122, 16_018_954),
        (10, 18_120_586, 17_793_418),
        (11, 19_895_050, 19_567_882),
        (12, 21_669_514, 21_342_346),
    ],
)
def test_counts(depth, large, small):
    assert parameter_count(outline(f"vit_s{depth}")) == large
    assert parameter_count(outline(f"vit_s{depth}", (3, 32, 32), patch=4)) == small


def test_mean_count_of_fedin_s_five():
    assert sum(parameter_count(outline(f"vit_s{depth}")) for depth in DEPTHS) / 5 == 18_120_586


def test_count_of_fedepth_s():
    assert parameter_count(outline("vit_ti")) == 5_526_346


# 12 * 64^2 + 13 * 64 a block, 48 * 64 + 64, 64, 65 * 64, 128 and 650 beside them.
def test_counts_by_options():
    assert parameter_count(outline("vit", (3, 32, 32))) == 6 * 49_984 + 3_136 + 64 + 4_160 + 128 + 650
    assert (
        parameter_count(outline("vit", (3, 32, 32), depth=7)) - parameter_count(outline("vit", (3, 32, 32))) == 49_984
    )


@pytest.mark.parametrize(("shallow", "deep"), [*itertools.pairwise(DEPTHS), (8, 12)])
def test_a_deeper_net_has_every_parameter_of_a_shallower_one(shallow, deep):
    small, large = outline(f"vit_s{shallow}").state_dict(), outline(f"vit_s{deep}").state_dict()
    assert small.keys() < large.keys()
    assert all(large[key].shape == tensor.shape for key, tensor in small.items())


@pytest.mark.parametrize("name", VARIANTS)
def test_the_extractor_ends_after_the_first_block_and_the_classifier_reads_the_class_token(name):
    net = tiny(name)
    assert feature_shapes(net, SHAPE) == ((5, 12), (12,))
    stages = {parameter.split(".")[1] for parameter in split(net).intermediate_names}
    assert stages == set(dict(net.stages.named_children())) - {"stem", "block1"}
    x = torch.randn(2, *SHAPE)
    last = features(net, x, len(net.stages))
    torch.testing.assert_close(last.mean(-1), torch.zeros(2, 5), atol=1e-6, rtol=0)  # the norm is a stage
    assert torch.equal(net(x), net.head(last[:, 0]))


@pytest.mark.parametrize(("shape", "patch", "tokens"), [((1, 28, 28), 4, 50), ((3, 32, 32), 8, 17), ((3, 8, 16), 4, 9)])
def test_an_image_has_a_token_a_patch_and_one_of_the_class(shape, patch, tokens):
    net = VARIANTS["vit"](10, shape, width=8, patch=patch)
    assert features(net, torch.randn(2, *shape), 1).shape == (2, tokens, 8)


def test_a_token_reads_its_patch_row_by_row_and_the_class_token_comes_first():
    stem = Stem(1, 3, 2, 4)
    nn.init.normal_(stem.positions)
    x = torch.randn(1, 1, 4, 4)
    patches = [x[0, 0, row : row + 2, column : column + 2] for row in (0, 2) for column in (0, 2)]
    kernel = stem.patches.weight[:, 0]
    expected = torch.stack([(kernel * patch).sum((1, 2)) + stem.patches.bias for patch in patches])
    torch.testing.assert_close(stem(x)[0, 1:], expected + stem.positions[0, 1:])
    torch.testing.assert_close(stem(x)[0, 0], stem.class_token[0, 0] + stem.positions[0, 0])


def test_a_block_is_torch_s_encoder_layer_with_its_norms_in_front():
    block = AttentionBlock(12, heads=3)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.5)
    layer = nn.TransformerEncoderLayer(12, 3, 48, 0.0, "gelu", 1e-6, batch_first=True, norm_first=True)
    theirs = ("self_attn.in_proj_", "self_attn.out_proj.", "linear1.", "linear2.", "norm1.", "norm2.")
    ours = (block.attention.qkv, block.attention.out, block.mlp.wide, block.mlp.narrow, block.norm1, block.norm2)
    for prefix, module in zip(theirs, ours, strict=True):
        for kind in ("weight", "bias"):
            layer.get_parameter(f"{prefix}{kind}").data.copy_(getattr(module, kind))
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(block(x), layer(x))


def test_weights_start_narrow_and_biases_at_zero():
    net = VARIANTS["vit"](10, (3, 32, 32))
    narrow = {"positions": net.stages.stem.positions, "qkv": net.stages.block3.attention.qkv.weight}
    for name, parameter in narrow.items():
        assert parameter.std().item() == pytest.approx(0.02, rel=0.05), name
    assert net.stages.stem.class_token.any()
    assert not net.stages.block3.mlp.wide.bias.any()
    assert not net.head.bias.any()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vit_s8", {"patch": 5}, "patch 5; expected a divisor of both sides of the image, 8 x 12"),
        ("vit_s8", {"patch": 8}, "patch 8; expected a divisor of both sides of the image, 8 x 12"),
        ("vit_ti", {}, "patch 16; expected a divisor of both sides of the image, 8 x 12"),
        ("vit", {"patch": 0}, "patch 0; expected a divisor"),
        ("vit", {"width": 10}, "width 10; expected a multiple of the 4 heads"),
        ("vit", {"depth": 0}, "depth 0, heads 4; expected at least 1 of each"),
        ("vit", {"heads": 0}, "depth 6, heads 0; expected at least 1 of each"),
        ("vit", {"scale": Scale(0.5)}, "width 0.5; expected 1: a slice of a transformer"),
    ],
)
def test_bad_options(name, options, message):
    with pytest.raises(ConfigError) as caught:
        outline(name, (3, 8, 12), **options)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


# The names of a ViT in timm, for each block those of "blocks.0".
TIMM = {
    "cls_token": "stages.stem.class_token",
    "pos_embed": "stages.stem.positions",
    "patch_embed.proj.weight": "stages.stem.patches.weight",
    "patch_embed.proj.bias": "stages.stem.patches.bias",
    "norm.weight": "stages.norm.weight",
    "norm.bias": "stages.norm.bias",
    "head.weight": "head.weight",
    "head.bias": "head.bias",
}
for kind in ("weight", "bias"):
    TIMM |= {
        f"blocks.0.norm1.{kind}": f"stages.block1.norm1.{kind}",
        f"blocks.0.attn.qkv.{kind}": f"stages.block1.attention.qkv.{kind}",
        f"blocks.0.attn.proj.{kind}": f"stages.block1.attention.out.{kind}",
        f"blocks.0.norm2.{kind}": f"stages.block1.norm2.{kind}",
        f"blocks.0.mlp.fc1.{kind}": f"stages.block1.mlp.wide.{kind}",
        f"blocks.0.mlp.fc2.{kind}": f"stages.block1.mlp.narrow.{kind}",
    }


def as_timm(net):
    """A net's tensors under timm's names."""
    blocks = sum(name.startswith("block") for name in dict(net.stages.named_children()))
    names = {
        theirs.replace("blocks.0.", f"blocks.{index}."): ours.replace(".block1.", f".block{index + 1}.")
        for index in range(blocks)
        for theirs, ours in TIMM.items()
    }
    state = net.state_dict()
    assert set(names.values()) == set(state)
    return {theirs: state[ours].clone() for theirs, ours in names.items()}


def loaded(path, **options):
    return tiny("vit_s8", seed=1, pretrained_path=str(path), **options).state_dict()


@pytest.mark.parametrize("named", [as_timm, nn.Module.state_dict])
@pytest.mark.parametrize("donor", ["vit_s8", "vit_s12"])
def test_pretrained_weights_are_loaded_by_name_and_deeper_blocks_left_out(tmp_path, named, donor):
    source = tiny(donor)
    save_file(named(source), tmp_path / "vit.safetensors")
    state = loaded(tmp_path / "vit.safetensors")
    assert all(torch.equal(state[name], source.state_dict()[name]) for name in state)


# Another size


@pytest.mark.parametrize(("side", "shape"), [(14, (3, 8, 8)), (4, (3, 24, 24)), (2, (3, 12, 20)), (3, (3, 8, 8))])
def test_positions_of_another_grid_are_interpolated_and_the_class_tokens_stays(tmp_path, side, shape):
    source = as_timm(tiny(shape=(3, 4 * side, 4 * side)))
    save_file(source, tmp_path / "vit.safetensors")
    state = loaded(tmp_path / "vit.safetensors", shape=shape)
    given, found = source["pos_embed"], state["stages.stem.positions"]
    rows, columns = shape[1] // 4, shape[2] // 4
    grid = torch.stack([given[0, 1:, channel].view(side, side) for channel in range(12)])
    expected = F.interpolate(grid[None], (rows, columns), mode="bicubic", antialias=True)[0]
    assert found.shape == (1, 1 + rows * columns, 12)
    assert torch.equal(found[0, 0], given[0, 0])
    for row, column in itertools.product(range(rows), range(columns)):
        torch.testing.assert_close(found[0, 1 + row * columns + column], expected[:, row, column])
    assert torch.equal(state["stages.stem.patches.weight"], source["patch_embed.proj.weight"])


def test_a_smooth_map_of_positions_stays_that_map_on_a_finer_grid(tmp_path):
    """Positions that rise evenly from left to right go on doing so, each half as fast."""
    source = as_timm(tiny(shape=(3, 32, 32)))
    columns = torch.arange(8.0).repeat(8)
    source["pos_embed"][0, 1:] = columns[:, None]
    save_file(source, tmp_path / "vit.safetensors")
    found = loaded(tmp_path / "vit.safetensors", shape=(3, 64, 64))["stages.stem.positions"][0, 1:].view(16, 16, 12)
    inner = found[:, 3:-3]  # the border has nothing outside of it
    torch.testing.assert_close(inner.diff(dim=1), torch.full((16, 9, 12), 0.5), rtol=0, atol=1e-4)
    torch.testing.assert_close(inner.diff(dim=0), torch.zeros(15, 10, 12), rtol=0, atol=1e-4)


def test_positions_of_the_same_grid_are_taken_bit_for_bit(tmp_path):
    source = as_timm(tiny(shape=(3, 8, 32)))  # as many as in a square of 4 x 4, and not to be taken for one
    save_file(source, tmp_path / "vit.safetensors")
    state = loaded(tmp_path / "vit.safetensors", shape=(3, 8, 32))
    assert torch.equal(state["stages.stem.positions"], source["pos_embed"])


@pytest.mark.parametrize("patch", [6, 8, 16])
def test_an_enlarged_image_has_the_tokens_that_it_had_with_the_smaller_patches_of_the_file(tmp_path, patch):
    source = tiny()
    save_file(as_timm(source), tmp_path / "vit.safetensors")
    large = VARIANTS["vit_s8"](
        10, (3, 2 * patch, 2 * patch), width=12, patch=patch, pretrained_path=str(tmp_path / "vit.safetensors")
    )
    patches = torch.randn(5, 3, 4, 4)
    enlarged = F.interpolate(patches, (patch, patch), mode="bicubic", antialias=True)
    expected = source.stages.stem.patches(patches)
    torch.testing.assert_close(large.stages.stem.patches(enlarged), expected, rtol=1e-3, atol=1e-4)
    assert torch.equal(large.stages.stem.positions, source.stages.stem.positions)


@pytest.mark.parametrize("patch", [1, 2, 3])
def test_a_small_image_has_the_tokens_that_it_would_have_enlarged_to_the_patches_of_the_file(tmp_path, patch):
    source = tiny()
    save_file(as_timm(source), tmp_path / "vit.safetensors")
    shape, options = (3, 2 * patch, 2 * patch), {"width": 12, "patch": patch}
    small = VARIANTS["vit_s8"](10, shape, **options, pretrained_path=str(tmp_path / "vit.safetensors"))
    patches = torch.randn(5, 3, patch, patch)
    enlarged = F.interpolate(patches, (4, 4), mode="bicubic", antialias=True)
    torch.testing.assert_close(small.stages.stem.patches(patches), source.stages.stem.patches(enlarged))


def test_an_outline_without_values_is_made_for_another_size_too(tmp_path):
    save_file(as_timm(tiny()), tmp_path / "vit.safetensors")
    with torch.device("meta"):
        net = VARIANTS["vit_s8"](10, (3, 12, 12), width=12, patch=2, pretrained_path=str(tmp_path / "vit.safetensors"))
    assert net.stages.stem.positions.shape == (1, 37, 12)


def test_another_head_other_channels_and_a_grid_that_is_not_square_start_afresh_and_are_named(tmp_path, caplog):
    source = tiny(classes=4, shape=(1, 8, 12)).state_dict()
    save_file(source, tmp_path / "vit.safetensors")
    with caplog.at_level(logging.INFO, "potluck.models.vit"):
        state = loaded(tmp_path / "vit.safetensors")
    fresh = tiny("vit_s8", seed=1).state_dict()
    afresh = ["stages.stem.positions", "stages.stem.patches.weight", "head.weight", "head.bias"]
    assert caplog.messages[0].endswith(f"loaded {len(state) - 4} of {len(state)} tensors; afresh: {', '.join(afresh)}")
    for name, tensor in state.items():
        assert torch.equal(tensor, fresh[name] if name in afresh else source[name]), name


def test_a_net_without_a_file_starts_as_it_always_does(tmp_path):
    with isolated(fold_in(0, "model")):
        plain = VARIANTS["vit"](10, SHAPE)
    with isolated(fold_in(0, "model")):
        explicit = VARIANTS["vit"](10, SHAPE, pretrained_path=None)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), explicit.parameters(), strict=True))


def shallower():
    return VARIANTS["vit"](10, SHAPE, width=12, heads=6, depth=7).state_dict()


def narrower():
    return VARIANTS["vit_s8"](10, SHAPE, width=6, patch=4).state_dict()


def foreign():
    return {"blocks.first.weight": torch.zeros(1), "blocks": torch.zeros(1), "blocks.0.weight": torch.zeros(1)}


@pytest.mark.parametrize(
    ("contents", "count", "example"),
    [(shallower, 12, "stages.block8.norm1.weight"), (narrower, 98, "block1.norm1"), (foreign, 98, "block1.norm1")],
)
def test_a_file_without_all_blocks_is_refused_in_one_line(tmp_path, contents, count, example):
    save_file(contents(), tmp_path / "vit.safetensors")
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path / "vit.safetensors")
    message = str(caught.value)
    assert message.startswith(f"pretrained_path: {tmp_path / 'vit.safetensors'}: {count} of the 104 tensors")
    assert example in message
    assert "\n" not in message


@pytest.mark.parametrize("content", [None, b"", b"PK not a file of tensors"])
def test_a_file_that_holds_no_tensors_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "weights"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"^pretrained_path: .*weights.*; expected a safetensors file$"):
        loaded(path)
