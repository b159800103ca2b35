"""Writes after a region to what it has computed and the program still holds."""

from __future__ import annotations

import contextlib

import pytest
import torch

import ebb
from ebb_tests.exactness import like_eager_each


def fused_step(h):
    options = dict.fromkeys(("weight_decay", "momentum", "dampening"), 0.0)
    options |= {"lr": 0.1, "nesterov": False, "maximize": False, "is_first_step": True}
    torch._fused_sgd_([h], [torch.ones_like(h)], [], **options)


def unscale(h):
    torch._amp_foreach_non_finite_check_and_unscale_([h], torch.zeros(1), torch.tensor([0.5]))


def running_statistics(h):
    x = torch.ones(2, 4, dtype=h.dtype)
    for row in h:
        torch.nn.functional.batch_norm(x, row, torch.ones(4, dtype=h.dtype), training=True)


WRITES = {
    "numpy": lambda h: h.numpy().fill(0.25),
    ".data": lambda h: h.data.mul_(3),
    "a storage's fill_": lambda h: h.untyped_storage().fill_(1),
    "a fused optimizer": fused_step,
    "unscaling": unscale,
    "running statistics": running_statistics,
}


def read(h, x):
    return (h + 1).sin() * x


def multiplied(h, x):
    return ((h * x) + 1).exp()


def through_a_view(h, x):
    return (h.t() * 2).sin() * x


def written_on(h, x):
    z = h + 1
    z.mul_(x.detach())
    return z.cos() * x


def gradients(region, reader, write, *, lives):
    """With what was written alive in backward, or dead."""
    x = torch.rand(4, 4, dtype=torch.float64, requires_grad=True)
    w = torch.rand(4, 4, dtype=torch.float64, requires_grad=True)
    with region:
        h = (x @ w).detach()
        loss = reader(h, x).sum()
    WRITES[write](h)
    if not lives:
        del h
    return torch.autograd.grad(loss, (x, w), allow_unused=True)


@pytest.mark.parametrize("lives", [True, False], ids=["it lives", "it dies"])
@pytest.mark.parametrize("reader", [read, through_a_view, written_on])
@pytest.mark.parametrize("name", WRITES)
@like_eager_each
def test_what_was_computed_is_made_again(region, name, reader, lives):
    """Eager's backward reads nothing that shares its memory."""
    return gradients(region, reader, name, lives=lives)


@pytest.mark.parametrize("name", WRITES)
@like_eager_each
def test_what_eager_reads_too_is_what_was_written(region, name):
    """While it lives, eager's saved tensor is the same memory."""
    return gradients(region, multiplied, name, lives=True)


# Seen writes: eager's backward goes on if it needs nothing that was written.
SEEN = {
    "add_": lambda h: h.add_(1),
    "add_ to a view": lambda h: h[1].add_(1),
    "copy_": lambda h: h.copy_(torch.ones_like(h)),
    "zero_": lambda h: h.zero_(),
    "set_": lambda h: h.set_(torch.zeros_like(h)),
}


@pytest.mark.parametrize("saved_by", ["one", "two", "a view"])
@pytest.mark.parametrize("name", SEEN)
@like_eager_each
def test_a_tensor_that_needs_no_grad_and_that_others_have_saved(region, name, saved_by):
    """What autograd saved is the program's tensor itself, so counting its holders tells nothing."""
    x = torch.full((4, 4), 0.3, dtype=torch.float64, requires_grad=True)
    w = torch.arange(16.0, dtype=torch.float64).reshape(4, 4)
    with region:
        h = x.detach() @ w
        shown = h.t() if saved_by == "a view" else h
        others = [shown * x for _ in range(2 if saved_by == "two" else 1)]
        out = ((h + 1) * x).sin()
    SEEN[name](h)
    gradient = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
    allowed = 0
    for other in others:
        with contextlib.suppress(RuntimeError):
            torch.autograd.grad(other.sum(), x)
            allowed += 1
    return gradient, torch.tensor(allowed)


@like_eager_each
def test_in_another_region(region):
    x = torch.full((4, 4), 0.3, dtype=torch.float64, requires_grad=True)
    with region:
        h = (x * 2).detach()
        first = (h + 1).sin() * x
    with region:
        fused_step(h)
        second = h.exp() * x
    return torch.autograd.grad((first + second).sum(), x)


def test_what_was_not_written_is_not_made_again():
    x = torch.full((4, 4), 0.3, requires_grad=True)
    with ebb.region():
        h = (x.exp()).detach()
        loss = ((h + 1).sin() * x).sum()

    loss.backward()

    assert ebb.stats()["total"]["ops_replayed"] == 2  # not exp
    assert h is not None
