"""MONAI: use_checkpoint of SwinUNETR."""

from __future__ import annotations

import pytest
import torch

from ebb_tests.frameworks.own_checkpointing import check_regions

pytest.importorskip("einops", reason="needs einops")
nets = pytest.importorskip("monai.networks.nets", reason="needs monai")


def swin(*, checkpoints):
    def make():
        model = nets.SwinUNETR(
            in_channels=1,
            out_channels=2,
            spatial_dims=2,
            feature_size=12,
            drop_rate=0.1,
            use_checkpoint=checkpoints,
        )
        image = torch.randn(1, 1, 64, 64)
        return model, lambda: model(image).square().mean()

    return make


def test_swin_unetr():
    check_regions(swin(checkpoints=False), swin(checkpoints=True), regions=16)
