"""Bytes that one stream has made, and another one uses: the order between them, and who gets the
memory next."""

from __future__ import annotations

import accelerator
import pytest
import torch
from device_leaves import assert_gradient, assert_same, finish_copies

import ebb

SINES = ebb.Policy({"aten::sin": ebb.OFFLOAD})


def use_what_is_free(stream, shape=(8, 32)):
    """Whoever got its memory too soon, or keeps it too long, meets this."""
    with stream:
        kept = [torch.ones(shape, device="late").mul_(3) for _ in range(8)]
    del kept


def ones_for(*outputs):
    ones = [torch.ones_like(y) for y in outputs]
    accelerator.synchronize()
    return ones


def sine_of_a_part(x):
    return x.detach().cpu().sin()[:1]


def test_memory_that_came_ahead_for_another_stream(streams, x):
    """It is the first stream's, and the second one reads it when it is freed."""
    with ebb.region(SINES):
        with streams[0]:
            h = x.sin()
            h.cos()  # sends it
        with accelerator.behind(streams[1], streams[0]):
            second = h.sinh()
        with streams[0]:
            del h
            first = (x * 2).sin().cos()  # fetched for backward, and the other one ahead
    finish_copies()
    ones = ones_for(first, second)
    found = torch.autograd.grad([first, second], x, ones)[0]
    use_what_is_free(streams[0])

    assert_gradient(found, lambda x: ((x * 2).sin().cos(), x.sin().sinh()), x)


def test_fetched_on_one_stream_and_asked_for_again_on_another(streams, x):
    """For a part there was no memory to put it in its place, so it is asked for once more."""
    with ebb.region(SINES), streams[0]:
        y = x.sin()[:1].cos()
    finish_copies()
    limit = torch.accelerator.memory_allocated(x.device) + 512  # for the part
    with pytest.raises(torch.OutOfMemoryError), accelerator.limited(device=limit), streams[0]:
        _ = y.grad_fn._saved_self
    with streams[1]:
        again = y.grad_fn._saved_self
    use_what_is_free(streams[0], (1, 32))
    with streams[1]:
        found = again * 1

    assert_same([found], sine_of_a_part(x))


def test_a_replay_writes_to_a_copy_of_what_another_stream_made(streams, x):
    """Nor to that itself, though nobody needs it any more: the other one may still read it."""
    with ebb.region():
        with streams[0]:
            h = x.sin() * 2
            first = h.tanh() * 1  # tanh saves its result: h is made again, and the write needs it
        with accelerator.behind(streams[1], streams[0]):
            h.mul_(3).add_(1)
            second = h.cos()
        del h
    ones = ones_for(second)
    with streams[0]:
        saved = first.grad_fn.next_functions[0][0]._saved_result
    with streams[1]:
        of_second = torch.autograd.grad(second, x, ones)[0]

    assert_same([saved], (x.detach().cpu().sin() * 2).tanh())
    assert_gradient(of_second, lambda x: (x.sin() * 2 * 3 + 1).cos(), x)


def test_memory_of_a_filled_escape_is_used_by_the_stream_that_made_it(streams, x):
    """Which tells nobody: in eager it is that stream's own. Here it is that of the stream on which
    backward ran."""
    with ebb.region(escapes="placeholder"):
        with streams[0]:
            h = x.sin()
            escaped = h.detach()
        with accelerator.behind(streams[1], streams[0]):
            y = (h * 2).cos()
        del h
    ones = ones_for(y)
    with streams[1]:
        found = torch.autograd.grad(y, x, ones)[0]
    with streams[0]:
        read = escaped * 1
    del escaped
    use_what_is_free(streams[1])

    assert_same([read], x.detach().cpu().sin())
    assert_gradient(found, lambda x: (x.sin() * 2).cos(), x)


def test_a_stream_that_comes_later_waits_for_a_filled_escape(streams, x, device):
    """All streams waited that there were when it was filled."""
    with ebb.region(escapes="placeholder"), streams[0]:
        h = x.sin()
        escaped = h.detach()
        y = h.cos() * 1
        del h
    accelerator.synchronize()
    node = y.grad_fn.next_functions[0][0]
    with streams[1]:
        first = node._saved_self * 1
    with torch.Stream(device=device):
        second = node._saved_self * 1

    assert_same([first, second, escaped], x.detach().cpu().sin())


def test_what_left_early_is_freed_after_the_copy(streams, x):
    """A write waited for that, on its own stream; the memory is another stream's."""
    with ebb.region(SINES):
        with streams[0]:
            h = x.sin()
            h.cos()  # sends it
            y = h.exp().cos()
        with accelerator.behind(streams[1], streams[0]), torch.no_grad():
            h.zero_()
        streams[0].wait_stream(streams[1])
    del h
    use_what_is_free(streams[0])
    with streams[0]:
        found = torch.autograd.grad(y.sum(), x)[0]

    assert_gradient(found, lambda x: x.sin().exp().cos(), x)


@pytest.mark.parametrize("static", [False, True])
def test_what_is_dropped_on_its_way_back(static, streams, x):
    """Its memory is used again after the copy: on the device, and on the host by another stream."""
    ebb.offload.configure(static=static, in_flight_bytes=0)
    with ebb.region(SINES), streams[0]:
        first = x.sin().cos()
        second = (x * 2).sin().cos()
    accelerator.synchronize()
    ones = ones_for(second)
    with streams[0]:
        torch.autograd.grad(second, x, ones)  # and the first one ahead
    del first, second
    use_what_is_free(streams[0])
    with streams[1], ebb.region(SINES):
        y = x.sin().cos().sin().cos()
    with streams[1]:
        found = torch.autograd.grad(y.sum(), x)[0]

    assert_gradient(found, lambda x: x.sin().cos().sin().cos(), x)


def test_what_was_fetched_is_not_sent_any_more(x):
    """It was among the last ones, and is asked for twice: for a part there was no memory first."""
    ebb.offload.configure(keep_last=1)
    with ebb.region(SINES):
        y = x.sin()[:1].cos()
    accelerator.synchronize()
    with (
        pytest.raises(torch.OutOfMemoryError),
        accelerator.limited(device=torch.accelerator.memory_allocated(x.device)),
    ):
        _ = y.grad_fn._saved_self
    before = ebb.stats()["offload"]["bytes_sent"]
    with ebb.region(SINES):
        z = x.sin().cos()  # is the last one now

    assert ebb.stats()["offload"]["bytes_sent"] == before
    assert_same([y.grad_fn._saved_self], sine_of_a_part(x))
    del z
