"""PAGE in graphs: what is captured runs again with other counts, and is captured again after it
failed."""

from __future__ import annotations

import pytest
import torch

import ebb
from ebb_tests import device as late
from ebb_tests.device_leaves import needs_captures
from ebb_tests.programs.captured_paging import Bracketed, Step, trained
from ebb_tests.programs.paged import Keep, gradients, maybe_step, region, same

pytestmark = [pytest.mark.usefixtures("fresh_pages"), needs_captures]


def test_a_capture_after_steps_with_an_optimizer(device):
    step = trained(device)
    graph = step.capture()

    step.check(graph.replay, [30, 3, 0, 29, 12, 30] * 4)
    assert ebb.stats()["paging"]["recorded_steps"] == 1


def test_a_captured_step_that_finds_no_room(device):
    step = trained(device, live=10)
    with step.capturing() as graph:
        step.run()
        flag = ebb.experimental.paging.found_inf(device)

    graph.replay()
    assert flag.item() == 0.0
    step.set(40)
    graph.replay()
    assert flag.item() == 1.0
    assert not ebb.experimental.paging.step_ok()
    step.run()  # recorded; then pools are larger, and the graph's is as good as new
    assert step.is_right()
    step.run()
    step.assert_right()
    larger = step.found
    step.set(10)
    graph.replay()
    assert step.is_right()
    assert flag.item() == 0.0
    assert ebb.experimental.paging.step_ok()
    step.set(40)
    graph.replay()
    assert not ebb.experimental.paging.step_ok()  # though no step pages there any more
    assert larger is not None


@pytest.mark.parametrize("live", [10, 40])
def test_asking_right_after_a_replay(live, device):
    """Which the lane knows nothing of."""
    step = trained(device, live=10)
    graph = step.capture()
    for now in (10, live):
        step.set(now)
        graph.replay()
        assert ebb.experimental.paging.step_ok() == (now == 10)


@pytest.mark.parametrize("bracketed", [False, True])
def test_eager_steps_between_replays(bracketed, device):
    step = trained(device)
    graph = step.capture()
    for number, live in enumerate([30, 4, 17, 0, 30]):
        step.set(live, number)
        graph.replay()
        assert step.is_right()
        step.set(30 - live, number + 1)
        with maybe_step(bracketed, fixed_order=False):
            step.run()
        assert step.is_right()
        if number % 2 == 0:
            assert ebb.experimental.paging.step_ok()
    assert ebb.experimental.paging.step_ok()


def test_replays_and_eager_steps_without_a_wait_between(device):
    step, seen = trained(device), []
    graph = step.capture()
    with step.stream:
        for _ in range(4):
            graph.replay()
            seen.append([g.clone() for g in step.found])
            step.run()
            seen.append(step.found)
    late.synchronize()

    assert all(same(gradients(step.net, step.x, step.n), found) for found in seen)
    assert ebb.experimental.paging.step_ok()


def test_a_forward_without_a_backward_before_a_capture(device):
    """Its pages are free again when an eager step has run."""
    ebb.config.paging.headroom = 1.0
    step = trained(device)
    with step.stream:
        loss = step.forward()
        del loss
    graph = step.capture()
    step.run()
    step.assert_right()
    step.check(graph.replay, [30, 30, 30])
    step.run()
    assert step.is_right()
    graph.replay()
    assert ebb.experimental.paging.step_ok()


def test_a_forward_without_a_backward_inside_a_capture(device):
    ebb.config.paging.headroom = 2.0
    step = trained(device)
    with step.capturing() as graph:
        loss = step.forward()
        step.run()
        del loss
    step.check(graph.replay, [30, 30, 30, 30])


def test_a_backward_inside_a_capture_that_is_not_whole(device):
    step = trained(device)
    with step.capturing() as graph:
        loss = step.forward()
        found = torch.autograd.grad(loss, step.net.weights[-1:])
        del loss
    for _ in range(5):
        graph.replay_and_wait()
        assert same(gradients(step.net, step.x, step.n)[-1:], found)
        assert ebb.experimental.paging.step_ok()


@pytest.mark.parametrize("where", ["after the step", "between forward and backward"])
@pytest.mark.parametrize("eager_first", [False, True])
def test_a_capture_that_failed(eager_first, where, device):
    step = trained(device)
    with pytest.raises(KeyError):
        step.capture(fails=True) if where == "after the step" else step.capture_forward([])
    if eager_first:
        step.check(step.run, [30, 5, 29])
    graph = step.capture()
    step.check(graph.replay, [30, 5, 30])
    assert ebb.stats()["paging"]["recorded_steps"] == 1


def allocated_without_gradients(step):
    """Bytes of the device. Autograd's thread holds the gradients for a short time after a backward
    has returned. So this runs another backward, whose gradients have no bytes."""
    step.found = None
    late.synchronize()
    leaf = torch.empty(0, device=step.x.device, requires_grad=True)
    torch.autograd.grad(leaf * 2, leaf, torch.empty_like(leaf))
    return torch.accelerator.memory_allocated(leaf.device)


def test_memory_of_a_capture_that_failed_is_given_up(device):
    """What it has paged is held until somebody comes after it."""
    step, kept = trained(device), []
    before = allocated_without_gradients(step)
    with pytest.raises(KeyError):
        step.capture_forward(kept)
    kept.clear()
    step.run()

    assert allocated_without_gradients(step) == before


@pytest.mark.parametrize("paged", ["copied", "in a pool"])
def test_a_backward_in_a_capture_of_a_forward_before_it(paged, device):
    """Is refused; the backward may run when the capture is over."""
    step = Step(device) if paged == "copied" else trained(device)
    with step.stream:
        loss = step.forward()
    late.synchronize()
    leaves = [step.x, *step.net.weights]
    message = (
        r"the output of aten::\S+ in region 'region': it was paged before this CUDA graph capture "
        "and is needed inside it. Capture forward and backward together"
    )
    with pytest.raises(RuntimeError, match=message), step.capturing():
        torch.autograd.grad(loss, leaves, retain_graph=True)
    with step.stream:
        step.found = torch.autograd.grad(loss, leaves)
    step.assert_right()
    step.run()
    step.assert_right()


def test_a_write_in_a_capture_to_what_has_left_before(device):
    """Nobody waits for what is over when the graph runs."""
    step = Step(device)
    step.warm()
    graph = late.Graph()
    with step.stream, region():
        h = ebb.experimental.mark_rows(step.x.detach() * 1, step.n).requires_grad_()
        y = Keep.apply(h)
        ctx = Keep.last
        with graph.capture(step.stream), torch.no_grad():
            h.data.fill_(2.0)
    with step.stream:
        graph.replay()
        found = ctx.saved_tensors[0].clone()  # autograd does not see such a write either
    late.synchronize()
    Keep.last = None

    assert y is not None
    assert torch.equal(found.cpu(), torch.full_like(found.cpu(), 2.0))


def test_what_a_capture_has_paged_does_not_come_back_outside(device):
    step, kept = trained(device), []
    with pytest.raises(KeyError):
        step.capture_forward(kept)
    with pytest.raises(RuntimeError, match="Capture forward and backward together"):
        torch.autograd.grad(kept[0], step.net.weights)
    late.synchronize()


def test_asking_while_a_graph_is_captured(device):
    """An optimizer may be captured: nobody asks the pools then. Who asks himself is told."""
    step = trained(device)
    parameter = torch.ones(4).to(device).requires_grad_()
    parameter.grad = torch.ones(4).to(device)
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    with step.capturing() as graph:
        step.run()
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"use paging.found_inf\(\)"):
            ebb.experimental.paging.step_ok()
    graph.replay()
    assert step.is_right()
    assert torch.equal(parameter.detach().cpu(), torch.full((4,), 0.5))


def test_a_capture_before_any_step(device):
    step = Step(device)
    with pytest.raises(RuntimeError, match="Run one step with the same shapes before the capture"):
        step.capture()
    step.run()
    assert step.is_right()


def test_a_bracketed_step_with_what_comes_back_ahead(device):
    """The layer whose backward comes next is not paged; the others come back one layer ahead."""
    step = trained(device, Bracketed)
    graph = step.capture()
    for number, live in enumerate([30, 3, 0, 29]):
        step.set(live, number)
        graph.replay()
        step.assert_right()
        step.run()
        assert step.is_right()


def test_two_graphs_on_two_streams(device):
    steps = trained(device), trained(device, seed=1)
    graphs = [step.capture() for step in steps]
    for _ in range(3):
        for step, graph in zip(steps, graphs, strict=True):
            with late.behind(step.stream, torch.accelerator.current_stream()):
                graph.replay()
            torch.accelerator.current_stream().wait_stream(step.stream)
    assert all(step.is_right() for step in steps)
    assert ebb.experimental.paging.step_ok()
