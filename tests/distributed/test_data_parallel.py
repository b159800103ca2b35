"""DistributedDataParallel around a model whose blocks are regions."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from comparing import assert_exact
from models import WIDTH, Net, batch, step_in_a_region, train_steps
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from two_ranks import on_two_ranks

SETTINGS = {
    "default": {},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0.0001},
    "views, static, small": {
        "gradient_as_bucket_view": True,
        "static_graph": True,
        "bucket_cap_mb": 0.0001,
    },
}


@pytest.mark.parametrize(
    ("settings", "order"),
    [*((settings, "apply first") for settings in SETTINGS), ("default", "wrap first")],
)
@on_two_ranks
def test_ddp(settings, order):
    def train(inside):
        model = Net()
        if order == "apply first":
            inside.apply(model, "layers.*")
        wrapped = DistributedDataParallel(model, **SETTINGS[settings])
        if order == "wrap first":
            inside.apply(wrapped.module, "layers.*")
        return train_steps(wrapped)

    assert_exact(train)


@on_two_ranks
def test_the_whole_of_ddp_in_a_region():
    def train(inside):
        model = DistributedDataParallel(Net())
        return train_steps(model, step_of=step_in_a_region(inside))

    assert_exact(train)


class Skips(Net):
    """Uses another layer at each step, on each rank."""

    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        x = self.first(x)
        return self.last(self.layers[(self.calls + dist.get_rank()) % 3](x)).tanh()


@on_two_ranks
def test_ddp_with_parameters_that_are_not_used():
    def train(inside):
        model = Skips()
        inside.apply(model, "layers.*")
        return train_steps(DistributedDataParallel(model, find_unused_parameters=True))

    assert_exact(train)


@on_two_ranks
def test_ddp_accumulates_under_no_sync():
    def train(inside):
        model = Net()
        inside.apply(model, "layers.*")

        def step_of(model, step):
            total = 0
            for part in range(3):
                with model.no_sync() if part < 2 else contextlib.nullcontext():
                    loss = model(batch(10 * step + part)).square().mean()
                    loss.backward()
                total = total + loss.detach()
            return total

        return train_steps(DistributedDataParallel(model), step_of=step_of)

    assert_exact(train)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv1d(2, 2, 3, padding=1), nn.BatchNorm1d(2), nn.GELU())
            for _ in range(2)
        )
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        x = x.reshape(-1, 2, WIDTH // 2)
        for layer in self.layers:
            x = layer(x)
        return x * self.calls


@pytest.mark.parametrize("broadcast_buffers", [True, False])
@on_two_ranks
def test_ddp_with_buffers(broadcast_buffers):
    def train(inside):
        model = Convolutions()
        inside.apply(model, "layers.*")
        wrapped = DistributedDataParallel(model, broadcast_buffers=broadcast_buffers)
        return train_steps(wrapped)

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


@on_two_ranks
def test_ddp_with_a_communication_hook():
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    def train(inside):
        model = Net()
        inside.apply(model, "layers.*")
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, fp16_compress_hook)
        return train_steps(wrapped)

    assert_exact(train)


@on_two_ranks
def test_ddp_under_autocast():
    def train(inside):
        model = Net()
        inside.apply(model, "layers.*")

        def step_of(model, step):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(batch(step)).square().mean()
            loss.backward()
            return loss

        return train_steps(DistributedDataParallel(model), step_of=step_of)

    assert_exact(train)
