"""Values that a captured graph recomputes: their bytes are there once the graph is launched."""

from __future__ import annotations

import functools

import pytest
import torch

import ebb
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


def test_a_backward_that_only_a_capture_has_run(x, stream):
    """Eager's saved tensors would still be there."""
    with stream:
        loss = forward(x)
    captured(stream, functools.partial(gradient, loss, x))
    with stream, pytest.raises(RuntimeError, match=OUTSIDE):
        gradient(loss, x)


def test_what_a_replay_reads_is_of_a_capture(x, stream):
    with stream, ebb.region(ebb.policies.recompute_all):
        h = x.sin().exp()
        first, second = h.sin().sum(), h.cos().exp().sum()
    captured(stream, functools.partial(gradient, first, x))
    with stream, pytest.raises(RuntimeError, match=OUTSIDE):
        gradient(second, x)


def test_a_launch_of_a_captured_backward_is_right(x, stream):
    with stream:
        loss = forward(x)
    graph, result = captured(stream, lambda: [gradient(loss, x), gradient(loss, x)])
    graph.replay()
    assert all(torch.equal(found(g), expected(x)) for g in result)


def test_what_was_recomputed_before_the_capture_may_be_used_in_it(x, stream):
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
