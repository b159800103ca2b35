"""A collective that writes to a tensor is a write, whatever its schema says."""

from __future__ import annotations

import pytest
import torch
from collectives import WAYS, WRITES, rank, write
from comparing import assert_exact
from two_ranks import on_two_ranks


class Through(torch.autograd.Function):
    """Megatron-LM's `reduce_from_tensor_model_parallel_region`, for any collective."""

    @staticmethod
    def forward(ctx, t, name, way):
        write(name, t, way)
        return t

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 0.5, None, None


def returned_by_a_function(x, name, way):
    return Through.apply(x * 2, name, way).sin()


def between_two_functions(x, name, way):
    h = Through.apply((x * 2).sin(), name, way)
    return (h.exp() * h).cos()


def a_computed_tensor(x, name, way):
    h = (x * 2).detach()
    write(name, h, way)
    return (x * h).exp() + h.sin()


def saved_before_the_write(x, name, way):
    h = x.exp()  # saves its result
    write(name, h.detach(), way)
    return (h * x).sin()


def read_before_and_after(x, name, way):
    h = (x * 2).detach()
    before = (x * h.sin()).exp()
    write(name, h, way)
    after = (x * h.sin()).exp()
    return before * after.cos()


def written_twice(x, name, way):
    h = (x * 2).detach()
    write(name, h, way)
    first = (x * (h + 1)).sin()
    h.mul_(0.5)
    write(name, h, way)
    return first * (x * (h + 1)).sin()


def a_view(x, name, way):
    h = (torch.cat([x, x, x]) * 2).detach()
    write(name, h[4:8], way)
    return (torch.cat([x, x, x]) * h).exp()


def written_below(x, name, way):
    """A view of it was made before."""
    h = (x * 2).detach()
    rows = h[1:3]
    write(name, h, way)
    return (x[1:3] * rows.sin()).exp()


def a_leaf(x, name, way):
    h = torch.full((4, 3), 0.3 + rank(), dtype=x.dtype)
    before = (x * h.sin()).exp()
    write(name, h, way)
    return before * (x * h.sin()).exp()


def an_empty_tensor(x, name, way):
    h = torch.empty_like(x).detach()
    with torch.no_grad():
        h.copy_(x)
    write(name, h, way)
    return (x * h.sin()).exp()


TARGETS = {
    f.__name__: f
    for f in (
        returned_by_a_function,
        between_two_functions,
        a_computed_tensor,
        saved_before_the_write,
        read_before_and_after,
        written_twice,
        a_view,
        written_below,
        a_leaf,
        an_empty_tensor,
    )
}


def gradient_or_none(loss, x):
    """None where a saved tensor was written: gloo's own copies move the version, sums do not."""
    try:
        return torch.autograd.grad(loss, x)[0]
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return None


def assert_written(collective, target, way):
    def train(inside):
        torch.manual_seed(rank())
        x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
        with inside.region():
            y = TARGETS[target](x, collective, way)
        # What every target recomputes and offloads, whatever becomes of what was written.
        with inside.region():
            loss = (y * 2 + 1).tanh().exp().sum()
        return {"loss": loss, "gradient": gradient_or_none(loss, x)}

    assert_exact(train)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("collective", WRITES)
@on_two_ranks
def test_a_collective_writes_to(collective, target):
    for way in WAYS:
        assert_written(collective, target, way)
