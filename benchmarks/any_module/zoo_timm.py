"""A net of each family of timm, without weights from anywhere."""

from collections.abc import Iterator
from functools import partial

from timm import create_model
from torch import nn
from trying import Case

CLASSES, SIDE = 10, 64

NAMES = """
resnet18 resnet26d seresnet50 ecaresnet26t res2net50_14w_8s resnetv2_50 regnetx_002 regnety_002 densenet121 vgg11_bn
mobilenetv2_035 mobilenetv3_small_050 mobilenetv4_conv_small_035 efficientnet_b0 tf_efficientnetv2_b0 ghostnet_050
ghostnetv2_100 convnext_atto convnextv2_atto inception_v3 inception_next_atto dla46_c dpn48b hrnet_w18_small
selecsls42 tinynet_e mixnet_s mnasnet_small fbnetc_100 lcnet_035 rexnet_100 repvgg_a0 repghostnet_050 cspresnet50
ese_vovnet19b_slim nf_resnet26 gernet_s hardcorenas_a bat_resnext26ts vit_tiny_patch16_224
vit_relpos_small_patch16_224 deit_tiny_distilled_patch16_224 deit3_small_patch16_224 cait_xxs24_224
xcit_nano_12_p16_224 swin_tiny_patch4_window7_224 swinv2_cr_tiny_224 twins_svt_small pvt_v2_b0 poolformer_s12
caformer_s18 mixer_s32_224 gmlp_ti16_224 resmlp_12_224 coat_lite_tiny coatnet_pico_rw_224 crossvit_tiny_240 levit_128s
efficientformer_l1 efficientformerv2_s0 mobilevit_xxs mobilevitv2_050 edgenext_xx_small fastvit_t8 mobileone_s0
starnet_s1 tiny_vit_5m_224 visformer_tiny focalnet_tiny_srf davit_tiny gcvit_xxtiny hiera_tiny_224
eva02_tiny_patch14_224 repvit_m0_9 shvit_s1 sequencer2d_s tnt_s_legacy_patch16_224 nest_tiny pit_ti_224 convit_tiny
hgnetv2_b0 mambaout_femto swiftformer_xs efficientvit_b0 efficientvit_m0 nextvit_small volo_d1_224 xception41
"""

LARGER = {
    "bat_resnext26ts": 256,  # attention in blocks of 8 x 8
    "crossvit_tiny_240": 240,  # two scales of patches
    "efficientformer_l1": 224,  # a table of positions for this size
    "inception_v3": 96,  # shrinks the image too often
    "eva02_tiny_patch14_224": 56,  # patches of 14
    "sequencer2d_s": 70,  # patches of 7
    "nest_tiny": 128,  # blocks of blocks of patches
}
"""The side of the images that other nets than those of 64 need."""


def _built(name: str, side: int) -> nn.Module:
    """For images of this side, where the net wants to know."""
    try:
        return create_model(name, num_classes=CLASSES, img_size=side)
    except TypeError:  # a convolutional one, which takes any
        return create_model(name, num_classes=CLASSES)


def cases() -> Iterator[Case]:
    """All of them."""
    for name in NAMES.split():
        side = LARGER.get(name, SIDE)
        yield Case("timm", name, partial(_built, name, side), (3, side, side))
