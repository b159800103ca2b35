"""PyTorch Geometric: ckpt_grad of DeepGCNLayer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ebb_tests.frameworks.own_checkpointing import check_regions

pyg = pytest.importorskip("torch_geometric.nn", reason="needs torch_geometric")


class Net(nn.Module):
    def __init__(self, checkpoints):
        super().__init__()
        self.enter = nn.Linear(16, 16)
        self.layers = nn.ModuleList(
            pyg.DeepGCNLayer(
                pyg.SAGEConv(16, 16),
                pyg.LayerNorm(16),
                nn.ReLU(),
                block="res+",
                dropout=0.1,
                ckpt_grad=checkpoints,
            )
            for _ in range(4)
        )

    def forward(self, x, edges):
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x, edges)
        return x


def net(*, checkpoints):
    def make():
        model = Net(checkpoints)
        x, edges = torch.randn(32, 16), torch.randint(32, (2, 400))
        return model, lambda: model(x, edges).square().mean()

    return make


def test_deep_gcn():
    check_regions(net(checkpoints=False), net(checkpoints=True), regions=4)
