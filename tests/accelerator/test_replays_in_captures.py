"""Captures that recompute, and steps beside them.

Values that a captured graph recomputes have their bytes once the graph is launched.
"""

from __future__ import annotations

import functools
import gc
import threading

import pytest
import torch

import ebb
from ebb import _testing
from ebb_tests import device as late
from ebb_tests.device_leaves import leaf, needs_captures

pytestmark = needs_captures
OUTSIDE = r"aten::\w+.* recomputed inside a CUDA graph capture .* decision SAVE"


def chain(x):
    return x.sin().exp().sin().exp().sum()


def forward(x, policy=ebb.policies.recompute_all):
    with ebb.region(policy):
        return chain(x)


def gradient(loss, x, retain=True):
    return torch.autograd.grad(loss, x, retain_graph=retain)[0]


def expected(x):
    return gradient(chain(x), x).cpu()


@pytest.fixture
def x(device, stream):
    x = leaf(device)
    late.synchronize()
    with stream:
        gradient(forward(x), x)
    late.synchronize()
    return x


def captured(stream, function):
    late.synchronize()
    with late.Graph().capture(stream) as graph:
        result = function()
    return graph, result


def found(gradient):
    late.synchronize()
    return gradient.cpu()


def assert_launch_and_backward_are_right(graph, result, loss, x, stream):
    """`result`: the gradient that the graph writes. The backward runs after the launch."""
    graph.replay()
    assert torch.equal(found(result), expected(x))
    with stream:
        again = gradient(loss, x)
    assert torch.equal(found(again), expected(x))


def test_backward_that_only_a_capture_has_run_raises_outside(x, stream):
    """Eager's saved tensors would still be there."""
    with stream:
        loss = forward(x)
    captured(stream, functools.partial(gradient, loss, x))
    with stream, pytest.raises(RuntimeError, match=OUTSIDE):
        gradient(loss, x)


def test_replay_outside_that_reads_a_value_of_a_capture_raises(x, stream):
    with stream, ebb.region(ebb.policies.recompute_all):
        h = x.sin().exp()
        first, second = h.sin().sum(), h.cos().exp().sum()
    captured(stream, functools.partial(gradient, first, x))
    with stream, pytest.raises(RuntimeError, match=OUTSIDE):
        gradient(second, x)


def test_captured_backwards_have_eagers_gradients(x, stream):
    with stream:
        loss = forward(x)
    graph, result = captured(stream, lambda: [gradient(loss, x), gradient(loss, x)])
    graph.replay()
    assert all(torch.equal(found(g), expected(x)) for g in result)


def test_value_recomputed_before_a_capture_is_used_in_it(x, stream):
    with stream:
        loss = forward(x)
        gradient(loss, x)
    graph, result = captured(stream, functools.partial(gradient, loss, x))
    assert_launch_and_backward_are_right(graph, result, loss, x, stream)


@pytest.mark.parametrize("ahead", [0, 2])
def test_backwards_of_two_launches_of_a_captured_forward(x, stream, ahead):
    """The second must not show what was recomputed after the first launch."""
    ebb.config.ahead.regions = ahead
    graph, loss = captured(stream, functools.partial(forward, x))

    def launch_and_backward():
        late.synchronize()
        graph.replay()
        late.synchronize()
        with stream:
            return gradient(loss, x)

    assert torch.equal(found(launch_and_backward()), expected(x))
    x.data.copy_(x.detach().cpu() * 0.5)  # eager raises if the version moves
    if ahead == 0:
        with pytest.raises(
            RuntimeError, match="by an earlier backward of a region that was captured"
        ):
            launch_and_backward()
    else:  # what was held for backward is the graph's own memory
        assert torch.equal(found(launch_and_backward()), expected(x))


def test_a_step_that_is_captured_whole_may_run_backward_again(x, stream):
    graph, (loss, result) = captured(stream, lambda: [loss := forward(x), gradient(loss, x)])
    assert_launch_and_backward_are_right(graph, result, loss, x, stream)


def test_saved_values_may_be_used_everywhere(x, stream):
    with stream:
        loss = forward(x, ebb.policies.save_all)
    captured(stream, functools.partial(gradient, loss, x))
    with stream:
        result = gradient(loss, x)
    assert torch.equal(found(result), expected(x))


def test_a_placeholder_is_not_restored_by_a_capture(x, stream):
    """Its holder may read it before a launch."""
    with (
        stream,
        ebb.region(ebb.policies.recompute_all, escapes="placeholder") as region,
    ):
        h = x.sin()
        loss = chain(h)
        region.returns(loss)
    captured(stream, functools.partial(gradient, loss, x))
    with stream, pytest.raises(RuntimeError, match=r"aten::sin.*another CUDA graph capture"):
        h.cpu()


def test_a_discarded_tensor_is_not_restored_by_a_capture(x, stream):
    with stream:
        with ebb.region(ebb.policies.recompute_all):
            y = ebb.experimental.discardable(x.sin())
        z = y.exp()
        ebb.experimental.discard(y, restore_at=z)
        loss = z.sum()
    with pytest.raises(RuntimeError, match=r"aten::sin.*another CUDA graph capture"):
        captured(stream, functools.partial(gradient, loss, x))


# Steps of another thread on another stream. A capture forbids queries and waits on all threads: see
# Note [Captures of other threads]

POLICIES = {
    "recompute": ebb.policies.recompute_all,
    "offload": ebb.Policy(default=ebb.OFFLOAD, inputs=ebb.OFFLOAD),
}


def step_on(x, policy, stream):
    with stream:
        with ebb.region(policy):
            loss = (x * 2).sin().cos().sum()
        return torch.autograd.grad(loss, x)[0]


def dropped(x, policy, stream):
    """A step without a backward: what was offloaded dies."""
    with stream, ebb.region(policy):
        (x * 2).sin().cos().sum()
    gc.collect()
    return step_on(x, policy, stream)


@pytest.mark.parametrize("in_flight", [0, 1 << 30])
@pytest.mark.parametrize("program", [step_on, dropped])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_step_on_another_thread_and_capture_both_succeed(
    policy, program, in_flight, device, streams
):
    _testing.drain_offload()
    ebb.config.update(offload_min_bytes=1, offload_in_flight_bytes=in_flight)
    x, z = leaf(device), torch.rand(8).to(device)
    late.synchronize()
    eager = step_on(x, ebb.policies.save_all, streams[1])
    program(x, policy, streams[1])
    late.synchronize()

    with late.Graph().capture(streams[0]) as graph:
        tripled = z * 3
        gradients = []
        thread = threading.Thread(target=lambda: gradients.append(program(x, policy, streams[1])))
        thread.start()
        thread.join()
        tripled = tripled + 1
    graph.replay_and_wait()

    assert torch.equal(gradients[0].cpu(), eager.cpu())
    assert torch.equal(tripled.cpu(), z.cpu() * 3 + 1)
