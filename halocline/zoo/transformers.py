"""Networks on images from Hugging Face transformers 5.22.2, built from small configurations: nothing is downloaded.

Widths and depths are small; kernels, strides and heads are as published. What would let a narrow network forget its
input is changed: weights that start too small for it (``LOUD``), layer scales of a millionth, a dropout of 0.999.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from . import Zoo, ZooEntry

IMAGE = (2, 3, 64, 64)  # batch norm at the bottom sees more than one pixel
CLASSES = "ForImageClassification"
PIXELS = "ForSemanticSegmentation"
# A narrow network with the usual small weights hardly depends on its input.
LOUD = {"initializer_range": 0.3}
WIDTHS = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]}
TOKENS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
WINDOWS = {"image_size": 64, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
PYRAMID = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 3, 4]}


def network(family: str, head: str = CLASSES, /, **options: Any) -> Callable[[Any], nn.Module]:
    """A builder of ``FamilyHead(FamilyConfig(**options))``."""
    return lambda t: getattr(t, family + head)(getattr(t, f"{family}Config")(**options))


def on_backbone(family: str, backbone: str, settings: dict[str, Any], **options: Any) -> Callable[[Any], nn.Module]:
    """A builder of a segmenter that works on the features of another family."""
    return lambda t: getattr(t, family + PIXELS)(
        getattr(t, f"{family}Config")(backbone_config=getattr(t, f"{backbone}Config")(**settings), **options)
    )


def image(name: str, build: Callable[[Any], nn.Module], size: tuple[int, ...] = IMAGE, **keywords: Any) -> ZooEntry:
    """An entry whose input is a batch of images."""
    return ZooEntry(name, build, (size,), keywords)


# Convolutions only: halos, strides, depthwise kernels.
CONVOLUTIONS = (
    image("ResNet", network("ResNet", embedding_size=8, **WIDTHS)),
    image("RegNet", network("RegNet", embedding_size=8, groups_width=4, **WIDTHS)),
    image("BiT", network("Bit", embedding_size=8, num_groups=4, **WIDTHS)),
    image("ConvNeXt", network("ConvNext", layer_scale_init_value=0.5, **WIDTHS)),
    image("ConvNeXtV2", network("ConvNextV2", **WIDTHS)),
    image("DINOv3-ConvNeXt", network("DINOv3ConvNext", "Model", layer_scale_init_value=0.5, **WIDTHS)),
    image("MobileNetV1", network("MobileNetV1", depth_multiplier=0.25, classifier_dropout_prob=0.2)),
    image("MobileNetV2", network("MobileNetV2", depth_multiplier=0.25)),
    image("MobileNetV2(DeepLabV3+)", network("MobileNetV2", PIXELS, depth_multiplier=0.25, output_stride=8)),
    image(
        "EfficientNet", network("EfficientNet", width_coefficient=0.25, depth_coefficient=0.5, hidden_dim=320, **LOUD)
    ),
    image("TextNet", network("TextNet", hidden_sizes=[8, 8, 12, 16, 24], stem_out_channels=8)),
    image(
        "HGNetV2",
        network(
            "HGNetV2",
            embedding_size=8,
            hidden_sizes=[16, 24, 32, 48],
            stem_channels=[3, 8, 8],
            stage_in_channels=[8, 16, 24, 32],
            stage_mid_channels=[8, 8, 12, 16],
            stage_out_channels=[16, 24, 32, 48],
            stage_num_blocks=[1, 1, 1, 1],
            stage_numb_of_layers=[3, 3, 3, 3],
        ),
    ),
    image("PoolFormer", network("PoolFormer", layer_scale_init_value=0.5, **WIDTHS)),
    image("FocalNet", network("FocalNet", embed_dim=8, **WIDTHS)),
)

# Convolutions and attention in turn.
MIXED = (
    image(
        "MobileViT",
        network("MobileViT", hidden_sizes=[16, 24, 32], neck_hidden_sizes=[4, 8, 8, 12, 16, 24, 32], **LOUD),
    ),
    image("MobileViTV2", network("MobileViTV2", width_multiplier=0.25, n_attn_blocks=[1, 1, 1], **LOUD)),
    image(
        "SwiftFormer",
        network("SwiftFormer", embed_dims=[8, 16, 24, 32], depths=[1, 1, 2, 1], layer_scale_init_value=0.5),
    ),
    image("CvT", network("Cvt", embed_dim=[8, 12, 24], num_heads=[1, 3, 6], depth=[1, 2, 3])),
    image(
        "LeViT",
        network(
            "Levit",
            image_size=64,
            hidden_sizes=[16, 24, 32],
            num_attention_heads=[2, 3, 4],
            depths=[1, 1, 1],
            key_dim=[4] * 3,
        ),
    ),
)

# Patches become tokens; windows are shifted by rolls.
TRANSFORMERS = (
    image("ViT", network("ViT", image_size=64, patch_size=8, **TOKENS)),
    image("BEiT", network("Beit", image_size=64, patch_size=8, use_relative_position_bias=True, **TOKENS)),
    image("DINOv2", network("Dinov2", image_size=56, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)),
    image("Swin", network("Swin", **WINDOWS)),
    image("Swinv2", network("Swinv2", **WINDOWS)),
    image("PVT", network("Pvt", image_size=64, **PYRAMID)),
    image("PVTv2", network("PvtV2", image_size=64, **PYRAMID)),
    image("Hiera", network("Hiera", image_size=[64, 64], embed_dim=8, depths=[1, 1, 2, 1])),
    image(
        "ViTDet",
        network(
            "VitDet",
            "Model",
            image_size=64,
            pretrain_image_size=64,
            patch_size=8,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            window_block_indices=[0],
            residual_block_indices=[1],
            use_relative_position_embeddings=True,
            window_size=3,
        ),
    ),
)

# An answer for each pixel: features of several sizes are brought together.
DENSE = (
    image("SegFormer", network("Segformer", PIXELS, decoder_hidden_size=16, **PYRAMID)),
    image("GLPN", network("GLPN", "ForDepthEstimation", decoder_hidden_size=16, **PYRAMID)),
    image(
        "DPT",
        network(
            "DPT",
            PIXELS,
            image_size=64,
            patch_size=8,
            backbone_out_indices=[0, 1, 2, 3],
            neck_hidden_sizes=[8, 12, 16, 24],
            fusion_hidden_size=16,
            **LOUD,
            **{**TOKENS, "num_hidden_layers": 4},
        ),
    ),
    image(
        "UPerNet(ConvNeXt)",
        on_backbone(
            "UperNet",
            "ConvNext",
            {**WIDTHS, "layer_scale_init_value": 0.5, "out_features": ["stage1", "stage2", "stage3", "stage4"]},
            hidden_size=16,
            auxiliary_channels=8,
            auxiliary_in_channels=24,
        ),
    ),
    image(
        "Swin2SR",
        network(
            "Swin2SR", "ForImageSuperResolution", image_size=32, embed_dim=16, depths=[2], num_heads=[2], window_size=4
        ),
        (1, 3, 32, 32),
    ),
)

ZOO = Zoo("transformers", "transformers", (*CONVOLUTIONS, *MIXED, *TRANSFORMERS, *DENSE), extra="zoo-transformers")
