"""diffusers: enable_gradient_checkpointing."""

from __future__ import annotations

import pytest
import torch

from ebb_tests.frameworks.own_checkpointing import check_regions

pytest.importorskip("PIL", reason="needs pillow")
diffusers = pytest.importorskip("diffusers", reason="needs diffusers")


def unet(*, checkpoints):
    def make():
        model = diffusers.UNet2DConditionModel(
            sample_size=16,
            in_channels=4,
            out_channels=4,
            layers_per_block=1,
            block_out_channels=(16, 32),
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=16,
            attention_head_dim=4,
            norm_num_groups=8,
        )
        if checkpoints:
            model.enable_gradient_checkpointing()
        sample, text = torch.randn(2, 4, 16, 16), torch.randn(2, 7, 16)
        return model, lambda: model(sample, 10, text).sample.square().mean()

    return make


def test_unet():
    check_regions(unet(checkpoints=False), unet(checkpoints=True), regions=11)
