"""Code of the program that runs while a region closes: see Note [Python while a region closes]."""

from __future__ import annotations

import itertools
import logging
import weakref

import numpy as np
import pytest
import torch

import ebb
from ebb import _C
from ebb_tests.exactness import same_bits

ALL = ebb.policies.recompute_all
NUMBERS = itertools.count()


def twice():
    """A custom operator. ebb logs once for each such operator that its results stay in memory."""
    name = f"ebb_test_closing::twice{next(NUMBERS)}"
    schema = "(Tensor x) -> Tensor"
    op = torch.library.custom_op(name, lambda x: x * 2, mutates_args=(), schema=schema)
    op.register_autograd(
        lambda ctx, gradient: gradient * 2,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
    )
    return op


def gradient(enter):
    w = torch.linspace(0, 1, 4, requires_grad=True)
    with enter():
        loss = (w.exp() * 2).sin().sum()
    loss.backward()
    return w.grad


class Work:
    """Computes and enters a region; keeps its gradients, and how many operators ebb replayed."""

    def __init__(self):
        self.gradients, self.inside, self.replayed = [], [], 0

    def __call__(self, *_):
        before = ebb.stats()["total"]["ops_replayed"]
        self.inside.append(_C.in_region())
        self.gradients.append(gradient(lambda: torch.enable_grad()))
        self.gradients.append(gradient(lambda: ebb.region(ALL)))
        self.replayed += ebb.stats()["total"]["ops_replayed"] - before

    def assert_right(self):
        assert self.inside == [False]
        expected = gradient(lambda: torch.enable_grad())
        assert len(self.gradients) == 2
        assert all(same_bits(found, expected) for found in self.gradients)


@pytest.fixture
def handler():
    """A handler of ebb's log; it does `work`."""
    work = Work()
    handler = logging.Handler(logging.WARNING)
    handler.emit = work
    logging.getLogger("ebb").addHandler(handler)
    yield work
    logging.getLogger("ebb").removeHandler(handler)


def read_and_drop(finalizer):
    """A recipe of the open region reads memory that only the region holds from now on."""
    array = np.linspace(0, 1, 4)
    weakref.finalize(array, finalizer)
    torch.from_numpy(array).exp()


def test_a_handler_of_the_log_may_compute_and_enter_regions(handler):
    x = torch.randn(4, requires_grad=True)
    op = twice()
    with ebb.region(ALL):
        y = op(x)
    y.sum().backward()

    handler.assert_right()
    assert handler.replayed > 0
    assert same_bits(x.grad, torch.full((4,), 2.0))


def test_a_finalizer_may_compute_and_enter_regions():
    x = torch.randn(4, requires_grad=True)
    finalizer = Work()
    with ebb.region(ALL):
        read_and_drop(finalizer)
        loss = x.exp().sin().sum()
        assert not finalizer.inside
    found = torch.autograd.grad(loss, x)[0]

    finalizer.assert_right()
    assert same_bits(found, torch.autograd.grad(x.exp().sin().sum(), x)[0])


def test_a_region_that_a_finalizer_leaves_open_does_nothing():
    x = torch.randn(4, requires_grad=True)
    inner = ebb.region(ALL)
    with ebb.region(ALL):
        read_and_drop(inner.__enter__)
    assert not _C.in_region()
    loss = x.exp().sin().sum()
    inner.__exit__(None, None, None)

    assert same_bits(gradient(lambda: ebb.region(ALL)), gradient(lambda: torch.enable_grad()))
    expected = torch.autograd.grad(x.exp().sin().sum(), x)[0]
    assert same_bits(torch.autograd.grad(loss, x)[0], expected)


def test_a_finalizer_may_run_a_backward_through_the_region_that_closes():
    x = torch.randn(4, requires_grad=True)
    losses, found = [], []

    def backward():
        found.append(torch.autograd.grad(losses[0], x, retain_graph=True)[0])

    with ebb.region(ALL):
        read_and_drop(backward)
        losses.append(x.exp().sin().sum())
    found.append(torch.autograd.grad(losses[0], x)[0])

    expected = torch.autograd.grad(x.exp().sin().sum(), x)[0]
    assert len(found) == 2
    assert all(same_bits(gradient, expected) for gradient in found)
