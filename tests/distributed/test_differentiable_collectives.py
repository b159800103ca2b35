"""torch.distributed.nn.functional and the functional collectives, inside of regions."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as differentiable

from ebb_tests.ranks.collectives import peer, rank
from ebb_tests.ranks.comparing import assert_exact
from ebb_tests.ranks.ring_attention import RingAttention
from ebb_tests.ranks.two_ranks import on_two_ranks


def group():
    return dist.group.WORLD


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
}

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


def gradient_of(program, inside):
    torch.manual_seed(rank())
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    with inside.region():
        loss = program(x).sum()
    return {"loss": loss, "gradient": torch.autograd.grad(loss, x)[0]}


@pytest.mark.parametrize("collective", AUTOGRAD)
@on_two_ranks
def test_a_differentiable_collective(collective):
    def program(x):
        h = AUTOGRAD[collective]((x * 2).sin())
        return (h.sin() * h.exp() * (h * 2)).tanh().cos()

    assert_exact(lambda inside: gradient_of(program, inside))


@pytest.mark.parametrize("collective", AUTOGRAD)
@on_two_ranks
def test_a_differentiable_collective_between_regions(collective):
    def train(inside):
        torch.manual_seed(rank())
        x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
        with inside.region():
            h = (x * 2).sin()
        h = AUTOGRAD[collective](h)
        with inside.region():
            loss = (h.sin() * h.exp() * (h * 2)).tanh().cos().sum()
        return {"loss": loss, "gradient": torch.autograd.grad(loss, x)[0]}

    assert_exact(train)


@pytest.mark.parametrize("collective", DETACHED)
@on_two_ranks
def test_a_functional_collective(collective):
    def program(x):
        h = DETACHED[collective]((x * 2).detach())
        y = (x * x).sum() * (h.sin() * (h * 3)).cos()
        return (y * h).tanh().cos()

    assert_exact(lambda inside: gradient_of(program, inside))


@on_two_ranks
def test_objects():
    def program(x):
        objects = [None, None]
        dist.all_gather_object(objects, {"scale": 2.0 + rank()})
        received = [None]
        dist.scatter_object_list(received, [3.0, 5.0] if rank() == 0 else None, 0)
        sent = [x.detach().exp() if rank() == 0 else None]
        dist.broadcast_object_list(sent, 0)
        scale = torch.tensor([o["scale"] for o in objects] + received, dtype=x.dtype)
        return (x * sent[0]).sin() * (scale.sin() * scale.exp()).sum()

    assert_exact(lambda inside: gradient_of(program, inside))


@on_two_ranks
def test_a_barrier():
    def program(x):
        h = (x * 2).sin()
        dist.barrier()
        h = (h * x).exp()
        dist.monitored_barrier()
        return h.cos()

    assert_exact(lambda inside: gradient_of(program, inside))


@on_two_ranks
def test_ring_attention():
    def program(x):
        h = x.sin()
        return RingAttention.apply(h.exp(), h.cos(), h * 2).sin() * h

    assert_exact(lambda inside: gradient_of(program, inside))


@on_two_ranks
def test_a_ring_that_autograd_sees():
    """Buffers that take turns, and each step's product is autograd's own."""

    def program(x):
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

    assert_exact(lambda inside: gradient_of(program, inside))
