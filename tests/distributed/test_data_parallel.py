"""DistributedDataParallel within a region, and statistics of all ranks. See also strategies.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ebb_tests.ranks.comparing import assert_exact
from ebb_tests.ranks.models import WIDTH, Net, step_in_a_region, train_steps
from ebb_tests.ranks.two_ranks import on_two_ranks


@on_two_ranks
def test_the_whole_of_ddp_in_a_region():
    def train(inside):
        model = DistributedDataParallel(Net())
        return train_steps(model, step_of=step_in_a_region(inside))

    assert_exact(train)


class SyncNorm(torch.autograd.Function):
    """What SyncBatchNorm does, which torch has for devices alone: statistics of all ranks."""

    @staticmethod
    def forward(ctx, x):
        sums = torch.stack([x.sum(0), x.square().sum(0)])
        dist.all_reduce(sums)
        count = x.shape[0] * dist.get_world_size()
        mean = sums[0] / count
        scale = (sums[1] / count - mean.square() + 1e-5).rsqrt()
        normed = (x - mean) * scale
        ctx.save_for_backward(normed, scale)
        return normed

    @staticmethod
    def backward(ctx, gradient):
        normed, scale = ctx.saved_tensors
        sums = torch.stack([gradient.sum(0), (gradient * normed).sum(0)])
        dist.all_reduce(sums)
        sums /= normed.shape[0] * dist.get_world_size()
        return (gradient - sums[0] - normed * sums[1]) * scale


class SyncedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.sin(SyncNorm.apply(self.linear(x).exp()) * 2) + x


@on_two_ranks
def test_statistics_of_all_ranks():
    def train(inside):
        model = nn.Sequential(SyncedBlock(), SyncedBlock())
        inside.apply(model, "[0-9]")
        return train_steps(DistributedDataParallel(model))

    assert_exact(train)
