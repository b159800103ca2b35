"""Each stream that asks for bytes which ebb made waits for those that made them."""

from __future__ import annotations

import accelerator
import pytest
import torch
from device_leaves import assert_same

import ebb


@pytest.fixture
def streams(device):
    return [torch.Stream(device=device) for _ in range(10)]


def before(y):
    """The function whose result `y` shows."""
    return y.grad_fn.next_functions[0][0]


def test_who_used_it_in_forward_waits_for_it_in_backward(streams, x):
    with ebb.region():
        with streams[0]:
            h = x.sin()
        with accelerator.behind(streams[1], streams[0]):
            second = h.sinh() * 1
        del h
    accelerator.synchronize()
    with streams[0]:
        first = before(second)._saved_self * 1
    with streams[1]:
        found = before(second)._saved_self * 1

    assert_same([first, found], x.detach().cpu().sin())


def test_more_streams_than_are_told_apart(streams, x):
    """Each of them waits."""
    with ebb.region():
        with streams[0]:
            h = x.sin()
        outputs = []
        for stream in streams:
            with accelerator.behind(stream, streams[0]):
                outputs.append(h.cos() * 1)
        del h
    accelerator.synchronize()
    found = []
    for stream, y in zip(streams, outputs, strict=True):
        with stream:
            found.append(before(y)._saved_self * 1)

    assert_same(found, x.detach().cpu().sin())


def test_a_saved_tensor_that_needs_no_gradient_is_unpacked_twice(streams, x):
    """It is the same tensor; who asks second waits too."""
    with ebb.region():
        with streams[0]:
            with torch.no_grad():
                factor = (x * 2).sin()
            y = x * factor
            del factor
        with accelerator.behind(streams[1], streams[0]):
            y.cos()
    accelerator.synchronize()
    found = []
    for stream in streams[:2]:
        with stream:
            found.append(y.grad_fn._saved_other * 1)

    assert_same(found, (x.detach().cpu() * 2).sin())


def test_a_copy_for_recipes_was_made_on_another_stream(streams, x):
    """Since backward may write to what it unpacks, which lives and was not made by ebb."""
    with ebb.region():
        with streams[0]:
            h = x.sin()
            first = h.cos() * 1
        with accelerator.behind(streams[1], streams[0]):
            second = (h * 2).cos() * 1
    accelerator.synchronize()
    with streams[0]:
        saved = before(first)._saved_self * 1
    with streams[1]:
        found = before(second)._saved_self * 1

    assert_same([saved], h.detach().cpu())
    assert_same([found], h.detach().cpu() * 2)


def test_what_comes_back_where_it_was_discarded_is_for_all_streams(streams, x):
    """Its readers outside of the region save its storage, and never ask ebb; nor do they wait for
    backward, since forward made it."""
    with ebb.region():
        with streams[0]:
            y = ebb.discardable(x.tanh())
        for stream in streams[1:3]:
            with accelerator.behind(stream, streams[0]):
                (x * 2).cos()
    with streams[0]:
        h = y.sin()
    with accelerator.behind(streams[1], streams[0]):
        z = h * 1
    ebb.discard(y, restore_at=z)
    accelerator.synchronize()
    ones = torch.ones_like(z)
    accelerator.synchronize()
    with streams[1]:
        torch.autograd.grad(z, h, ones, retain_graph=True)
    found = []
    for stream in (streams[0], streams[2]):
        with stream:
            found.append(y * 1)

    assert_same(found, x.detach().cpu().tanh())


def test_a_filled_escape_is_for_all_streams(streams, x):
    """Also for those that no gradient passed through."""
    with ebb.region(escapes="placeholder"):
        with streams[0]:
            h = x.sin()
            escaped = h.detach()
            y = h.cos() * 1
            del h
        with accelerator.behind(streams[1], streams[0]):
            escaped.cos()
    accelerator.synchronize()
    with streams[0]:
        first = before(y)._saved_self * 1
    with streams[1]:
        second = escaped * 1

    assert_same([first, second], x.detach().cpu().sin())


def test_a_filled_escape_is_not_for_streams_of_another_device(streams, x):
    """They would wait for what is none of theirs."""

    def waits(other):
        with ebb.region(escapes="placeholder"):
            with streams[0]:
                h = x.sin()
                escaped = h.detach()
                y = h.cos() * 1
                del h
            with accelerator.behind(streams[1], streams[0]):
                escaped.cos()
            other.cos()
        accelerator.synchronize()
        torch.ops.late.counts()
        with streams[0]:
            _ = before(y)._saved_self
        return torch.ops.late.counts().get("wait", 0)

    elsewhere = x.detach().to("late:1")
    accelerator.synchronize()
    assert waits(elsewhere) == waits(x.detach().cpu())


def test_a_copy_before_a_write_was_made_on_another_stream(streams, x):
    """The writer's; recipes that read the copy run on another one, which need not know of the
    write."""
    with torch.no_grad():
        term = torch.rand(8, 32).to(x.device)
    numbers = term.cpu()
    accelerator.synchronize()
    with ebb.region():
        with streams[0]:
            y = (x + term).sin()  # saves the sum, not the term
        with accelerator.behind(streams[1], streams[0]), torch.no_grad():
            term.zero_()
    ones = torch.ones_like(y)
    torch.accelerator.current_stream().synchronize()
    with streams[0]:
        found = torch.autograd.grad(y, x, ones)[0]

    assert_same([found], (x.detach().cpu() + numbers).cos())


def test_more_makers_than_are_told_apart(device, x):
    """Who asks for what one of the last ones made waits for all of those."""
    elsewhere = [torch.Stream(device="late:1") for _ in range(24)]
    here = [torch.Stream(device=device) for _ in range(12)]
    other = x.detach().to("late:1")
    accelerator.synchronize()
    with ebb.region():
        for stream in elsewhere:
            with stream:
                other.cos()
        outputs = []
        for stream in here:
            with stream:
                outputs.append(x.sin().cos() * 1)
    accelerator.synchronize()
    found = []
    for maker, asker, y in zip(here, (*here[1:], here[0]), outputs, strict=True):
        with maker:
            _ = before(y)._saved_self
        with asker:
            found.append(before(y)._saved_self * 1)

    assert_same(found, x.detach().cpu().sin())
