"""Values that one stream computes and another uses: the order of accesses, and reuse of memory.

Streams run as late as they may. Tests of OFFLOAD on several streams are in test_offload_waits.py.
"""

from __future__ import annotations

import concurrent.futures

import pytest
import torch

import ebb
from ebb_tests import device as late
from ebb_tests.device_leaves import assert_gradient, assert_same, finish_copies, gradient, leaf
from ebb_tests.programs.offloaded import SINES

pytestmark = pytest.mark.usefixtures("x")


@pytest.fixture
def streams(device):
    return [torch.Stream(device=device) for _ in range(3)]


def sine_and_cosine(x):
    return x.sin().cos()


def saved_on(*where):
    """The tensor that the function before `y` saved, unpacked on the stream, for each pair."""
    found = []
    for stream, y in where:
        with stream:
            found.append(y.grad_fn.next_functions[0][0]._saved_self * 1)
    return found


def use_what_is_free(stream, *shape):
    """Reuses and overwrites free memory. A tensor whose memory was freed too early changes."""
    with stream:
        kept = [torch.ones(*(shape or (8, 32)), device="late").mul_(3) for _ in range(8)]
    del kept


def ones_for(*outputs):
    """On the device; no stream has to wait for them."""
    ones = [torch.ones_like(y) for y in outputs]
    late.synchronize()
    return ones


# The order between streams


def test_reader_in_forward_waits_for_the_replay_in_backward(streams, x):
    with ebb.region():
        with streams[0]:
            h = x.sin()
        with late.behind(streams[1], streams[0]):
            second = h.sinh() * 1
        del h
    late.synchronize()

    found = saved_on((streams[0], second), (streams[1], second))
    assert_same(found, x.detach().cpu().sin())


def test_more_readers_than_have_bits_all_wait(device, x):
    streams = [torch.Stream(device=device) for _ in range(10)]
    with ebb.region():
        with streams[0]:
            h = x.sin()
        outputs = []
        for stream in streams:
            with late.behind(stream, streams[0]):
                outputs.append(h.cos() * 1)
        del h
    late.synchronize()

    found = saved_on(*zip(streams, outputs, strict=True))
    assert_same(found, x.detach().cpu().sin())


def test_more_makers_than_have_numbers(device, x):
    """A stream that asks for a value of one of the last makers waits for all of those."""
    elsewhere = [torch.Stream(device="late:1") for _ in range(24)]
    here = [torch.Stream(device=device) for _ in range(12)]
    other = x.detach().to("late:1")
    late.synchronize()
    with ebb.region():
        for stream in elsewhere:
            with stream:
                other.cos()
        outputs = []
        for stream in here:
            with stream:
                outputs.append(x.sin().cos() * 1)
    late.synchronize()
    found = []
    for maker, asker, y in zip(here, (*here[1:], here[0]), outputs, strict=True):
        found.append(saved_on((maker, y), (asker, y))[1])

    assert_same(found, x.detach().cpu().sin())


def test_tensor_without_a_gradient_is_unpacked_on_two_streams(streams, x):
    """Both unpack the same tensor; the second stream waits too."""
    with ebb.region():
        with streams[0]:
            with torch.no_grad():
                factor = (x * 2).sin()
            y = x * factor
            del factor
        with late.behind(streams[1], streams[0]):
            y.cos()
    late.synchronize()
    found = []
    for stream in streams[:2]:
        with stream:
            found.append(y.grad_fn._saved_other * 1)

    assert_same(found, (x.detach().cpu() * 2).sin())


def test_copy_for_recipes_was_made_on_another_stream(streams, x):
    """Backward may write to a tensor that the program holds, so recipes read a copy."""
    with ebb.region():
        with streams[0]:
            h = x.sin()
            first = h.cos() * 1
        with late.behind(streams[1], streams[0]):
            second = (h * 2).cos() * 1
    late.synchronize()
    saved, found = saved_on((streams[0], first), (streams[1], second))

    assert_same([saved], h.detach().cpu())
    assert_same([found], h.detach().cpu() * 2)


def test_copy_before_a_write_was_made_on_the_writers_stream(streams, x):
    """Recipes that read the copy run on another stream, which need not know of the write."""
    with torch.no_grad():
        term = torch.rand(8, 32).to(x.device)
    numbers = term.cpu()
    late.synchronize()
    with ebb.region():
        with streams[0]:
            y = (x + term).sin()  # saves the sum, not the term
        with late.behind(streams[1], streams[0]), torch.no_grad():
            term.zero_()
    ones = torch.ones_like(y)
    torch.accelerator.current_stream().synchronize()
    with streams[0]:
        found = torch.autograd.grad(y, x, ones)[0]

    assert_same([found], (x.detach().cpu() + numbers).cos())


@pytest.mark.parametrize("policy", [ebb.Policy(), SINES], ids=["recompute", "offload"])
def test_one_value_for_backward_on_two_streams(policy, streams, x):
    """The stream that comes first recomputes it, or brings it back."""
    streams[1].wait_stream(streams[0])
    with ebb.region(policy):
        with streams[0]:
            h = x.sin()
        streams[1].wait_stream(streams[0])
        with streams[0]:
            first = h.cos()
        with streams[1]:
            second = h.sinh()
        del h
    finish_copies()
    ones = ones_for(first, second)
    found = torch.autograd.grad([first, second], x, ones)[0]

    assert_gradient(found, lambda x: ((h := x.sin()).cos(), h.sinh()), x)


def test_value_with_several_storages(streams, device):
    """One storage is for a backward function, another for replays, on two streams."""
    x = leaf(device, 3, 4)

    def gradient(region):
        with region:
            h = x.sin()
            k = h.sin() * h
            shown = h.transpose(0, -1)
            streams[0].wait_stream(torch.accelerator.current_stream())
            for tensor in (x, h, k, shown):
                tensor.record_stream(streams[0])
            with streams[0]:
                y = shown.sin()
        with streams[0]:
            losses = [y.sum(), k.sum()]
            ones = [torch.ones_like(loss) for loss in losses]
            del h, k, shown, y, tensor
            found = torch.autograd.grad(losses, x, ones)[0]
        late.synchronize()
        return found.cpu()

    expected = gradient(torch.enable_grad())
    assert late.findings() == []
    assert torch.equal(gradient(ebb.region()), expected)


def test_small_state_is_copied_after_its_writer_on_another_stream(streams, x, device):
    """Two forwards update one small buffer before either backward."""
    state, factor = torch.ones(32).to(device), torch.rand(32).to(device)

    def forward(x, state, factor):
        with torch.no_grad():
            state.mul_(factor)
        return (x * (state + factor)).sin().exp()  # saves the sum, not the state

    torch.accelerator.synchronize()
    with ebb.region(), streams[0]:
        first = forward(x, state, factor)
    torch.accelerator.current_stream().synchronize()  # knows nothing of the other one
    with late.behind(streams[1], streams[0]), ebb.region():
        second = forward(x, state, factor)
    torch.accelerator.synchronize()
    with streams[0]:
        found = [torch.autograd.grad(y.sum(), x)[0] for y in (first, second)]

    state, factor = torch.ones(32), factor.cpu()
    for ours in found:
        assert_gradient(ours, lambda x: forward(x, state, factor), x)


# Tensors that the program holds


def test_restored_discarded_tensor_is_ready_on_all_streams(streams, x):
    """Readers outside of the region save its storage, so they never ask ebb, and do not wait for
    backward."""
    with ebb.region():
        with streams[0]:
            y = ebb.experimental.discardable(x.tanh())
        for stream in streams[1:3]:
            with late.behind(stream, streams[0]):
                (x * 2).cos()
    with streams[0]:
        h = y.sin()
    with late.behind(streams[1], streams[0]):
        z = h * 1
    ebb.experimental.discard(y, restore_at=z)
    late.synchronize()
    ones = ones_for(z)
    with streams[1]:
        torch.autograd.grad(z, h, ones, retain_graph=True)
    found = []
    for stream in (streams[0], streams[2]):
        with stream:
            found.append(y * 1)

    assert_same(found, x.detach().cpu().tanh())


def escape(x, streams, other=None):
    """An escape of which only its placeholder is left, and the output of its region.

    Both streams run ops in the region, and the stream of the device of `other`.
    """
    with ebb.region(escapes="placeholder"):
        with streams[0]:
            h = x.sin()
            escaped = h.detach()
            y = h.cos() * 1
            del h
        with late.behind(streams[1], streams[0]):
            escaped.cos()
        if other is not None:
            other.cos()
    late.synchronize()
    return escaped, y


def test_filled_escape_is_ready_on_all_streams(streams, x):
    """Also on those that no gradient passed through."""
    escaped, y = escape(x, streams)
    found = saved_on((streams[0], y))
    with streams[1]:
        found.append(escaped * 1)

    assert_same(found, x.detach().cpu().sin())


def test_streams_of_another_device_do_not_wait_for_a_filled_escape(streams, x):
    def waits(other):
        _escaped, y = escape(x, streams, other)
        torch.ops.late.counts()
        with streams[0]:
            _ = y.grad_fn.next_functions[0][0]._saved_self
        return torch.ops.late.counts().get("wait", 0)

    elsewhere = x.detach().to("late:1")
    late.synchronize()
    assert waits(elsewhere) == waits(x.detach().cpu())


def test_later_stream_waits_for_a_filled_escape(streams, x, device):
    """When the escape was filled, this stream did not exist."""
    with ebb.region(escapes="placeholder"), streams[0]:
        h = x.sin()
        escaped = h.detach()
        y = h.cos() * 1
        del h
    late.synchronize()
    found = saved_on((streams[1], y), (torch.Stream(device=device), y))

    assert_same([*found, escaped], x.detach().cpu().sin())


def test_record_stream_is_no_write(streams, x):
    """Though its schema says so."""
    ebb.reset_stats()
    with ebb.region():
        h = x.sin()
        y = h.exp()
        streams[0].wait_stream(torch.accelerator.current_stream())
        for tensor in (x, h, y):
            tensor.record_stream(streams[0])
        with streams[0]:
            loss = (y * h).sum()
    del h, y
    assert ebb.stats()["total"]["bytes_saved"] == 0
    torch.accelerator.current_stream().wait_stream(streams[0])
    found = torch.autograd.grad(loss, x)[0]

    assert_gradient(found, lambda x: (h := x.sin()).exp() * h, x)


# Reuse of freed memory


def test_memory_of_copied_state_is_free_when_its_stream_is_done(streams, x, device):
    """Not later: the stream knows nothing of the one that is current at the region's end."""
    ones, factor = torch.ones(32).to(device), torch.rand(32).to(device)
    torch.accelerator.synchronize()
    with streams[0]:
        state = ones * 1  # in memory of that stream
    torch.accelerator.synchronize()
    with ebb.region(), streams[0]:
        with torch.no_grad():
            state.mul_(factor)
        y = (x * (state + factor)).sin()  # saves the sum, not the state
    del state
    with streams[0]:
        torch.ones(16, device=device).mul_(3)
        found = gradient(y, x)

    assert_gradient(found, lambda x: (x * (factor.cpu() + factor.cpu())).sin(), x)


@pytest.mark.parametrize("keep_last", [0, 1])
@pytest.mark.parametrize("policy", [ebb.Policy(), SINES], ids=["recompute", "offload"])
def test_memory_is_freed_when_all_streams_have_read_it(policy, keep_last, streams, x):
    """Eager would free it after backward, which waits for what forward waited for."""
    ebb.config.update(offload_in_flight_bytes=0, offload_keep_last=keep_last)
    with ebb.region(policy):
        with streams[0]:
            h = x.sin()
        with late.behind(streams[1], streams[0]):
            y = h.cos()
            z = h.exp()  # reads it when it is leaving
        del h
        use_what_is_free(streams[0])
        streams[0].wait_stream(streams[1])
    with streams[1]:
        found = gradient([y, z], x)

    assert_gradient(found, lambda x: ((h := x.sin()).cos(), h.exp()), x)


def test_memory_is_freed_after_a_replay_has_read_it_on_another_stream(streams, x, device):
    with ebb.region():
        with streams[0], torch.no_grad():
            factor = torch.rand(8, 32).to(device).add_(1).sin_()
        with streams[0]:
            h = x * factor
        with late.behind(streams[1], streams[0]):
            y = h.exp().cos()
        del h
    torch.accelerator.synchronize()
    numbers = factor.cpu()
    del factor
    with streams[1]:
        found = torch.autograd.grad(y.sum(), x)[0]
    del y
    use_what_is_free(streams[0])

    assert_gradient(found, lambda x: (x * numbers).exp().cos(), x)


def test_memory_is_freed_after_a_custom_function_has_read_it_unseen(streams, x):
    """Eager holds the argument until backward; ebb sees it only when it is packed."""

    class Cosine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h):
            ctx.save_for_backward(h)
            with concurrent.futures.ThreadPoolExecutor(1) as other:  # there is no region
                return other.submit(compute, h.detach()).result()

        @staticmethod
        def backward(ctx, gradient):
            (h,) = ctx.saved_tensors
            return -gradient * h.sin()

    def compute(h):
        with streams[1], torch.no_grad():
            return h.cos()

    with ebb.region():
        with streams[0]:
            h = x.sin()
        with late.behind(streams[1], streams[0]):
            y = Cosine.apply(h)
        del h
        use_what_is_free(streams[0])
    streams[0].wait_stream(streams[1])
    with streams[1]:
        found = torch.autograd.grad(y.sum(), x)[0]

    assert_gradient(found, sine_and_cosine, x)


def test_replay_writes_to_a_copy_of_what_another_stream_made(streams, x):
    """The first stream may still read the bytes, although no handle needs them."""
    with ebb.region():
        with streams[0]:
            h = x.sin() * 2
            first = h.tanh() * 1  # a replay of tanh's result recomputes h, which mul_ overwrites
        with late.behind(streams[1], streams[0]):
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
    """In eager the memory is that stream's own, so the program calls no record_stream(). With ebb,
    it belongs to the stream on which backward ran."""
    with ebb.region(escapes="placeholder"):
        with streams[0]:
            h = x.sin()
            escaped = h.detach()
        with late.behind(streams[1], streams[0]):
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
