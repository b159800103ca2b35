"""torchvision: memory_efficient=True of DenseNet."""

from __future__ import annotations

import torch

from ebb_tests.frameworks.own_checkpointing import check_regions, with_torchvision

densenet = with_torchvision("torchvision.models.densenet")


def net(*, checkpoints):
    def make():
        model = densenet.DenseNet(
            8, (2, 2), 16, drop_rate=0.1, num_classes=8, memory_efficient=checkpoints
        )
        images = torch.randn(2, 3, 64, 64, requires_grad=True)
        return model, lambda: model(images).square().mean()

    return make


def test_densenet():
    """By itself, it updates BatchNorm's running averages a second time when it recomputes."""
    own = net(checkpoints=True)
    check_regions(net(checkpoints=False), own, regions=4, is_exact=False)
