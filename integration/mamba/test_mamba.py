"""mamba-ssm: a stand-in for its function, which keeps its inputs and recomputes the rest."""

from __future__ import annotations

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from ebb_tests.frameworks.own_checkpointing import Block, check_regions, plain, stack


class Inner(torch.autograd.Function):
    """As MambaInnerFn with checkpoint_lvl=1: backward computes `delta` a second time."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.nn.functional.softplus(x * weight).cumsum(1)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            y = torch.nn.functional.softplus(x * weight).cumsum(1)
        return torch.autograd.grad(y, (x, weight), gradient)


class MambaBlock(Block):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(128))

    def forward(self, x):
        y = Inner.apply(self.up(self.norm(x)), self.weight)
        return x + self.dropout(self.down(y))


def test_blocks_with_checkpoints():
    own = stack(partial(checkpoint, use_reentrant=False), MambaBlock)
    check_regions(stack(plain, MambaBlock), own, regions=4)


def test_blocks_without_checkpoints():
    check_regions(None, stack(plain, MambaBlock), regions=4, adds=True)
