"""Networks of MONAI 1.6.1: 49 of its 3D segmenters, transformers, generators, classifiers and registration
networks.

Volumes are the smallest at which a network still does all it does. Many are longer in depth than across, which is cheap
and tells the dims apart. Networks with batch norm at the bottom keep several voxels there: over two voxels, rounding
alone would spoil any comparison.

Left out: HyenaNDUNETR and DAF3D (their packages do not install), Generator (no volume goes in), NaViT (a list goes in).
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from . import Input, Zoo, ZooEntry

STEP = torch.zeros(1, dtype=torch.long)  # of a diffusion
CONTEXT = (1, 3, 4)  # tokens a diffusion is conditioned on
DIFFUSION = {"norm_num_groups": 4, "num_head_channels": 8}
LATENT = {"latent_channels": 3, "norm_num_groups": 4}
TOKENS = {"hidden_size": 48, "mlp_dim": 96, "num_heads": 4}
DECODER = {"decoder_hidden_size": 48, "decoder_mlp_dim": 96, "decoder_num_layers": 1, "decoder_num_heads": 4}
LEVELS = ((1, 1), (8, 16), (False, True))  # residual blocks, channels, and attention of two levels
SWIN = {"spatial_dims": 3, "feature_size": 12, "window_size": 5}
RESIDUAL = {"spatial_dims": 3, "num_classes": 2, "widen_factor": 0.25}
PLAIN_3D = {"spatial_dims": 3, "in_channels": 1}
IN_3D = {"pretrained": False, **PLAIN_3D}
CUBE, PATCH = (32, 32, 32), (16, 16, 16)
CONDITIONED = {"with_conditioning": True, "cross_attention_dim": CONTEXT[-1]}
TOPOLOGY = {"channel_mul": 0.25, "num_blocks": 4, "num_depths": 3, "use_downsample": True, "spatial_dims": 3}


def volume(depth: int = 32, height: int | None = None, *, channels: int = 1) -> tuple[int, ...]:
    """The shape of one volume, as wide as it is high."""
    side = depth if height is None else height
    return (1, channels, depth, side, side)


def net(name: str, inputs: list[Input], *args: Any, **options: Any) -> ZooEntry:
    """``Name(*args, **options)`` of MONAI. What stands in parentheses behind a name tells variants apart."""

    def make(networks: Any) -> Any:
        mine, named = copy.deepcopy((args, options))  # some networks change the lists that they are given
        return getattr(networks, name.partition("(")[0])(*mine, **named)

    return ZooEntry(name, make, tuple(inputs))


# Encoders and decoders with skips: halos at every level, and tiles that shrink and grow.
SEGMENTERS = (
    net("UNet", [volume()], 3, 1, 2, (8, 16, 32), (2, 2), num_res_units=2),
    net("BasicUNet", [volume()], 3, 1, 2, features=(8, 8, 16, 32, 64, 8)),
    net("BasicUNetPlusPlus", [volume(32, 16)], 3, 1, 2, features=(8, 8, 16, 32, 64, 8)),
    net("AttentionUnet", [volume()], 3, 1, 2, (8, 16, 32), (2, 2)),
    net(
        "DynUNet",
        [volume()],
        *(3, 1, 2, [3, 3, 3, 3], [1, 2, 2, 2], [2, 2, 2]),
        filters=[8, 16, 32, 32],
        res_block=True,
        deep_supervision=False,
    ),
    net("FlexibleUNet", [volume(64, 32)], 1, 2, "resnet18", spatial_dims=3, decoder_channels=(32, 16, 8, 8, 8)),
    net("SegResNet", [volume()], 3, 8, 1, 2),
    net("SegResNet(deconv)", [volume()], 3, 8, 1, 2, upsample_mode="deconv"),
    net("SegResNetVAE", [volume()], CUBE, spatial_dims=3, init_filters=8, in_channels=1, out_channels=2),
    net("SegResNetDS", [volume()], 3, 8, 1, 2, blocks_down=(1, 2, 2), dsdepth=2),
    net("SegResNetDS2", [volume()], 3, 8, 1, 2, blocks_down=(1, 2, 2), dsdepth=2),
    net("VNet", [volume(32, 16)], 3, 1, 2),
    net("HighResNet", [volume(16)], 3, 1, 2),
    net("MedNeXt", [volume(32, 16)], 3, 8, 1, 2),
    ZooEntry("DiNTS", lambda n: n.DiNTS(n.TopologyInstance(device="cpu", **TOPOLOGY), 1, 2), (volume(),)),
    ZooEntry(
        "VISTA3D",
        lambda n: n.vista3d132(encoder_embed_dim=16, in_channels=1),
        (volume(32, 16),),
        {"class_vector": torch.tensor([[1]])},
    ),
)

# Attention over tokens of a cut volume, in windows or over all of them.
TRANSFORMERS = (
    net("UNETR", [volume()], 1, 2, CUBE, feature_size=8, **TOKENS),
    net("SwinUNETR", [volume(64, 32)], 1, 2, **SWIN),
    net("SwinUNETR(v2)", [volume(64, 32)], 1, 2, use_v2=True, **SWIN),
    net("ViT", [volume()], 1, CUBE, PATCH, num_layers=2, **TOKENS),
    net("ViTAutoEnc", [volume()], 1, CUBE, PATCH, num_layers=2, **TOKENS),
    net("MaskedAutoEncoderViT", [volume()], 1, CUBE, PATCH, num_layers=2, spatial_dims=3, **TOKENS, **DECODER),
)

# Autoencoders, diffusion models and discriminators: several inputs, and norms that another input steers.
GENERATORS = (
    net("AutoEncoder", [volume()], 3, 1, 2, (8, 16), (2, 2)),
    net("VarAutoEncoder", [volume()], 3, (1, *CUBE), 1, 8, (8, 16), (2, 2)),
    net("AutoencoderKL", [volume(16)], 3, 1, 1, *LEVELS, **LATENT),
    net("SPADEAutoencoderKL", [volume(16, 8), volume(16, 8, channels=2)], 3, 2, 1, 1, *LEVELS, **LATENT),
    ZooEntry(
        "VQVAE",
        lambda n: n.VQVAE(
            *(3, 1, 1, (8, 16), 1, (4, 4)),
            downsample_parameters=((2, 4, 1, 1), (2, 4, 1, 1)),
            upsample_parameters=((2, 4, 1, 1, 0), (2, 4, 1, 1, 0)),
            num_embeddings=8,
            embedding_dim=8,
        ),
        (volume(),),
        dtype="float32",
    ),
    net("DiffusionModelUNet", [volume(16), STEP], 3, 1, 1, *LEVELS, **DIFFUSION),
    net("DiffusionModelUNet(cond)", [volume(16), STEP, CONTEXT], 3, 1, 1, *LEVELS, **CONDITIONED, **DIFFUSION),
    net("SPADEDiffusionModelUNet", [volume(16, 8), STEP, volume(16, 8, channels=2)], 3, 1, 1, 2, *LEVELS, **DIFFUSION),
    net(
        "ControlNet",
        [volume(16), STEP, volume(16)],
        *(3, 1, *LEVELS),
        **{"conditioning_embedding_in_channels": 1, "conditioning_embedding_num_channels": (8,), **DIFFUSION},
    ),
    net("SPADENet", [volume(16, channels=2), volume(16)], 3, 1, 1, 2, [16, 16, 16], [8, 16], z_dim=4),
    net("PatchDiscriminator", [volume()], 3, 8, 1),
    net("MultiScalePatchDiscriminator", [volume(64)], 2, 2, 3, 8, 1, minimum_size_im=64),
)

# A cut volume becomes a whole vector: global pools and dense layers.
CLASSIFIERS = (
    ZooEntry("ResNet18", lambda n: n.resnet18(n_input_channels=1, **RESIDUAL), (volume(),)),
    ZooEntry("ResNet50", lambda n: n.resnet50(n_input_channels=1, shortcut_type="B", **RESIDUAL), (volume(),)),
    ZooEntry("ResNetFeatures18", lambda n: n.ResNetFeatures("resnet18", **IN_3D), (volume(64),)),
    net("DenseNet121", [volume(64)], 3, 1, 2, init_features=16, growth_rate=8),
    ZooEntry("SENet154/SEResNet50", lambda n: n.SEResNet50(num_classes=2, **PLAIN_3D), (volume(64, 48),)),
    ZooEntry("EfficientNet-b0", lambda n: n.EfficientNetBN("efficientnet-b0", num_classes=2, **IN_3D), (volume(64),)),
    net("Regressor", [volume()], (1, *CUBE), (2,), (4, 8), (2, 2)),
    net("Classifier", [volume()], (1, *CUBE), 2, (4, 8), (2, 2)),
    net("Discriminator", [volume()], (1, *CUBE), (4, 8), (2, 2)),
    net("Critic", [volume()], (1, *CUBE), (4, 8), (2, 2)),
)

# Fields of displacements, and sampling at any place.
REGISTRATION = (
    net("RegUNet", [volume()], 3, 1, 8, 2, out_channels=3),
    ZooEntry("GlobalNet", lambda n: n.GlobalNet(CUBE, 3, 1, 8, 2), (volume(),), dtype="float32"),
    net("LocalNet", [volume(32, 16)], 3, 1, 8, (0, 1, 2)),
    net("VoxelMorphUNet", [volume(32, 16, channels=2)], 3, 2, 16, (8, 16), (16, 8)),
    net("VoxelMorph", [volume(32, 16), volume(32, 16)]),
)

ENTRIES = (*SEGMENTERS, *TRANSFORMERS, *GENERATORS, *CLASSIFIERS, *REGISTRATION)
ZOO = Zoo("monai", "monai.networks.nets", ENTRIES, extra="zoo-monai")
