"""OFFLOAD while a graph is captured: what is under way outside, and what nobody has asked for."""

from __future__ import annotations

import gc

import accelerator
import pytest
import torch
from captures import (
    SINES,
    assert_replays_are_right,
    assert_right,
    captured,
    forward,
    step,
    warm_up,
    warmed_up,
)
from device_leaves import leaf, needs_captures

import ebb

pytestmark = needs_captures


def test_statistics_in_a_capture(device, stream):
    x = warmed_up(device, stream)
    with accelerator.Graph().capture(stream) as graph:
        y = forward(x)
        assert ebb.stats()["offload"]["stashes"] == 4
        gradient = torch.autograd.grad(y, x)[0]
        assert ebb.stats()["offload"]["stashes"] == 0
    graph.replay()
    assert_right(gradient, x)


@pytest.mark.parametrize("static", [False, True])
def test_statistics_when_a_capture_has_just_begun(static, device, stream):
    """They are not asked for from copies that are under way outside."""
    ebb.offload.configure(static=static, in_flight_bytes=1 << 30)
    with stream:
        y = forward(leaf(device))
    with accelerator.Graph().capture(stream):
        assert ebb.stats()["offload"]["stashes"] == 4
    del y


@pytest.mark.parametrize("static", [False, True])
def test_what_dies_in_a_capture(static, device, stream):
    """As garbage may at any time. Its copies are under way outside; when the capture is over, its
    memory is free."""
    ebb.offload.configure(static=static, in_flight_bytes=1 << 30)
    x = leaf(device)
    before = torch.accelerator.memory_allocated(device)
    with stream:
        y = forward(x)
    accelerator.synchronize()
    with accelerator.Graph().capture(stream):
        del y
        gc.collect()
    with stream:
        ebb.stats()["offload"]

    assert torch.accelerator.memory_allocated(device) == before


def test_the_mode_may_change_in_a_capture(device, stream):
    """Nobody asks there for a copy that it has made."""
    x = warmed_up(device, stream)
    ebb.offload.configure(in_flight_bytes=1 << 30)
    with accelerator.Graph().capture(stream) as graph:
        y = forward(x)
        ebb.offload.configure(static=False)
        ebb.stats()["offload"]
        del y
        gc.collect()
        ebb.offload.configure(static=True)
        ebb.stats()["offload"]  # all has come back
    graph.replay()


def test_a_backward_that_retains_the_graph(device, stream):
    """What was needed while it left still is, when the capture ends."""
    ebb.offload.configure(in_flight_bytes=1 << 30)
    x = warmed_up(device, stream)
    with accelerator.Graph().capture(stream) as graph:
        y = forward(x)
        gradient = torch.autograd.grad(y, x, retain_graph=True)[0]

    assert_replays_are_right(graph, gradient, x)
    del y


def test_what_a_capture_has_left_does_not_go_to_disk(tmp_path, device, stream):
    """Nobody may ask whether its copy is done."""
    ebb.offload.configure(in_flight_bytes=0)
    x = warmed_up(device, stream)
    with accelerator.Graph().capture(stream):
        left = forward(x)
    ebb.offload.configure(static=False, disk=tmp_path, pinned_limit=4 * x.nbytes)
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
def test_what_is_never_fetched_before_a_capture(before, in_flight, device, stream):
    """On the stream that will be captured, which may not wait for it then."""
    ebb.offload.configure(in_flight_bytes=in_flight)
    x = warmed_up(device, stream)
    with stream:
        before(x)
    accelerator.synchronize()

    assert_replays_are_right(*captured(x, stream), x)


@pytest.mark.parametrize("prefetch", [0, 1 << 30])
@pytest.mark.parametrize("keep_last", [0, 1])
def test_a_forward_before_a_capture_whose_backward_comes_after(keep_last, prefetch, device, stream):
    """It is not fetched ahead in the capture; before, it may be."""
    ebb.offload.configure(keep_last=keep_last, in_flight_bytes=0, prefetch_bytes=prefetch)
    x, other = leaf(device), leaf(device)
    warm_up(x, stream)
    with stream:
        y = forward(other)
        warm_up(x, stream)
    accelerator.synchronize()
    ebb.offload.configure(prefetch_bytes=1 << 30)
    graph, gradient = captured(x, stream)
    with stream:
        of_other = torch.autograd.grad(y, other)[0]
    accelerator.synchronize()

    assert_replays_are_right(graph, gradient, x)
    assert_right(of_other, other)
