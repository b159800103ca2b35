"""Liger-Kernel: its tiled MLP recomputes a part of a block."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from ebb_tests.frameworks.own_checkpointing import Block, absent, check_regions, load, plain, stack

with absent("triton"):
    tiled = load("liger_kernel.ops.tiled_mlp")


class TiledBlock(Block):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(self.up, nn.ReLU(), self.down)

    def forward(self, x):
        y = tiled.apply_tiled_mlp(lambda mlp, part: mlp(part), self.mlp, self.norm(x), 4)
        return x + self.dropout(y)


def test_a_tiled_mlp_in_blocks():
    own = stack(partial(checkpoint, use_reentrant=False), TiledBlock)
    check_regions(stack(plain, TiledBlock), own, regions=4)
    check_regions(None, stack(plain, TiledBlock), regions=4, adds=True)
