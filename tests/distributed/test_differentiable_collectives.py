"""Collectives whose results are new tensors, inside of regions and between them.

These are torch.distributed.nn.functional, the functional collectives, redistributed DTensors, and
collectives of objects.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as differentiable
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ebb_tests.ranks.collectives import peer, rank
from ebb_tests.ranks.comparing import compared_with_eager


def group():
    return dist.group.WORLD


def from_local(h, placement):
    return DTensor.from_local(h, init_device_mesh("cpu", (2,)), [placement])


def redistributed(h, before, after, async_op):
    return (
        from_local(h, before).redistribute(placements=[after], async_op=async_op).exp().to_local()
    )


AUTOGRAD = {
    "all_reduce": lambda h: differentiable.all_reduce(h),
    "all_reduce of the largest": lambda h: differentiable.all_reduce(h, dist.ReduceOp.MAX),
    "broadcast": lambda h: differentiable.broadcast(h, 0),
    "reduce": lambda h: differentiable.reduce(h, 0),
    "all_gather": lambda h: torch.stack(differentiable.all_gather(h)),
    "gather": lambda h: torch.stack(list(differentiable.gather(h, 0))),
    "scatter": lambda h: differentiable.scatter([h, h * 2], 0),
    "reduce_scatter": lambda h: differentiable.reduce_scatter(torch.empty_like(h), [h, h * 2]),
    "all_to_all": lambda h: torch.stack(
        differentiable.all_to_all([torch.empty_like(h), torch.empty_like(h)], [h, h * 2])
    ),
    "all_to_all_single": lambda h: differentiable.all_to_all_single(torch.empty_like(h), h),
    "functional all_gather": lambda h: funcol.all_gather_tensor_autograd(h, 0, group()),
    "functional reduce_scatter": lambda h: funcol.reduce_scatter_tensor_autograd(
        h, "sum", 0, group()
    ),
    "functional all_to_all": lambda h: funcol.all_to_all_single_autograd(
        h, [2, 2], [2, 2], group()
    ),
    "full_tensor": lambda h: (from_local(h, Partial()).relu() * 2).full_tensor(),
}
PLACEMENTS = (
    (Shard(0), Replicate()),
    (Replicate(), Shard(0)),
    (Partial(), Shard(0)),
    (Shard(0), Shard(1)),
)
for (before, after), async_op in itertools.product(PLACEMENTS, (False, True)):
    AUTOGRAD[f"{before} to {after}, {async_op=}"] = functools.partial(
        redistributed, before=before, after=after, async_op=async_op
    )

# Of tensors that need no grad.
DETACHED = {
    "all_reduce": lambda h: funcol.all_reduce(h, "sum", group()),
    "all_gather": lambda h: funcol.all_gather_tensor(h, 0, group()),
    "all_gather of columns": lambda h: funcol.all_gather_tensor(h, 1, group()),
    "reduce_scatter": lambda h: funcol.reduce_scatter_tensor(h, "sum", 0, group()),
    "all_to_all": lambda h: funcol.all_to_all_single(h, [2, 2], [2, 2], group()),
    "broadcast": lambda h: funcol.broadcast(h, 0, group()),
    "coalesced": lambda h: torch.cat(
        [t + 0 for t in funcol.all_reduce_coalesced([h, h * 2], "sum", group())]
    ),
    "in place": lambda h: funcol.all_reduce_inplace(h * 2, "sum", group()),
    "gather in place": lambda h: funcol.all_gather_tensor_inplace(
        torch.zeros(8, 3, dtype=h.dtype), h, group()
    ),
    "average": lambda h: funcol.all_reduce(h, "max", group()) * 0.5,
}


@pytest.mark.parametrize("is_between", [False, True], ids=["in a region", "between regions"])
@pytest.mark.parametrize("collective", AUTOGRAD)
@compared_with_eager()
def test_differentiable_collective(x, inside, collective, is_between):
    with inside.region():
        h = (x * 2).sin()
        if not is_between:
            h = AUTOGRAD[collective](h)
            return (h.sin() * h.exp() * (h * 2)).tanh().cos()
    h = AUTOGRAD[collective](h)
    with inside.region():
        return (h.sin() * h.exp() * (h * 2)).tanh().cos()


@pytest.mark.parametrize("collective", DETACHED)
@compared_with_eager()
def test_functional_collective(x, inside, collective):
    with inside.region():
        h = DETACHED[collective]((x * 2).detach())
        y = (x * x).sum() * (h.sin() * (h * 3)).cos()
        return (y * h).tanh().cos()


@compared_with_eager()
def test_collectives_of_objects(x, inside):
    with inside.region():
        objects = [None, None]
        dist.all_gather_object(objects, {"scale": 2.0 + rank()})
        received = [None]
        dist.scatter_object_list(received, [3.0, 5.0] if rank() == 0 else None, 0)
        sent = [x.detach().exp() if rank() == 0 else None]
        dist.broadcast_object_list(sent, 0)
        scale = torch.tensor([o["scale"] for o in objects] + received, dtype=x.dtype)
        return (x * sent[0]).sin() * (scale.sin() * scale.exp()).sum()


@compared_with_eager()
def test_barriers(x, inside):
    with inside.region():
        h = (x * 2).sin()
        dist.barrier()
        h = (h * x).exp()
        dist.monitored_barrier()
        return h.cos()


@compared_with_eager()
def test_ring_of_buffers_in_turn(x, inside):
    """Each turn's product is autograd's own; strategies have a ring in a custom function."""
    with inside.region():
        h = x.sin()
        ours = h.detach().exp()
        total = torch.zeros_like(x)
        for _ in range(4):
            theirs = torch.empty_like(ours)
            works = [dist.irecv(theirs, peer()), dist.isend(ours, peer())]
            total = total + ((h @ ours.t()).softmax(-1) @ ours.cos())
            for work in works:
                work.wait()
            ours = theirs.sin()
        return total
