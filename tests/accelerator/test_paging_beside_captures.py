"""PAGE around graphs: what is alive when a capture begins, what others do meanwhile, and pools that
a graph has."""

from __future__ import annotations

import pytest
import torch

import ebb
from ebb_tests import device as late
from ebb_tests.device_leaves import needs_captures
from ebb_tests.programs.captured_paging import Bracketed, Step, trained, two_trained
from ebb_tests.programs.paged import Keep, is_right, page_and_bring_back, paged

pytestmark = [pytest.mark.usefixtures("fresh_pages"), needs_captures]


# What a capture begins with


def test_a_captured_step_in_which_nothing_is_paged(device):
    """Its one layer stays, so the lane takes no part."""
    step = trained(device, Bracketed, layers=1)
    graph = step.capture()
    step.check(graph.replay, [30, 3, 0])


def test_a_capture_right_after_the_step_that_was_recorded(device):
    """No kernel is launched there for the first time: CUDA would have to load it."""
    step = Step(device)
    step.warm(times=1)
    graph = step.capture()
    step.check(graph.replay, [30, 3, 0])


def test_pools_that_go_while_a_graph_is_captured(device):
    """Nobody may wait then; and nobody need: the device was waited for before."""
    ebb.config.paging.headroom = 3.0
    step = trained(device)
    with step.stream:
        kept, other = (step.forward() for _ in range(2))
        ebb.experimental.paging.reset()
        torch.autograd.grad(other, step.net.weights)
    with step.capturing() as graph:
        torch.ops.late.counts()
        del kept  # and with it the pools
        assert "synchronize" not in torch.ops.late.counts()
        found = step.x * 2
    graph.replay_and_wait()
    assert torch.equal(found.cpu(), (step.x * 2).cpu())


def test_a_recorded_step_that_is_over_when_a_capture_has_begun(device):
    """Pools are made when the capture is over."""
    step = Step(device)
    with step.stream:
        loss = step.forward()
    late.synchronize()
    with step.capturing():
        del loss
        with ebb.experimental.paging.step(False):
            assert ebb.stats()["paging"]["pools"] == []
    for _ in range(2):
        ebb.experimental.paging.run_step(step.run)
        assert step.is_right()
    assert ebb.stats()["paging"]["pools"] != []
    assert ebb.experimental.paging.step_ok()


def test_what_another_stream_brought_back_is_asked_for_again_in_a_capture(device):
    """The first time, the step could not end. All streams were waited for before the capture."""
    step, stream = Step(device), torch.Stream(device=device)
    late.synchronize()
    with stream:
        ctx = paged(step.x, step.n)[0][0]
        torch.ops.late.fail_page_kernel(0)
        with pytest.raises(RuntimeError, match="page kernel: too large"):
            ctx.saved_tensors  # noqa: B018
        torch.ops.late.fail_page_kernel(-1)
    with step.capturing() as graph:
        found = ctx.saved_tensors[0] * 1
    graph.replay_and_wait()
    assert is_right(found, step.x, 1)


def test_a_step_that_is_to_be_recorded_begins_in_no_capture(device):
    """It says so before anything of it has happened."""
    step = trained(device, live=10)
    late.synchronize()
    step.set(40)
    step.run()
    assert not ebb.experimental.paging.step_ok()
    late.synchronize()
    pools = ebb.stats()["paging"]["pools"]
    with pytest.raises(RuntimeError, match="sizes the page pools cannot begin"):
        step.capture()
    assert ebb.stats()["paging"]["pools"] == pools
    step.run()
    step.assert_right()


def test_flags_that_nobody_has_read_before_a_capture(device):
    """They are read after it."""
    step, other = two_trained(device)
    other.set(40)
    late.synchronize()
    with other.stream:
        kept = paged(other.x, other.n, "abcdefgh")
        dropped = paged(step.x, step.n)
        while kept:
            assert kept.pop()[0].saved_tensors
        Keep.last = None
    del dropped  # so the step is over, and what is to be known of it is not on its way
    step.capture()
    late.synchronize()
    assert not ebb.experimental.paging.step_ok()


# What others do meanwhile


def test_another_stream_pages_while_a_graph_is_captured(device):
    """Its memory is its own until it has waited, whatever is let go for the graph."""
    ebb.config.paging.headroom = 4.0
    step, stream = trained(device), torch.Stream(device=device)
    x = step.net.inputs(3)
    for _ in range(2):
        page_and_bring_back(x, step.n)
    late.synchronize()
    with step.capturing():
        with stream:
            kept = paged(x, step.n)
        loss = step.forward()
        del loss
        with stream:
            scratch = [torch.zeros_like(x) for _ in range(4)]
    with step.stream:
        more = paged(x, step.n)  # the end of the capture is noticed
    with stream:
        scratch += [torch.zeros_like(x) for _ in range(4)]
        found = kept[0][0].saved_tensors[0].clone()
    late.synchronize()
    assert is_right(found, x, 1)
    assert not any(tensor.any() for tensor in scratch)
    assert more is not None


def test_what_a_capture_that_failed_has_paged_is_dropped_without_asking(device):
    """Nothing of it has happened, so nobody waits: for what else is on its way neither."""
    (step, other), kept = two_trained(device, live=30), []
    with pytest.raises(KeyError):
        step.capture_forward(kept)
    with step.stream:
        ours = paged(other.x, step.n)
    torch.ops.late.counts()
    kept.clear()
    counts = torch.ops.late.counts()
    assert counts.get("record", 0) == counts.get("wait", 0) == 0
    late.synchronize()
    assert ours is not None


# Pools that a graph has


def test_a_captured_step_waits_no_more_than_an_eager_one(device):
    """Within a graph nothing else uses its pools."""
    step = trained(device)
    torch.ops.late.drop_wait(-1)
    with step.stream:
        step.run()
    eager = torch.ops.late.drop_wait(-1)
    step.capture()
    assert torch.ops.late.drop_wait(-1) <= eager


def larger_pools(step):
    """For more rows than there were; what has taken the memory of those that have gone."""
    step.set(40)
    step.run()
    assert not ebb.experimental.paging.step_ok()
    for _ in range(2):
        step.run()
        step.assert_right()
    step.set(10)
    late.synchronize()
    return [torch.zeros_like(step.x) for _ in range(8)]


def test_a_graph_of_a_forward_without_a_backward_keeps_its_pools(device):
    step = trained(device, live=10)
    with step.capturing() as graph:
        loss = step.forward()
        del loss
    others = larger_pools(step)
    graph.replay_and_wait()
    assert not any(tensor.any() for tensor in others)
    assert ebb.experimental.paging.step_ok()


def test_a_replay_between_a_forward_and_its_backward(device):
    """Both use the same pools: one comes after the other."""
    ebb.config.paging.headroom = 3.0
    step = trained(device)
    graph = step.capture()
    with step.stream:
        loss = step.forward()
        graph.replay()
        found = torch.autograd.grad(loss, [step.x, *step.net.weights])
        graph.replay()
    assert step.is_right()
    step.found = found
    step.assert_right()


def test_a_replay_while_something_comes_back_ahead(device):
    ebb.config.update(paging_headroom=3.0, paging_prefetch=1)
    step = trained(device)
    graph = step.capture()
    with step.stream:
        for _ in range(3):
            with ebb.experimental.paging.step():
                kept = paged(step.x, step.n, ("a", "b", "c"))
                found = []
                while kept:
                    found.append(kept.pop()[0].saved_tensors[0] * 1)
                    graph.replay()
    late.synchronize()
    assert all(is_right(value, step.x, 3 - i) for i, value in enumerate(found))
    assert step.is_right()


def test_pages_are_given_back_behind_a_replay(device):
    ebb.config.paging.headroom = 3.0
    step = trained(device)
    graph = step.capture()
    with step.stream:
        loss = step.forward()
        graph.replay()
        del loss
        step.run()
    assert step.is_right()
    step.found = graph.found
    step.assert_right()


def test_a_replay_right_after_its_pools_were_reset(device):
    """It runs behind that, though the step that found no room is not over."""
    step = trained(device, live=10)
    graph = step.capture()
    step.set(40)
    graph.replay()
    assert not ebb.experimental.paging.step_ok()
    with step.stream:
        loss = step.forward()  # is recorded, and has no pools any more
        graph.replay_and_wait()
    assert loss is not None
    with step.stream:
        del loss
