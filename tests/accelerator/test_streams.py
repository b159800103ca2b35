"""OFFLOAD on a device whose streams run as late as they may."""

from __future__ import annotations

import concurrent.futures

import pytest
import torch

import ebb
from ebb_tests import device as late
from ebb_tests.device_leaves import assert_gradient, finish_copies, gradient, leaf

SINES = ebb.Policy({"aten::sin": ebb.OFFLOAD})
EVERYTHING = ebb.Policy({"*": ebb.OFFLOAD}, inputs=ebb.OFFLOAD)


pytestmark = pytest.mark.usefixtures("x")


def sine_and_cosine(x):
    return x.sin().cos()


def ones_for(*outputs):
    """On the device; no stream has to wait for them."""
    ones = [torch.ones_like(y) for y in outputs]
    torch.accelerator.synchronize()
    return ones


@pytest.mark.parametrize("in_flight", [0, 1 << 30])
def test_a_kept_tensor_leaves_behind_the_stream_on_which_it_was_packed(
    in_flight, streams, x, device
):
    ebb.config.update(offload_keep_last=1, offload_in_flight_bytes=in_flight)
    y = leaf(device)
    with streams[0], ebb.region(SINES):
        first = sine_and_cosine(x)  # the sine is kept: it is the last one
    with streams[1], ebb.region(SINES):
        second = sine_and_cosine(y)  # now it leaves
    finish_copies()
    with streams[0]:
        of_x = torch.autograd.grad(first.sum(), x)[0]
    with streams[1]:
        of_y = torch.autograd.grad(second.sum(), y)[0]

    assert_gradient(of_x, sine_and_cosine, x)
    assert_gradient(of_y, sine_and_cosine, y)


@pytest.mark.parametrize("at_once", [False, True], ids=["later", "at once"])
@pytest.mark.parametrize("keep_last", [0, 1])
def test_a_write_on_another_stream_comes_after_the_copy(keep_last, at_once, streams, x):
    """And the copy back after it, on a stream that knows nothing of the write."""
    ebb.config.offload.keep_last = keep_last
    with ebb.region(SINES):
        with streams[0]:
            h = x.sin()
            h.cos()  # saves h
            y = h.exp().cos()
        with late.behind(streams[1], streams[0]), torch.no_grad():
            h.zero_()
    if not at_once:
        torch.accelerator.synchronize()
    with streams[0]:
        found = torch.autograd.grad(y.sum(), x)[0]

    assert_gradient(found, lambda x: x.sin().exp().cos(), x)


@pytest.mark.parametrize("in_flight", [0, 1 << 30])
def test_what_leaves_when_the_region_ends_was_made_on_another_stream(in_flight, streams, x):
    """ebb sends a value that only recipes read at the region's end. The stream that is current then
    has not waited for the stream that made the value."""
    ebb.config.offload.in_flight_bytes = in_flight

    def program(x):
        h = x.sin()
        return h.exp().cos()  # no numbers: for those the device would wait

    with ebb.region(SINES), streams[0]:
        y = program(x)
    finish_copies()
    with streams[0]:
        found = torch.autograd.grad(y.sum(), x)[0]

    assert_gradient(found, program, x)


def test_state_that_is_copied_when_the_region_ends_was_written_on_another_stream(
    streams, x, device
):
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


def test_state_that_was_copied_when_the_region_ended_goes(streams, x, device):
    """Its stream may use its memory again, and knows nothing of the one that is current then."""
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


@pytest.mark.parametrize("keep_last", [0, 2])
@pytest.mark.parametrize("policy", [SINES, EVERYTHING], ids=["sines", "everything"])
def test_forward_and_backward_on_two_streams_in_turn(policy, keep_last, streams, device):
    ebb.config.offload.keep_last = keep_last
    inputs = [leaf(device) for _ in range(6)]
    outputs = []
    for number, x in enumerate(inputs):
        with streams[number % 2], ebb.region(policy):
            outputs.append(sine_and_cosine(x))
    finish_copies()
    for number, (x, y) in reversed(list(enumerate(zip(inputs, outputs, strict=True)))):
        with streams[number % 2]:
            found = torch.autograd.grad(y.sum(), x)[0]
        assert_gradient(found, sine_and_cosine, x)


@pytest.mark.parametrize("keep_last", [0, 1])
def test_memory_of_one_stream_that_leaves_from_another(keep_last, streams, x, device):
    ebb.config.update(offload_in_flight_bytes=0, offload_keep_last=keep_last)
    with ebb.region(SINES):
        with streams[0]:
            h = x.sin()
        with late.behind(streams[1], streams[0]):
            y = h.cos()
            z = h.exp()  # reads it when it is leaving
        del h  # eager would hold it until backward
        with streams[0]:
            torch.ones(8, 32, device=device).mul_(3)  # perhaps in the same memory
        streams[0].wait_stream(streams[1])
    with streams[1]:
        found = gradient([y, z], x)

    assert_gradient(found, lambda x: ((h := x.sin()).cos(), h.exp()), x)


def test_what_is_recomputed_goes_when_all_streams_have_read_it(streams, x, device):
    """Eager's saved tensors live until backward, which waits for what forward waited for."""
    with ebb.region():
        with streams[0]:
            h = x.sin()
        with late.behind(streams[1], streams[0]):
            y = h.cos()
        del h
        with streams[0]:
            torch.ones(8, 32, device=device).mul_(3)
        streams[0].wait_stream(streams[1])
    with streams[1]:
        found = torch.autograd.grad(y.sum(), x)[0]

    assert_gradient(found, sine_and_cosine, x)


@pytest.mark.parametrize("policy", [ebb.Policy(), SINES], ids=["recompute", "offload"])
def test_one_value_for_backward_on_two_streams(policy, streams, x):
    """Made again, or brought back, on the one that comes first."""
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


def test_what_a_replay_reads_on_another_stream_is_freed_after_it(streams, x, device):
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
    with streams[0]:
        torch.ones(8, 32, device=device).mul_(3)

    assert_gradient(found, lambda x: (x * numbers).exp().cos(), x)


def test_an_inplace_op_replayed_on_another_stream(streams, x):
    """A replay writes where nobody else reads: a copy, if streams are several."""
    with ebb.region():
        with streams[0]:
            h = x.sin()
            first = h.exp()  # saves its result
            h = h * 2
        with late.behind(streams[1], streams[0]):
            h.mul_(3).add_(1)
            second = h.cos()
        del h
    ones = ones_for(first, second)
    found = torch.autograd.grad([first, second], x, ones)[0]

    assert_gradient(found, lambda x: ((h := x.sin()).exp(), ((h * 2) * 3 + 1).cos()), x)


def test_an_escape_is_filled_for_all_streams(streams, x):
    kept = []
    with ebb.region(escapes="placeholder"):
        with streams[0]:
            h = x.sin()
            kept.append(h.detach())
            first = h.exp().cos()
        with late.behind(streams[1], streams[0]):
            second = (h * 2).cos()
        del h
    ones = ones_for(first, second)
    found = torch.autograd.grad([first, second], x, ones)[0]
    with streams[0]:
        read = kept[0] * 1

    assert_gradient(found, lambda x: ((h := x.sin()).exp().cos(), (h * 2).cos()), x)
    assert torch.equal(read.cpu(), x.detach().cpu().sin())


@pytest.mark.parametrize("in_flight", [0, 1 << 30])
def test_two_devices_in_turn(in_flight):
    """Host memory that one has given back is not free for the other's copies."""
    ebb.config.offload.in_flight_bytes = in_flight
    inputs = [leaf(f"late:{i}") for i in range(2)]

    def program(x):
        return x.sin().cos().sin().cos()

    for _ in range(3):
        for x in inputs:
            torch.accelerator.set_device_index(x.device.index)
            with ebb.region(SINES):
                y = program(x)
            x.found = gradient(y, x)
    torch.accelerator.set_device_index(0)
    late.synchronize()
    for x in inputs:
        assert_gradient(x.found, program, x)


def test_what_a_function_of_the_users_reads_unseen(streams, x, device):
    """It saves its argument, which eager holds until backward; ebb sees that only when it packs."""

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
        with streams[0]:
            torch.ones(8, 32, device=device).mul_(3)
    streams[0].wait_stream(streams[1])
    with streams[1]:
        found = torch.autograd.grad(y.sum(), x)[0]

    assert_gradient(found, sine_and_cosine, x)


def test_record_stream_is_no_write(streams, x):
    """Its schema says so; it tells the allocator something."""
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


def test_a_value_with_several_storages(streams, device):
    """One came back for a backward function, another is for replays, on two streams."""
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
