"""Models of images."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from library_models.case import LARGER, Batch, Own, add, images, noise, steps

# torchvision --------------------------------------------------------------------------------------


def vision(name: str, batch: Batch, own: Own = None, why: str = "", **settings: Any) -> None:
    def make(torchvision: Any, **more: Any) -> Any:
        return torchvision.models.get_model(name, weights=None, **settings, **more)

    add("torchvision", name, make, batch, own, why)


def detection(name: str, **settings: Any) -> None:
    def batch() -> Any:
        box = torch.tensor([[8.0, 8.0, 60.0, 70.0], [20.0, 30.0, 90.0, 80.0]])
        mask = torch.zeros(2, 96, 96, dtype=torch.uint8)
        mask[:, 20:60, 20:60] = 1
        target = {"boxes": box, "labels": torch.tensor([1, 2]), "masks": mask}
        return [torch.rand(3, 96, 96), torch.rand(3, 96, 96)], [target, target]

    vision(name, batch, weights_backbone=None, min_size=96, max_size=96, num_classes=3, **settings)


vision("resnet18", images(8, 64))
vision("resnet50", images(4, 64))
vision("wide_resnet50_2", images(2, 64))
vision("vgg11_bn", images(2, 64), num_classes=10)
vision("densenet121", images(4, 64), {"memory_efficient": True})
vision("mobilenet_v2", images(4, 64))
vision("mobilenet_v3_small", images(8, 64))
vision("efficientnet_b0", images(4, 64))
vision("regnet_y_400mf", images(4, 64))
vision("shufflenet_v2_x1_0", images(8, 64))
vision("mnasnet0_5", images(8, 64))
vision(
    "squeezenet1_1",
    images(8, 64),
    why="the stem (a convolution, a ReLU and a pooling beside the blocks) holds 29 % of the bytes; "
    "half of the others are outputs of blocks, which the next block needs",
)
vision("googlenet", images(4, 64), aux_logits=False, init_weights=False)
vision("inception_v3", images(2, 128), aux_logits=False, init_weights=False)
vision("convnext_tiny", images(2, 64))
vision("swin_t", images(2, 64))
add(
    "torchvision",
    "VisionTransformer",
    lambda of: of.models.VisionTransformer(64, 8, 4, 4, 64, 256),
    images(4, 64),
)
vision("fcn_resnet50", images(2, 64), weights_backbone=None)
vision("deeplabv3_mobilenet_v3_large", images(2, 64), weights_backbone=None)
vision("lraspp_mobilenet_v3_large", images(4, 64), weights_backbone=None)
vision("r3d_18", noise(1, 3, 8, 48, 48))
vision("raft_small", lambda: (torch.rand(1, 3, 128, 128), torch.rand(1, 3, 128, 128), 3))
detection("fasterrcnn_mobilenet_v3_large_fpn")
detection("maskrcnn_resnet50_fpn")
detection("retinanet_resnet50_fpn")

# timm ---------------------------------------------------------------------------------------------


def timm(name: str, batch: Batch, **settings: Any) -> None:
    own = None if name == "hrnet_w18_small" else "set_grad_checkpointing"
    why = LARGER.format("a stage") if name in ("mobilevit_xxs", "nf_resnet26") else ""
    add("timm", name, lambda of: of.create_model(name, **settings), batch, own, why)


timm("resnet26", images(4, 64))
timm("vit_tiny_patch16_224", images(8, 96), img_size=96)
timm("efficientnet_b0", images(4, 64))
timm("convnext_atto", images(8, 64))
timm("swin_tiny_patch4_window7_224", images(2, 56), img_size=56)
timm("mixer_s32_224", images(4, 224))
timm("coatnet_nano_rw_224", images(2, 64), img_size=64)
timm("mobilevit_xxs", images(4, 64))
timm("regnety_002", images(8, 64))
timm("hrnet_w18_small", images(2, 64))
timm("nf_resnet26", images(4, 64))
timm("densenet121", images(4, 64))

# diffusers ----------------------------------------------------------------------------------------


def diffusers(name: str, batch: Batch, why: str = "", **settings: Any) -> None:
    def make(of: Any) -> Any:
        return getattr(of, name)(**settings)

    add("diffusers", name, make, batch, "enable_gradient_checkpointing", why)


diffusers(
    "UNet2DModel",
    lambda: (torch.randn(2, 3, 32, 32), steps()),
    sample_size=32,
    block_out_channels=(16, 32, 32),
    down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    norm_num_groups=8,
)
diffusers(
    "UNet2DConditionModel",
    lambda: (torch.randn(2, 4, 32, 32), steps(), torch.randn(2, 8, 32)),
    sample_size=32,
    block_out_channels=(16, 32, 32),
    down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    norm_num_groups=8,
    cross_attention_dim=32,
)
diffusers(
    "AutoencoderKL",
    images(2, 32),
    LARGER.format("a down, middle or up block"),
    block_out_channels=(16, 32),
    down_block_types=("DownEncoderBlock2D",) * 2,
    up_block_types=("UpDecoderBlock2D",) * 2,
    layers_per_block=2,
    norm_num_groups=8,
)
diffusers(
    "DiTTransformer2DModel",
    lambda: {
        "hidden_states": torch.randn(2, 4, 16, 16),
        "timestep": steps(),
        "class_labels": torch.tensor([1, 2]),
    },
    num_attention_heads=4,
    attention_head_dim=16,
    num_layers=4,
    sample_size=16,
)
diffusers(
    "SD3Transformer2DModel",
    lambda: (torch.randn(2, 4, 16, 16), torch.randn(2, 8, 32), torch.randn(2, 16), steps()),
    sample_size=16,
    in_channels=4,
    out_channels=4,
    num_layers=4,
    attention_head_dim=16,
    num_attention_heads=4,
    joint_attention_dim=32,
    caption_projection_dim=64,
    pooled_projection_dim=16,
    pos_embed_max_size=16,
)
diffusers(
    "FluxTransformer2DModel",
    lambda: {
        "hidden_states": torch.randn(2, 64, 16),
        "encoder_hidden_states": torch.randn(2, 8, 32),
        "pooled_projections": torch.randn(2, 16),
        "timestep": torch.rand(2),
        "img_ids": torch.randint(8, (64, 3)),
        "txt_ids": torch.zeros(8, 3),
    },
    in_channels=16,
    num_layers=2,
    num_single_layers=4,
    attention_head_dim=16,
    num_attention_heads=4,
    joint_attention_dim=32,
    pooled_projection_dim=16,
    axes_dims_rope=(4, 6, 6),
)

# segmentation-models-pytorch ----------------------------------------------------------------------


def segmentation(kind: str, encoder: str = "resnet18", size: int = 64) -> None:
    def make(of: Any) -> Any:
        return getattr(of, kind)(encoder, encoder_weights=None, classes=3)

    add("segmentation-models-pytorch", f"{kind}, {encoder}", make, images(4, size))


segmentation("Unet")
segmentation("UnetPlusPlus")
segmentation("FPN", "efficientnet-b0")
segmentation("DeepLabV3Plus", "mobilenet_v2")
segmentation("Segformer", "mit_b0")
segmentation("Linknet", "timm-regnety_002")

# open_clip ----------------------------------------------------------------------------------------

VISION = {"layers": 4, "width": 64, "head_width": 16, "patch_size": 8, "image_size": 48}
TEXT = {"context_length": 32, "vocab_size": 100, "width": 64, "heads": 4, "layers": 4}


def pairs(size: int = 48) -> Any:
    return torch.randn(4, 3, size, size), torch.randint(1, 100, (4, 32))


def open_clip(name: str, make: Callable[[Any], Any], size: int = 48) -> None:
    add("open_clip_torch", name, make, lambda: pairs(size), "set_grad_checkpointing")


open_clip("CLIP", lambda of: of.CLIP(32, VISION, TEXT))
open_clip("CustomTextCLIP", lambda of: of.CustomTextCLIP(32, VISION, TEXT))
open_clip(
    "CLIP with a ResNet",
    lambda of: of.CLIP(32, {**VISION, "layers": (1, 1, 1, 1), "width": 16, "image_size": 64}, TEXT),
    64,
)

# monai --------------------------------------------------------------------------------------------

add(
    "monai",
    "UNet",
    lambda of: of.UNet(2, 1, 2, (8, 16, 32, 64), (2, 2, 2), num_res_units=2),
    images(4, 64, 1),
)
add("monai", "BasicUNet", lambda of: of.BasicUNet(2, 1, 2, (8, 8, 16, 32, 32, 8)), images(4, 64, 1))
add("monai", "SegResNet", lambda of: of.SegResNet(2, 8, 1, 2), images(4, 64, 1))
add(
    "monai",
    "AttentionUnet",
    lambda of: of.AttentionUnet(2, 1, 2, (8, 16, 32), (2, 2)),
    images(4, 64, 1),
)
add(
    "monai",
    "DynUNet",
    lambda of: of.DynUNet(2, 1, 2, (3, 3, 3, 3), (1, 2, 2, 2), (2, 2, 2), filters=(8, 16, 32, 64)),
    images(4, 64, 1),
)
add(
    "monai",
    "UNETR",
    lambda of: of.UNETR(1, 2, 64, 8, 64, 128, 4, spatial_dims=2),
    images(2, 64, 1),
)
add(
    "monai",
    "SwinUNETR",
    lambda of, **more: of.SwinUNETR(1, 2, feature_size=12, spatial_dims=2, window_size=4, **more),
    images(2, 64, 1),
    {"use_checkpoint": True},
)
add("monai", "DenseNet121", lambda of: of.DenseNet121(2, 1, 3), images(2, 64, 1))
add(
    "monai",
    "DiffusionModelUNet",
    lambda of: of.DiffusionModelUNet(2, 1, 1, 1, (16, 32, 32), (False, True, True), 8),
    lambda: (torch.randn(2, 1, 32, 32), steps()),
)
add(
    "monai",
    "AutoencoderKL",
    lambda of, **more: of.AutoencoderKL(
        2, 1, 1, (1, 1), (16, 32), (False, True), norm_num_groups=8, **more
    ),
    images(2, 32, 1),
    {"use_checkpoint": True},
    LARGER.format("the encoder or the decoder"),
)

# vit-pytorch --------------------------------------------------------------------------------------


def vit(name: str, module: str, size: int, batch: Batch | None = None, **settings: Any) -> None:
    def make(of: Any) -> Any:
        part = importlib.import_module(f"vit_pytorch.{module}")
        return getattr(part, name)(num_classes=10, **settings)

    add("vit-pytorch", name, make, batch or images(4, size))


SIZES = {"dim": 64, "heads": 4, "mlp_dim": 128, "dim_head": 16}
vit("ViT", "vit", 64, image_size=64, patch_size=8, depth=4, **SIZES)
vit("CaiT", "cait", 64, image_size=64, patch_size=8, depth=3, cls_depth=2, **SIZES)
vit("CvT", "cvt", 64, s1_emb_dim=16, s2_emb_dim=32, s3_emb_dim=64, s3_depth=3)
vit("MaxViT", "max_vit", 56, dim=16, depth=(1, 2), dim_head=8)
vit(
    "ViViT",
    "vivit",
    32,
    noise(2, 3, 4, 32, 32),
    image_size=32,
    image_patch_size=8,
    frames=4,
    frame_patch_size=2,
    spatial_depth=2,
    temporal_depth=2,
    **SIZES,
)
