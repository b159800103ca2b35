"""timm: set_grad_checkpointing, which calls checkpoint_seq."""

from __future__ import annotations

import pytest
import torch

from ebb_tests.frameworks.own_checkpointing import absent, check_regions

with absent("torchvision"):
    timm = pytest.importorskip("timm", reason="needs timm")


def vit(*, checkpoints):
    def make():
        model = timm.create_model(
            "vit_tiny_patch16_224", img_size=64, depth=4, num_classes=8, drop_path_rate=0.2
        )
        model.set_grad_checkpointing(checkpoints)
        images = torch.randn(4, 3, 64, 64)
        return model, lambda: model(images).square().mean()

    return make


def test_vision_transformer():
    check_regions(vit(checkpoints=False), vit(checkpoints=True), regions=4)
