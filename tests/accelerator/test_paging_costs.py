"""What PAGE does without: waits and events that nobody needs, and memory that may be free."""

from __future__ import annotations

import contextlib

import pytest
import torch

import ebb
from ebb_tests import device as late
from ebb_tests.programs.paged import (
    EVERYTHING,
    Keep,
    Masked,
    gradients,
    masked,
    page_and_bring_back,
    paged,
    region,
    wait_for_all,
)

pytestmark = pytest.mark.usefixtures("fresh_pages")


def steady(*devices):
    """Runs until pools are there; gives a step of each device's own."""
    nets = [Masked(device=device) for device in devices]
    data = [(net, net.inputs(0), net.live(20)) for net in nets]
    steps = [lambda given=given: gradients(*given, region) for given in data]
    with ebb.experimental.paging.step(False):  # sizes the pools of all
        for step in steps:
            step()
    for step in steps * 2:
        step()
        assert ebb.experimental.paging.step_ok()
    late.synchronize()
    torch.ops.late.counts()
    return steps


def counted(*names):
    counts = torch.ops.late.counts()
    return [counts.get(name, 0) for name in names]


@pytest.mark.parametrize("asked", [False, True])
def test_pools_that_go_are_waited_for_once(asked, device):
    """Not one by one; and not at all if somebody has asked."""
    (step,) = steady(device)
    assert len(ebb.stats()["paging"]["pools"]) > 1
    step()
    if asked:
        assert ebb.experimental.paging.step_ok()
    torch.ops.late.counts()
    ebb.experimental.paging.reset()
    assert counted("synchronize") == [0 if asked else 1]


def test_asking_after_a_step_gives_the_device_nothing_to_do(device):
    """What is to be known is on its way since the step has ended."""
    (step,) = steady(device)
    step()
    torch.ops.late.counts()
    assert ebb.experimental.paging.step_ok()
    assert counted("synchronize", "record", "wait") == [1, 0, 0]


def test_a_device_that_had_nothing_to_do_is_not_waited_for(device):
    here, _ = steady(torch.device("late", 0), torch.device("late", 1))
    here()
    torch.ops.late.counts()
    assert ebb.experimental.paging.step_ok()
    assert counted("synchronize") == [1]


def test_the_stream_that_has_copied_rows_waits_for_nothing(device):
    net = Masked(device=device)
    kept = paged(net.inputs(0), net.live(20))
    torch.ops.late.counts()
    assert kept[0][0].saved_tensors[0] is not None
    assert counted("wait") == [0]


def test_a_layer_waits_for_what_its_own_stream_has_paged(device, streams):
    """The other one, whose rows have left since, runs nothing."""
    _, x, n = masked(device)
    for _ in range(2):
        assert all(ctx.saved_tensors for ctx, _ in paged(x, n, ("a", "b")))
    wait_for_all(device, streams)
    late.synchronize()
    with streams[0]:
        kept = paged(x, n, ("a",))
    with streams[1]:
        others = torch.zeros_like(x)
        before_its_own = torch.Event("late")
        before_its_own.record()
        kept += paged(x, n, ("a",))
    with streams[0]:
        kept += paged(x, n, ("b",))
        begun = torch.Event("late")
        begun.record()
    begun.synchronize()
    assert not before_its_own.query()
    late.synchronize()
    assert not others.any()


def test_what_has_left_is_free_when_somebody_has_asked(device):
    """Nothing has come after the last layer, which would wait for it."""
    (step,) = steady(device)
    net = Masked(device=device)
    loss = net(net.inputs(0), net.live(20), region)
    before = torch.accelerator.memory_allocated(device)
    assert ebb.experimental.paging.step_ok()
    assert torch.accelerator.memory_allocated(device) < before
    assert loss is not None
    assert step


def test_what_has_left_is_free_when_the_step_ends_on_another_stream(device, streams):
    _, x, n = masked(device)
    for _ in range(2):
        page_and_bring_back(x, n)
    wait_for_all(device, streams)
    with streams[0], ebb.region(EVERYTHING):
        h = ebb.experimental.mark_rows(x + 1, n)
        place = h.data_ptr()
        kept, ctx = Keep.apply(h), Keep.last
        del h
    with late.behind(streams[1], streams[0]):
        assert ctx.saved_tensors  # it lives
        Keep.last = kept = ctx = None
    late.synchronize()
    with streams[0]:
        taken = [torch.empty_like(x) for _ in range(4)]
    assert place in [tensor.data_ptr() for tensor in taken]
    assert kept is None


def test_the_last_of_what_has_left_is_waited_for(device):
    """Though something older is given up after it: what was coming back ahead, when the order of
    the step has changed."""
    ebb.config.paging.prefetch = 1
    _, x, n = masked(device)
    for _ in range(2):
        with ebb.experimental.paging.step():
            kept = paged(x, n, ("a", "b", "c"))
            for ctx, _ in reversed(kept):
                assert ctx.saved_tensors
            kept.clear()
    with contextlib.suppress(KeyError), ebb.experimental.paging.step():
        kept = paged(x, n, ("a", "b", "c"))
        assert kept[-1][0].saved_tensors  # "b" is on its way back
        kept.pop()
        with pytest.raises(RuntimeError, match="in another order"):
            paged(x, n, ("d",))
        with ebb.region(EVERYTHING, "e"):
            h = ebb.experimental.mark_rows(x + 1, n)
            place = h.data_ptr()
            ours = Keep.apply(h)
            del h
        Keep.last = None
        kept.clear()
        more = paged(x, n, ("f",))
        taken = [torch.empty_like(x) for _ in range(6)]
        assert place in [tensor.data_ptr() for tensor in taken]
        assert all((ours is not None, more))
        raise KeyError  # a step that fails need not keep its order


def test_memory_of_what_has_left_after_what_is_written(device):
    """Who waits for one stash says nothing of a later one, whose rows are being read still."""
    _, x, n = masked(device)
    for _ in range(3):
        with ebb.region(EVERYTHING):
            h = ebb.experimental.mark_rows(x.detach() + 1, n).requires_grad_()
            first = Keep.apply(h)
            second = Keep.apply(ebb.experimental.mark_rows(x + 2, n))
            ctx = Keep.last
            with torch.no_grad():
                h.data.zero_()
            scratch = [torch.zeros_like(x) for _ in range(4)]
        found = ctx.saved_tensors[0].clone()
        assert torch.equal(found[:20].cpu(), (x + 2)[:20].detach().cpu())
        assert not any(tensor.any() for tensor in scratch)
        assert first is not second
        Keep.last = ctx = first = second = None
