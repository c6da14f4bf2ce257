"""Networks of MONAI 1.6.1: 49 of its 3D segmenters, transformers, generators, classifiers and registration nets.

Volumes are the smallest at which a network still does all it does; many are longer in depth than across, which is cheap
and tells the dims apart. Networks with batch norm at the bottom keep several voxels there: over two, rounding alone
would spoil any comparison. Left out: HyenaNDUNETR and DAF3D (their packages do not install), Generator (no volume goes
in), NaViT (a list goes in).
"""

from __future__ import annotations

import torch

from . import Zoo, ZooEntry

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


def volume(depth: int = 32, height: int | None = None, *, channels: int = 1) -> tuple[int, ...]:
    side = depth if height is None else height
    return (1, channels, depth, side, side)


SEGMENTERS = (
    ZooEntry("UNet", lambda n: n.UNet(3, 1, 2, (8, 16, 32), (2, 2), num_res_units=2), (volume(),)),
    ZooEntry("BasicUNet", lambda n: n.BasicUNet(3, 1, 2, features=(8, 8, 16, 32, 64, 8)), (volume(),)),
    ZooEntry(
        "BasicUNetPlusPlus", lambda n: n.BasicUNetPlusPlus(3, 1, 2, features=(8, 8, 16, 32, 64, 8)), (volume(32, 16),)
    ),
    ZooEntry("AttentionUnet", lambda n: n.AttentionUnet(3, 1, 2, (8, 16, 32), (2, 2)), (volume(),)),
    ZooEntry(
        "DynUNet",
        lambda n: n.DynUNet(
            *(3, 1, 2, [3, 3, 3, 3], [1, 2, 2, 2], [2, 2, 2]),
            filters=[8, 16, 32, 32],
            res_block=True,
            deep_supervision=False,
        ),
        (volume(),),
    ),
    ZooEntry(
        "FlexibleUNet",
        lambda n: n.FlexibleUNet(1, 2, "resnet18", spatial_dims=3, decoder_channels=(32, 16, 8, 8, 8)),
        (volume(64, 32),),
    ),
    ZooEntry("SegResNet", lambda n: n.SegResNet(3, 8, 1, 2), (volume(),)),
    ZooEntry("SegResNet(deconv)", lambda n: n.SegResNet(3, 8, 1, 2, upsample_mode="deconv"), (volume(),)),
    ZooEntry(
        "SegResNetVAE",
        lambda n: n.SegResNetVAE((32, 32, 32), spatial_dims=3, init_filters=8, in_channels=1, out_channels=2),
        (volume(),),
    ),
    ZooEntry("SegResNetDS", lambda n: n.SegResNetDS(3, 8, 1, 2, blocks_down=(1, 2, 2), dsdepth=2), (volume(),)),
    ZooEntry("SegResNetDS2", lambda n: n.SegResNetDS2(3, 8, 1, 2, blocks_down=(1, 2, 2), dsdepth=2), (volume(),)),
    ZooEntry("VNet", lambda n: n.VNet(3, 1, 2), (volume(32, 16),)),
    ZooEntry("HighResNet", lambda n: n.HighResNet(3, 1, 2), (volume(16),)),
    ZooEntry("MedNeXt", lambda n: n.MedNeXt(3, 8, 1, 2), (volume(32, 16),)),
    ZooEntry(
        "DiNTS",
        lambda n: n.DiNTS(
            n.TopologyInstance(
                channel_mul=0.25, num_blocks=4, num_depths=3, use_downsample=True, spatial_dims=3, device="cpu"
            ),
            *(1, 2),
        ),
        (volume(),),
    ),
    ZooEntry(
        "VISTA3D",
        lambda n: n.vista3d132(encoder_embed_dim=16, in_channels=1),
        (volume(32, 16),),
        {"class_vector": torch.tensor([[1]])},
    ),
)

TRANSFORMERS = (
    ZooEntry("UNETR", lambda n: n.UNETR(1, 2, (32, 32, 32), feature_size=8, **TOKENS), (volume(),)),
    ZooEntry("SwinUNETR", lambda n: n.SwinUNETR(1, 2, **SWIN), (volume(64, 32),)),
    ZooEntry("SwinUNETR(v2)", lambda n: n.SwinUNETR(1, 2, use_v2=True, **SWIN), (volume(64, 32),)),
    ZooEntry("ViT", lambda n: n.ViT(1, (32, 32, 32), (16, 16, 16), num_layers=2, **TOKENS), (volume(),)),
    ZooEntry("ViTAutoEnc", lambda n: n.ViTAutoEnc(1, (32, 32, 32), (16, 16, 16), num_layers=2, **TOKENS), (volume(),)),
    ZooEntry(
        "MaskedAutoEncoderViT",
        lambda n: n.MaskedAutoEncoderViT(
            1, (32, 32, 32), (16, 16, 16), num_layers=2, spatial_dims=3, **TOKENS, **DECODER
        ),
        (volume(),),
    ),
)

GENERATORS = (
    ZooEntry("AutoEncoder", lambda n: n.AutoEncoder(3, 1, 2, (8, 16), (2, 2)), (volume(),)),
    ZooEntry("VarAutoEncoder", lambda n: n.VarAutoEncoder(3, (1, 32, 32, 32), 1, 8, (8, 16), (2, 2)), (volume(),)),
    ZooEntry("AutoencoderKL", lambda n: n.AutoencoderKL(3, 1, 1, *LEVELS, **LATENT), (volume(16),)),
    ZooEntry(
        "SPADEAutoencoderKL",
        lambda n: n.SPADEAutoencoderKL(3, 2, 1, 1, *LEVELS, **LATENT),
        (volume(16, 8), volume(16, 8, channels=2)),
    ),
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
    ZooEntry("DiffusionModelUNet", lambda n: n.DiffusionModelUNet(3, 1, 1, *LEVELS, **DIFFUSION), (volume(16), STEP)),
    ZooEntry(
        "DiffusionModelUNet(cond)",
        lambda n: n.DiffusionModelUNet(
            3, 1, 1, *LEVELS, with_conditioning=True, cross_attention_dim=CONTEXT[-1], **DIFFUSION
        ),
        (volume(16), STEP, CONTEXT),
    ),
    ZooEntry(
        "SPADEDiffusionModelUNet",
        lambda n: n.SPADEDiffusionModelUNet(3, 1, 1, 2, *LEVELS, **DIFFUSION),
        (volume(16, 8), STEP, volume(16, 8, channels=2)),
    ),
    ZooEntry(
        "ControlNet",
        lambda n: n.ControlNet(
            *(3, 1, *LEVELS),
            conditioning_embedding_in_channels=1,
            conditioning_embedding_num_channels=(8,),
            **DIFFUSION,
        ),
        (volume(16), STEP, volume(16)),
    ),
    ZooEntry(
        "SPADENet",
        lambda n: n.SPADENet(3, 1, 1, 2, [16, 16, 16], [8, 16], z_dim=4),
        (volume(16, channels=2), volume(16)),
    ),
    ZooEntry("PatchDiscriminator", lambda n: n.PatchDiscriminator(3, 8, 1), (volume(),)),
    ZooEntry(
        "MultiScalePatchDiscriminator",
        lambda n: n.MultiScalePatchDiscriminator(2, 2, 3, 8, 1, minimum_size_im=64),
        (volume(64),),
    ),
)

CLASSIFIERS = (
    ZooEntry("ResNet18", lambda n: n.resnet18(n_input_channels=1, **RESIDUAL), (volume(),)),
    ZooEntry(
        "ResNet50",
        lambda n: n.resnet50(n_input_channels=1, shortcut_type="B", **RESIDUAL),
        (volume(),),
    ),
    ZooEntry("ResNetFeatures18", lambda n: n.ResNetFeatures("resnet18", **IN_3D), (volume(64),)),
    ZooEntry("DenseNet121", lambda n: n.DenseNet121(3, 1, 2, init_features=16, growth_rate=8), (volume(64),)),
    ZooEntry("SENet154/SEResNet50", lambda n: n.SEResNet50(num_classes=2, **PLAIN_3D), (volume(64, 48),)),
    ZooEntry("EfficientNet-b0", lambda n: n.EfficientNetBN("efficientnet-b0", num_classes=2, **IN_3D), (volume(64),)),
    ZooEntry("Regressor", lambda n: n.Regressor((1, 32, 32, 32), (2,), (4, 8), (2, 2)), (volume(),)),
    ZooEntry("Classifier", lambda n: n.Classifier((1, 32, 32, 32), 2, (4, 8), (2, 2)), (volume(),)),
    ZooEntry("Discriminator", lambda n: n.Discriminator((1, 32, 32, 32), (4, 8), (2, 2)), (volume(),)),
    ZooEntry("Critic", lambda n: n.Critic((1, 32, 32, 32), (4, 8), (2, 2)), (volume(),)),
)

REGISTRATION = (
    ZooEntry("RegUNet", lambda n: n.RegUNet(3, 1, 8, 2, out_channels=3), (volume(),)),
    ZooEntry("GlobalNet", lambda n: n.GlobalNet((32, 32, 32), 3, 1, 8, 2), (volume(),), dtype="float32"),
    ZooEntry("LocalNet", lambda n: n.LocalNet(3, 1, 8, (0, 1, 2)), (volume(32, 16),)),
    ZooEntry("VoxelMorphUNet", lambda n: n.VoxelMorphUNet(3, 2, 16, (8, 16), (16, 8)), (volume(32, 16, channels=2),)),
    ZooEntry("VoxelMorph", lambda n: n.VoxelMorph(), (volume(32, 16), volume(32, 16))),
)

ENTRIES = (*SEGMENTERS, *TRANSFORMERS, *GENERATORS, *CLASSIFIERS, *REGISTRATION)
ZOO = Zoo("monai", "monai.networks.nets", ENTRIES, extra="zoo-monai")
