"""OpenCLIP: set_grad_checkpointing of its transformer."""

from __future__ import annotations

import torch

from ebb_tests.frameworks.own_checkpointing import absent, check_regions, load

with absent("torchvision", "ftfy"):
    transformer = load("open_clip.transformer")


def towers(*, checkpoints):
    def make():
        model = transformer.Transformer(width=32, layers=4, heads=4)
        model.grad_checkpointing = checkpoints
        x = torch.randn(4, 10, 32)
        return model, lambda: model(x).square().mean()

    return make


def test_transformer():
    check_regions(towers(checkpoints=False), towers(checkpoints=True), regions=4)
