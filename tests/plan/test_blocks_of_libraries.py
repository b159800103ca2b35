"""Blocks that `ebb.apply` finds in libraries' models: bits are eager's, and recomputing the blocks
frees as much as the library's own checkpointing, or 40 % if it has none. Nightly.

`test_blocks.py` has the names of blocks, for small modules and for transformers.
"""

from __future__ import annotations

import importlib

import pytest
import torch

import ebb
from ebb_tests.frameworks.own_checkpointing import absent, same, train
from ebb_tests.programs.real_models import FAMILIES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.not_sanitized,
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

FREED = 0.4  # of the bytes that eager holds between forward and backward


def applied(make):
    def made():
        model, loss = make()
        ebb.apply(model, ebb.policies.recompute_all)
        return model, loss

    return made


def check(make, own=None):
    eager, found = train(make), train(applied(make))

    assert same(found, eager)
    assert found.entered > 0
    assert found.held <= (1 - FREED) * eager.held
    if own is not None:
        assert found.held <= train(own).held


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"EmbeddingBag and attention"}))
def test_models_of_transformers_and_torch(name):
    """All but one, which has no blocks."""
    family = FAMILIES[name]

    def make():
        model = family.build().train()

        def loss():
            output = model(**family.batch())
            return output if isinstance(output, torch.Tensor) else output.loss

        return model, loss

    check(make)


def of_images(model, count, size, channels=3):
    images = torch.randn(count, channels, size, size)
    return model, lambda: model(images).square().mean()


@pytest.mark.parametrize(
    ("name", "count", "size"),
    [
        ("vit_tiny_patch16_224", 8, 96),
        ("efficientnet_b0", 4, 64),
        ("convnext_atto", 8, 64),
        ("swin_tiny_patch4_window7_224", 2, 56),
        ("coatnet_nano_rw_224", 2, 64),
        ("regnety_002", 8, 64),
        ("densenet121", 4, 64),
    ],
)
def test_models_of_timm(name, count, size):
    with absent("torchvision"):
        timm = pytest.importorskip("timm", reason="needs timm")
    settings = {"img_size": size} if "patch" in name or "coatnet" in name else {}

    def made(checkpoints):
        model = timm.create_model(name, **settings)
        model.set_grad_checkpointing(checkpoints)
        return of_images(model, count, size)

    check(lambda: made(False), lambda: made(True))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        (
            "UNet2DModel",
            {
                "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
                "up_block_types": ("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
            },
        ),
        (
            "UNet2DConditionModel",
            {
                "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
                "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
                "cross_attention_dim": 32,
            },
        ),
    ],
)
def test_models_of_diffusers(name, settings):
    diffusers = pytest.importorskip("diffusers", reason="needs diffusers")
    channels = 4 if "Condition" in name else 3
    sizes = {"sample_size": 32, "block_out_channels": (16, 32, 32), "norm_num_groups": 8}

    def made(checkpoints):
        model = getattr(diffusers, name)(**sizes, **settings)
        if checkpoints:
            model.enable_gradient_checkpointing()
        inputs = [torch.randn(2, channels, 32, 32), torch.tensor([7, 500])]
        if channels == 4:
            inputs.append(torch.randn(2, 8, 32))
        return model, lambda: model(*inputs).sample.square().mean()

    check(lambda: made(False), lambda: made(True))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("UNet", {"channels": (8, 16, 32), "strides": (2, 2), "num_res_units": 2}),
        ("SegResNet", {"init_filters": 8}),
        ("UNETR", {"img_size": 64, "hidden_size": 48, "mlp_dim": 96, "num_heads": 4}),
    ],
)
def test_models_of_monai(name, settings):
    pytest.importorskip("monai", reason="needs monai")
    nets = importlib.import_module("monai.networks.nets")
    names = {"in_channels": 1, "out_channels": 2, "spatial_dims": 2}

    check(lambda: of_images(getattr(nets, name)(**names, **settings), 2, 64, channels=1))
