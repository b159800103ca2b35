"""PAGE in CUDA graphs and beside them: captures, replays with other counts, captures that fail."""

from __future__ import annotations

import pytest
import torch

import ebb
from ebb_tests import device as late
from ebb_tests.device_leaves import needs_captures
from ebb_tests.programs.captured_paging import (
    Bracketed,
    Step,
    trained,
    trained_and_captured,
    two_trained,
)
from ebb_tests.programs.paged import (
    Keep,
    gradients,
    is_right,
    maybe_step,
    page_and_bring_back,
    paged,
    region,
    same,
)

pytestmark = [pytest.mark.usefixtures("fresh_pages"), needs_captures]


def warmed_once(device):
    step = Step(device)
    step.warm(times=1)
    return step


PREPARED = {
    "with_an_optimizer": trained,
    "after_one_step": warmed_once,  # no kernel is launched for the first time in the capture
    "bracketed": lambda device: trained(device, Bracketed),
    "nothing_paged": lambda device: trained(device, Bracketed, layers=1),  # its one layer stays
}


@pytest.mark.parametrize("prepare", PREPARED.values(), ids=PREPARED)
def test_replays_follow_the_number_of_valid_rows(prepare, device):
    step = prepare(device)
    graph = step.capture()
    step.check(graph.replay, [30, 3, 0, 29, 12, 30] * 3)
    assert ebb.stats()["paging"]["recorded_steps"] == 1


EAGER_STEPS = {
    "plain": (Step, False),
    "bracketed": (Step, True),
    "bracketed_as_captured": (Bracketed, False),
}


@pytest.mark.parametrize(("kind", "bracketed"), EAGER_STEPS.values(), ids=EAGER_STEPS)
def test_eager_steps_between_replays(kind, bracketed, device):
    step, graph = trained_and_captured(device, kind)
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


# Replays, and eager steps around them


def test_replays_and_eager_steps_without_a_wait_between(device):
    (step, graph), seen = trained_and_captured(device), []
    with step.stream:
        for _ in range(4):
            graph.replay()
            seen.append([g.clone() for g in step.found])
            step.run()
            seen.append(step.found)
    late.synchronize()

    assert all(same(gradients(step.net, step.x, step.n), found) for found in seen)
    assert ebb.experimental.paging.step_ok()


def test_captured_step_waits_no_more_than_an_eager_one(device):
    """Within a graph nothing else uses its pools."""
    step = trained(device)
    torch.ops.late.drop_wait(-1)
    with step.stream:
        step.run()
    eager = torch.ops.late.drop_wait(-1)
    step.capture()
    assert torch.ops.late.drop_wait(-1) <= eager


def test_a_replay_between_a_forward_and_its_backward(device):
    """Both use the same pools: one comes after the other."""
    ebb.config.paging.headroom = 3.0
    step, graph = trained_and_captured(device)
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
    step, graph = trained_and_captured(device)
    for _ in range(3):
        with step.stream, ebb.experimental.paging.step():
            kept = paged(step.x, step.n, ("a", "b", "c"))
            found = []
            while kept:
                found.append(kept.pop()[0].saved_tensors[0] * 1)
                graph.replay()
    late.synchronize()
    assert all(is_right(value, step.x, 3 - i) for i, value in enumerate(found))
    assert step.is_right()


def test_pages_of_a_dropped_graph_are_reused_after_a_replay(device):
    ebb.config.paging.headroom = 3.0
    step, graph = trained_and_captured(device)
    with step.stream:
        loss = step.forward()
        graph.replay()
        del loss
        step.run()
    assert step.is_right()
    step.found = graph.found
    step.assert_right()


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


# Room, and asking for it


def test_captured_step_without_room_sets_the_flag(device):
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
def test_step_ok_right_after_a_replay_knows_of_it(live, device):
    """Though no call of ebb's has begun the replay."""
    step, graph = trained_and_captured(device, live=10)
    for now in (10, live):
        step.set(now)
        graph.replay()
        assert ebb.experimental.paging.step_ok() == (now == 10)


def test_a_replay_right_after_its_pools_were_reset(device):
    """The replay runs after the reset, though the step that found no room is not over."""
    step, graph = trained_and_captured(device, live=10)
    step.set(40)
    graph.replay()
    assert not ebb.experimental.paging.step_ok()
    with step.stream:
        loss = step.forward()  # is recorded, and has no pools any more
        graph.replay_and_wait()
    assert loss is not None
    with step.stream:
        del loss


def test_a_graph_of_a_forward_without_a_backward_keeps_its_pools(device):
    step = trained(device, live=10)
    with step.capturing() as graph:
        loss = step.forward()
        del loss
    step.set(40)
    step.run()
    assert not ebb.experimental.paging.step_ok()  # so pools for more rows are made
    for _ in range(2):
        step.run()
        step.assert_right()
    step.set(10)
    late.synchronize()
    others = [torch.zeros_like(step.x) for _ in range(8)]  # in memory of pools that have gone
    graph.replay_and_wait()
    assert not any(tensor.any() for tensor in others)
    assert ebb.experimental.paging.step_ok()


def test_step_ok_raises_in_a_capture_and_optimizers_do_not_ask(device):
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


def test_flags_of_before_a_capture_are_read_after_it(device):
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


# Graphs that are not a whole step


def test_a_forward_without_a_backward_before_a_capture(device):
    """An eager step frees its pages."""
    ebb.config.paging.headroom = 1.0
    step = trained(device)
    with step.stream:
        step.forward()
    graph = step.capture()
    step.run()
    step.assert_right()
    step.check(graph.replay, [30, 30, 30])
    step.run()
    assert step.is_right()
    graph.replay()
    assert ebb.experimental.paging.step_ok()


@pytest.mark.parametrize("partly", [False, True])
def test_a_forward_without_its_whole_backward_inside_a_capture(partly, device):
    ebb.config.paging.headroom = 2.0
    step = trained(device)
    with step.capturing() as graph:
        loss = step.forward()
        found = torch.autograd.grad(loss, step.net.weights[-1:]) if partly else []
        step.run()
        del loss
    step.check(graph.replay, [30] * 4)
    right = gradients(step.net, step.x, step.n)[-1:] if partly else []
    assert same(right, found)


@pytest.mark.parametrize("paged", ["copied", "in a pool"])
def test_backward_in_a_capture_of_an_earlier_forward_raises(paged, device):
    """The backward may run when the capture is over."""
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


def test_write_in_a_capture_does_not_wait_for_an_earlier_copy(device):
    """The copy is over when the graph runs."""
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


def test_capture_takes_what_another_stream_brought_back(device):
    """An error kept the step open. The program waits for all streams before the capture."""
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


def test_pools_dropped_in_a_capture_are_not_waited_for(device):
    """The device was waited for before the capture."""
    ebb.config.paging.headroom = 3.0
    step = trained(device)
    with step.stream:
        kept, other = step.forward(), step.forward()
        ebb.experimental.paging.reset()
        torch.autograd.grad(other, step.net.weights)
    with step.capturing() as graph:
        torch.ops.late.counts()
        del kept  # and with it the pools
        assert "synchronize" not in torch.ops.late.counts()
        found = step.x * 2
    graph.replay_and_wait()
    assert torch.equal(found.cpu(), (step.x * 2).cpu())


def test_memory_that_another_stream_paged_beside_a_capture_is_its_own(device):
    """The memory is not reused before that stream has waited."""
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


# Captures that fail


def test_capture_before_any_step_raises(device):
    step = Step(device)
    with pytest.raises(RuntimeError, match="Run one step with the same shapes before the capture"):
        step.capture()
    step.run()
    assert step.is_right()


def test_step_that_sizes_pools_raises_in_a_capture(device):
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


def test_pools_of_a_step_that_ends_in_a_capture_are_made_after_it(device):
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


@pytest.mark.parametrize("where", ["after the step", "between forward and backward"])
@pytest.mark.parametrize("eager_first", [False, True])
def test_capture_again_after_a_capture_that_failed(eager_first, where, device):
    step = trained(device)
    with pytest.raises(KeyError):
        step.capture(fails=True) if where == "after the step" else step.capture_forward([])
    if eager_first:
        step.check(step.run, [30, 5, 29])
    graph = step.capture()
    step.check(graph.replay, [30, 5, 30])
    assert ebb.stats()["paging"]["recorded_steps"] == 1


def allocated_without_gradients(step):
    """Bytes of the device, after a backward whose gradients have no bytes: autograd's thread holds
    gradients for a short time."""
    step.found = None
    late.synchronize()
    leaf = torch.empty(0, device=step.x.device, requires_grad=True)
    torch.autograd.grad(leaf * 2, leaf, torch.empty_like(leaf))
    return torch.accelerator.memory_allocated(leaf.device)


def test_memory_of_a_capture_that_failed_is_given_up(device):
    """The next step frees what the capture paged."""
    step, kept = trained(device), []
    before = allocated_without_gradients(step)
    with pytest.raises(KeyError):
        step.capture_forward(kept)
    kept.clear()
    step.run()

    assert allocated_without_gradients(step) == before


def test_backward_outside_of_what_a_capture_paged_raises(device):
    step, kept = trained(device), []
    with pytest.raises(KeyError):
        step.capture_forward(kept)
    with pytest.raises(RuntimeError, match="Capture forward and backward together"):
        torch.autograd.grad(kept[0], step.net.weights)
    late.synchronize()


def test_drop_after_a_capture_that_failed_waits_for_nothing(device):
    """Neither for the capture, of which nothing ran, nor for other work."""
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
