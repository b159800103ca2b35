"""Each stream that asks for bytes which ebb made waits for those that made them."""

from __future__ import annotations

import accelerator
import pytest
import torch

import ebb


@pytest.fixture
def streams(device):
    return [torch.Stream(device=device) for _ in range(10)]


@pytest.fixture
def x(streams, device):
    x = torch.randn(8, 32).to(device).requires_grad_()
    accelerator.synchronize()
    return x


def before(y):
    """The function whose result `y` shows."""
    return y.grad_fn.next_functions[0][0]


def test_who_used_it_in_forward_waits_for_it_in_backward(streams, x):
    with ebb.region():
        with streams[0]:
            h = x.sin()
        streams[1].wait_stream(streams[0])
        with streams[1]:
            second = h.sinh() * 1
        del h
    accelerator.synchronize()
    with streams[0]:
        first = before(second)._saved_self * 1
    with streams[1]:
        found = before(second)._saved_self * 1
    accelerator.synchronize()

    for read in (first, found):
        assert torch.equal(read.cpu(), x.detach().cpu().sin())


def test_more_streams_than_are_told_apart(streams, x):
    """Each of them waits."""
    with ebb.region():
        with streams[0]:
            h = x.sin()
        outputs = []
        for stream in streams:
            stream.wait_stream(streams[0])
            with stream:
                outputs.append(h.cos() * 1)
        del h
    accelerator.synchronize()
    found = []
    for stream, y in zip(streams, outputs, strict=True):
        with stream:
            found.append(before(y)._saved_self * 1)
    accelerator.synchronize()

    for read in found:
        assert torch.equal(read.cpu(), x.detach().cpu().sin())


def test_a_saved_tensor_that_needs_no_gradient_is_unpacked_twice(streams, x):
    """It is the same tensor; who asks second waits too."""
    with ebb.region():
        with streams[0]:
            with torch.no_grad():
                factor = (x * 2).sin()
            y = x * factor
            del factor
        streams[1].wait_stream(streams[0])
        with streams[1]:
            y.cos()
    accelerator.synchronize()
    found = []
    for stream in streams[:2]:
        with stream:
            found.append(y.grad_fn._saved_other * 1)
    accelerator.synchronize()

    for read in found:
        assert torch.equal(read.cpu(), (x.detach().cpu() * 2).sin())


def test_a_copy_for_recipes_was_made_on_another_stream(streams, x):
    """Since backward may write to what it unpacks, which lives and was not made by ebb."""
    with ebb.region():
        with streams[0]:
            h = x.sin()
            first = h.cos() * 1
        streams[1].wait_stream(streams[0])
        with streams[1]:
            second = (h * 2).cos() * 1
    accelerator.synchronize()
    with streams[0]:
        saved = before(first)._saved_self * 1
    with streams[1]:
        found = before(second)._saved_self * 1
    accelerator.synchronize()

    assert torch.equal(saved.cpu(), h.cpu())
    assert torch.equal(found.cpu(), h.detach().cpu() * 2)


def test_what_comes_back_where_it_was_discarded_is_for_all_streams(streams, x):
    """Its readers outside of the region save its storage, and never ask ebb."""
    with ebb.region():
        with streams[0]:
            y = ebb.discardable(x.tanh())
        streams[1].wait_stream(streams[0])
        with streams[1]:
            (x * 2).cos()
    with streams[0]:
        h = y.sin()
    streams[1].wait_stream(streams[0])
    with streams[1]:
        z = h * 1
    ebb.discard(y, restore_at=z)
    accelerator.synchronize()
    ones = torch.ones_like(z)
    accelerator.synchronize()
    with streams[1]:
        torch.autograd.grad(z, h, ones, retain_graph=True)
    with streams[0]:
        found = y * 1
    accelerator.synchronize()

    assert torch.equal(found.cpu(), x.detach().cpu().tanh())
