"""DTensors within a region. strategies.py has models that parallelize_module splits."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ebb_tests.ranks.comparing import assert_exact
from ebb_tests.ranks.two_ranks import on_two_ranks


def mesh():
    return init_device_mesh("cpu", (2,))


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize(
    ("before", "after"),
    [("shard", "replicate"), ("replicate", "shard"), ("partial", "shard"), ("shard", "other")],
)
@on_two_ranks
def test_redistribute_inside_a_region(before, after, async_op):
    placements = {
        "shard": Shard(0),
        "replicate": Replicate(),
        "partial": Partial(),
        "other": Shard(1),
    }

    def train(inside):
        torch.manual_seed(5)
        x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
        with inside.region():
            h = DTensor.from_local((x * 2).sin(), mesh(), [placements[before]])
            h = h.redistribute(placements=[placements[after]], async_op=async_op)
            y = (h * h).exp().to_local().sin()
        loss = y.sum()
        return {"loss": loss, "gradient": torch.autograd.grad(loss, x)[0]}

    assert_exact(train)


@on_two_ranks
def test_products_of_dtensors():
    def train(inside):
        torch.manual_seed(5)
        x = distribute_tensor(torch.randn(4, 6), mesh(), [Shard(1)]).requires_grad_()
        w = distribute_tensor(torch.randn(6, 4), mesh(), [Shard(0)]).requires_grad_()
        with inside.region():
            y = ((x.sin() @ w.exp()).relu() * 2).full_tensor().tanh()
        loss = y.sum()
        x_gradient, w_gradient = torch.autograd.grad(loss, [x, w])
        return {"loss": loss, "x": x_gradient, "w": w_gradient}

    assert_exact(train)
