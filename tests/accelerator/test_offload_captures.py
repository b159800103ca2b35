"""OFFLOAD in CUDA graphs and beside them: captures, replays, and copies that run meanwhile."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch

import ebb
from ebb import _testing
from ebb_tests import device as late
from ebb_tests.device_leaves import assert_gradient, leaf, needs_captures
from ebb_tests.programs.captured_offload import (
    SINES,
    assert_replays_are_right,
    assert_right,
    captured,
    chain,
    change,
    forward,
    step,
    warm_up,
    warmed_up,
)
from ebb_tests.programs.offloaded import sine_and_cosine

pytestmark = needs_captures


@pytest.fixture
def x(device, stream):
    return warmed_up(device, stream)


@contextlib.contextmanager
def capture_that_raises(stream, message):
    with pytest.raises(RuntimeError, match=message), late.Graph().capture(stream):
        yield


def room_for_two_steps(x, y, stream):
    """As much host memory as two steps need."""
    with stream:
        both = forward(x), forward(y)
        torch.autograd.grad(both[1], y)
        torch.autograd.grad(both[0], x)


@pytest.mark.parametrize("keep_last", [0, 2])
@pytest.mark.parametrize("prefetch", [0, 1 << 30])
@pytest.mark.parametrize("in_flight", [0, 1 << 11, 1 << 30])
def test_replays_have_eagers_gradients(in_flight, prefetch, keep_last, device, stream):
    ebb.config.update(
        offload_in_flight_bytes=in_flight,
        offload_prefetch_bytes=prefetch,
        offload_keep_last=keep_last,
    )
    x = warmed_up(device, stream)
    torch.ops.late.counts()
    graph, gradient = captured(x, stream)
    counts = torch.ops.late.counts()

    assert_replays_are_right(graph, gradient, x, times=3)
    assert counts.get("query", 0) == 0


def test_several_steps_in_one_capture_use_the_same_host_memory(x, stream):
    held = ebb.stats()["offload"]["host_bytes_held"]
    with late.Graph().capture(stream) as graph:
        gradients = [step(x) for _ in range(3)]
    change(x)
    graph.replay()

    for gradient in gradients:
        assert_right(gradient, x)
    assert ebb.stats()["offload"]["host_bytes_held"] == held


@pytest.mark.parametrize("count", [1, 3])  # three need more host memory than a step has left
def test_an_eager_step_between_replays_keeps_its_bytes(count, x, device, stream):
    other = leaf(device)
    graph, gradient = captured(x, stream)
    for _ in range(2):
        assert_replays_are_right(graph, gradient, x)
        kept = [forward(other) for _ in range(count)]
        late.synchronize()
        graph.replay_and_wait()  # copies to the memory that it was captured with
        for y in kept:
            assert_right(torch.autograd.grad(y, other)[0], other)
        assert_right(gradient, x)


@pytest.mark.parametrize(("between", "times"), [(True, 3), (False, 1)], ids=["steps", "nothing"])
def test_two_graphs_on_two_streams(between, times, device, stream):
    """Two captures are told apart, also if nothing is asked of ebb between them."""
    second = torch.Stream(device=device)
    x, y = leaf(device), leaf(device)
    if between:
        warm_up(x, stream)
        late.synchronize()
    else:
        room_for_two_steps(x, y, stream)
    of_x, gradient_of_x = captured(x, stream)
    if between:
        warm_up(y, second)
    of_y, gradient_of_y = captured(y, second)
    for _ in range(times):
        with stream:
            of_x.replay()
        with second:
            of_y.replay()

    assert_right(gradient_of_x, x)
    assert_right(gradient_of_y, y)


def test_host_memory_of_a_graph_is_never_freed(x, device, stream):
    graph, gradient = captured(x, stream)
    ebb.config.offload.pinned_limit = 1 << 20
    large = leaf(device, 8, 4000)
    for _ in range(2):
        step(large)  # finds no room
    _testing.drain_offload()

    assert_replays_are_right(graph, gradient, x)


def test_capture_without_a_step_before_it_raises(device, stream):
    x = leaf(device)
    with pytest.raises(RuntimeError, match="Run a few steps, forward and backward"):
        captured(x, stream)

    warm_up(x, stream)
    assert_replays_are_right(*captured(x, stream), x)


def test_values_above_the_pinned_limit_are_recomputed_in_a_capture(device, stream):
    x = leaf(device)
    ebb.config.offload.pinned_limit = 2 * x.nbytes
    warm_up(x, stream)

    assert_replays_are_right(*captured(x, stream), x)


def test_backward_in_a_capture_of_an_earlier_forward_raises(x, stream):
    ebb.config.offload.in_flight_bytes = 0
    with stream:
        y = forward(x)
    late.synchronize()
    with capture_that_raises(stream, "offloaded before this CUDA graph capture"):
        torch.autograd.grad(y, x)
    with stream:
        found = torch.autograd.grad(y, x)[0]  # and outside of it it can

    assert_right(found, x)


def test_write_in_a_capture_to_a_tensor_that_is_leaving_raises(x, stream):
    with stream, ebb.region(SINES):
        h, y = sine_and_cosine(x)
        late.synchronize()
        message = "offloaded before this CUDA graph capture"
        with capture_that_raises(stream, message), torch.no_grad():
            h.zero_()
    del y, h


@pytest.mark.parametrize("keep_last", [0, 1])
def test_backward_outside_of_a_failed_capture_raises_and_the_next_capture_succeeds(
    keep_last, device, stream
):
    ebb.config.offload.keep_last = keep_last
    x = warmed_up(device, stream)
    left = []

    def fail():
        left.append(forward(x))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), late.Graph().capture(stream):
        fail()
    with pytest.raises(RuntimeError, match="needed outside of it"):
        torch.autograd.grad(left[0], x)
    assert_right(step(x), x)
    left.clear()
    assert_right(step(x), x)
    assert ebb.stats()["offload"]["stashes"] == 0

    warm_up(x, stream)
    assert_replays_are_right(*captured(x, stream), x)


def test_forward_and_backward_in_two_captures_raise(x, stream):
    left = []
    with capture_that_raises(stream, "did not wait for"):
        left.append(forward(x))
    with capture_that_raises(stream, "Capture forward and backward together"):
        torch.autograd.grad(left[0], x)
    left.clear()

    assert_right(step(x), x)


def test_step_beside_a_capture_offloads_nothing(x, device, stream):
    other, beside = leaf(device), torch.Stream(device=device)
    with late.Graph().capture(stream) as graph:
        y = forward(x)
        with beside:
            of_other = forward(other)
        gradient = torch.autograd.grad(y, x)[0]
    with beside:
        found = torch.autograd.grad(of_other, other)[0]
    late.synchronize()

    assert_replays_are_right(graph, gradient, x)
    assert_right(found, other)


def test_host_memory_that_a_capture_never_fetched_stays_the_graphs(device, stream):
    """The graph still copies to it."""
    ebb.config.offload.in_flight_bytes = 0
    second = torch.Stream(device=device)
    x, y = leaf(device), leaf(device)
    room_for_two_steps(x, y, stream)
    with late.Graph().capture(stream) as first:
        left = forward(x)
    del left
    gc.collect()
    of_y, gradient_of_y = captured(y, second)
    with stream:
        first.replay()
    with second:
        of_y.replay()

    assert_right(gradient_of_y, y)


def leave_under_way(x):
    """The last write waits for all copies, and none of the three is taken note of."""
    with ebb.region(SINES):
        kept, dropped, written = ((x * factor).sin() for factor in (1, 2, 3))
        y = kept.cos()
        dropped.cos()
        written.cos()
        with torch.no_grad():
            written.zero_()
    return y


def leave_held(x):
    """Its copy was waited for, and its memory is held until that is done."""
    with ebb.region(SINES):
        h = x.sin()
        h.cos()
        y = (x * 2).sin().cos()
        with torch.no_grad():
            h.zero_()
    return y


@pytest.mark.parametrize("leave", [leave_under_way, leave_held])
def test_host_memory_in_use_when_a_capture_ends_stays_the_graphs(leave, device, stream):
    ebb.config.offload.keep_last = 1 if leave is leave_held else 0
    x = warmed_up(device, stream)
    with late.Graph().capture(stream) as graph:
        left = leave(x)
    ebb.stats()["offload"]  # sees that it is over
    graph.replay_and_wait()
    del left


# Copies in progress before a capture, and tensors that no backward unpacks


def test_statistics_in_a_capture(x, stream):
    with late.Graph().capture(stream) as graph:
        y = forward(x)
        assert ebb.stats()["offload"]["stashes"] == 4
        gradient = torch.autograd.grad(y, x)[0]
        assert ebb.stats()["offload"]["stashes"] == 0
    graph.replay()
    assert_right(gradient, x)


def test_statistics_at_the_start_of_a_capture_do_not_wait_for_copies_outside(device, stream):
    ebb.config.offload.in_flight_bytes = 1 << 30
    beside = torch.Stream(device=device)
    with stream:
        y = forward(leaf(device))
    with late.Graph().capture(stream):
        with beside:  # which is not captured, so nothing of the capture is noticed
            del y
            gc.collect()
        assert ebb.stats()["offload"]["stashes"] == 0


def test_memory_of_a_graph_dropped_in_a_capture_is_freed_after_it(device, stream):
    """Garbage may be collected at any time. Its copies run outside of the capture."""
    ebb.config.offload.in_flight_bytes = 1 << 30
    x = leaf(device)
    before = torch.accelerator.memory_allocated(device)
    with stream:
        y = forward(x)
    late.synchronize()
    with late.Graph().capture(stream):
        del y
        gc.collect()
    with stream:
        ebb.stats()["offload"]

    assert torch.accelerator.memory_allocated(device) == before


def test_region_that_ends_in_a_capture_does_not_wait_for_copies_outside(x, stream):
    with stream, contextlib.ExitStack() as open_region:
        first = forward(x)
        open_region.enter_context(ebb.region(SINES))
        second = x.sin().cos()
        with late.Graph().capture(stream):
            open_region.close()
    with stream:
        found = torch.autograd.grad(second.sum() + first, x)[0]

    assert_gradient(found, lambda x: chain(x) + x.sin().cos().sum(), x)


def test_backward_with_a_retained_graph_in_a_capture(device, stream):
    """Tensors that are still needed are copied out when the capture ends."""
    ebb.config.offload.in_flight_bytes = 1 << 30
    x = warmed_up(device, stream)
    with late.Graph().capture(stream) as graph:
        y = forward(x)
        gradient = torch.autograd.grad(y, x, retain_graph=True)[0]

    assert_replays_are_right(graph, gradient, x)
    del y


def test_host_memory_of_a_capture_does_not_go_to_disk(tmp_path, device, stream):
    """Nobody may ask whether its copy is done."""
    ebb.config.offload.in_flight_bytes = 0
    x = warmed_up(device, stream)
    with late.Graph().capture(stream):
        left = forward(x)
    ebb.config.update(offload_disk=tmp_path, offload_pinned_limit=4 * x.nbytes)
    assert_right(step(x), x)
    del left


def forward_only(x):
    forward(x)


def forward_twice(x):
    first = forward(x)
    second = forward(x)
    del first, second


def backward_of_a_part(x):
    h = x.sin() * 2
    with ebb.region(SINES):
        a, b = h.sin().cos(), h.sin().sin().cos()
        y = a.sum() + b.sum()
    torch.autograd.grad(y, a)


@pytest.mark.parametrize("in_flight", [0, 1 << 30])
@pytest.mark.parametrize("before", [forward_only, forward_twice, backward_of_a_part])
def test_copies_never_fetched_before_a_capture_do_not_break_it(before, in_flight, device, stream):
    """They run on the stream that will be captured, which may not wait for them then."""
    ebb.config.offload.in_flight_bytes = in_flight
    x = warmed_up(device, stream)
    with stream:
        before(x)
    late.synchronize()

    assert_replays_are_right(*captured(x, stream), x)


@pytest.mark.parametrize("prefetch", [0, 1 << 30])
@pytest.mark.parametrize("keep_last", [0, 1])
def test_backward_after_a_capture_of_a_forward_before_it(keep_last, prefetch, device, stream):
    """The capture does not fetch it ahead; a backward before the capture may."""
    ebb.config.update(
        offload_keep_last=keep_last, offload_in_flight_bytes=0, offload_prefetch_bytes=prefetch
    )
    x, other = leaf(device), leaf(device)
    warm_up(x, stream)
    with stream:
        y = forward(other)
        warm_up(x, stream)
    late.synchronize()
    ebb.config.offload.prefetch_bytes = 1 << 30
    graph, gradient = captured(x, stream)
    with stream:
        of_other = torch.autograd.grad(y, other)[0]
    late.synchronize()

    assert_replays_are_right(graph, gradient, x)
    assert_right(of_other, other)
