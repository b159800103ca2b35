"""Page pools on a device, the memory that is free thanks to them, and PAGE where there are none."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ebb
from ebb import _testing
from ebb._testing import PagePool
from ebb_tests import device as late
from ebb_tests.programs.paged import (
    EVERYTHING,
    Keep,
    Masked,
    gradients,
    is_right,
    masked,
    maybe_step,
    page_and_bring_back,
    paged,
    programs_of,
    region,
    same,
    wait_for_all,
)

pytestmark = pytest.mark.usefixtures("fresh_pages")

DEVICES = pytest.mark.parametrize("name", ["late", "late:0", "late:1"])


POOLS = programs_of("test_page_pool")


@DEVICES
def test_rows_go_and_come_back(name):
    device = torch.device(name)
    pool = PagePool(device, row_bytes=8, page_rows=2, device_pages=4, host_pages=2)
    data = torch.arange(64, dtype=torch.uint8).view(8, 8).to(device)
    ticket = pool.make_ticket(8)
    pool.stash(ticket, data, torch.tensor(5).to(device))
    found = torch.zeros_like(data)
    pool.restore(ticket, found)

    assert torch.equal(found[:5].cpu(), data[:5].cpu())
    assert pool.status()["errors"] == 0
    assert sorted(pool.status()["free"][0]) == [0, 1, 2, 3]


@DEVICES
def test_pages_follow_the_model_of_schedules(name, device):
    """The model is in tests/paging/test_page_pool.py."""

    @settings(max_examples=30, database=None)
    @given(POOLS.schedules(), st.sampled_from(sorted(POOLS.ORDERS)))
    def program(schedule, order):
        options, steps = schedule
        POOLS.run(POOLS.Checked(resolved(name), *options), steps, POOLS.ORDERS[order])

    program()
    late.synchronize()


@DEVICES
def test_stacks_follow_their_model(name, device):
    @settings(max_examples=30, database=None)
    @given(POOLS.ACTIONS, st.sampled_from([(30, 0), (20, 20), (0, 16)]))
    def program(actions, capacity):
        POOLS.Stack(resolved(name), capacity).run(actions)

    program()
    late.synchronize()


def resolved(name):
    return torch.device(name if ":" in name else f"{name}:0")


def test_a_kernel_is_launched_on_the_device_of_the_pool_on_any_stream(device):
    other = torch.device("late", 1)
    with torch.Stream(device=other):
        pool = PagePool(other, row_bytes=8, page_rows=2, device_pages=4)
        torch.ops.late.set_device(0)
        ticket = pool.make_ticket(4)
        data = torch.arange(32, dtype=torch.uint8).view(4, 8).to(other)
        pool.stash(ticket, data, torch.tensor(3).to(other))
        found = torch.zeros_like(data)
        pool.restore(ticket, found)
        pool.give_back(ticket)
        pool.reset()
        assert torch.equal(found[:3].cpu(), data[:3].cpu())
        late.synchronize()


# The engine


@pytest.mark.parametrize("bracketed", ["not", "step", "run_step"])
@pytest.mark.parametrize("index", [0, 1])
def test_pools_are_made_where_tensors_are(index, bracketed):
    """The end of a step makes them; the current device is the first one."""
    here = torch.device("late", index)
    net = Masked(device=here)
    x, n = net.inputs(0), net.live(20)

    def step():
        with maybe_step(bracketed == "step"):
            return gradients(net, x, n, region)

    for _ in range(3):
        found = ebb.experimental.paging.run_step(step) if bracketed == "run_step" else step()
        assert same(gradients(net, x, n), found)
        assert ebb.experimental.paging.step_ok()
    assert {pool["device"] for pool in ebb.stats()["paging"]["pools"]} == {str(here)}
    assert torch.ops.late.current_device() == 0


def test_found_inf_without_an_index_is_of_the_current_device():
    nets = [Masked(device=torch.device("late", index)) for index in (0, 1)]

    def run(index, live):
        net = nets[index]
        return gradients(net, net.inputs(0), net.live(live), region)

    def flags():
        return [
            ebb.experimental.paging.found_inf(name).item() for name in ("late", "late:0", "late:1")
        ]

    with ebb.experimental.paging.step(False):  # sizes the pools of both
        run(0, 5)
        run(1, 5)
    assert flags() == [0.0, 0.0, 0.0]
    run(1, 40)
    assert flags() == [0.0, 0.0, 1.0]
    torch.ops.late.set_device(1)
    try:
        assert flags() == [1.0, 0.0, 1.0]
    finally:
        torch.ops.late.set_device(0)
    flag = ebb.experimental.paging.found_inf("late:1")
    assert (flag.device, flag.dtype, flag.shape) == (torch.device("late:1"), torch.float32, ())
    assert not ebb.experimental.paging.step_ok()


def test_overflow_mode_assert_asserts_on_the_device(device):
    ebb.config.paging.overflow = "assert"
    net = Masked(device=device)
    for live in (5, 5):
        gradients(net, net.inputs(0), net.live(live), region)
    late.synchronize()
    assert late.findings() == []
    gradients(net, net.inputs(0), net.live(40), region)
    late.synchronize()
    findings = late.findings()
    assert findings
    assert all("a page pool was too small" in one for one in findings)
    assert not ebb.experimental.paging.step_ok()


@pytest.mark.parametrize("counts", [17, [17], [3, 0, 14]], ids=str)
def test_counts_on_the_device_are_read_there(counts, device):
    net = Masked(device=device)
    x, given_ = net.inputs(0), torch.tensor(counts).to(device)
    for _ in range(3):
        with ebb.region(EVERYTHING):
            h = ebb.experimental.mark_rows(x * 2, given_)
            loss = h.sin()[:17].sum()
        assert same(
            torch.autograd.grad((x * 2).sin()[:17].sum(), [x]), torch.autograd.grad(loss, [x])
        )
        assert ebb.experimental.paging.step_ok()


@pytest.mark.parametrize("count", [-1, 41])
def test_invalid_count_raises_at_the_end_of_the_step(count, device):
    net = Masked(device=device)
    gradients(net, net.inputs(0), net.live(20), region)
    gradients(net, net.inputs(0), net.live(count), region)
    with pytest.raises(RuntimeError, match="paging failed in this step"):
        ebb.experimental.paging.step_ok()


@pytest.mark.parametrize("dead_rows", ["nan", "zero"])
def test_setting_dead_rows_fills_padding_rows(dead_rows, device):
    """Also in the last layer, after which no wait comes."""
    ebb.config.paging.dead_rows = dead_rows
    _, x, n = masked(device)
    for _ in range(3):
        with ebb.region(EVERYTHING):
            loss = ebb.experimental.mark_rows(x * 2, n).sin()
        (found,) = torch.autograd.grad(loss.sum(), [x])
        dead = found[20:].cpu()
        assert bool(dead.isnan().all()) if dead_rows == "nan" else torch.equal(dead, dead * 0 + 2)
    late.synchronize()


# Memory that is free


def test_padded_memory_is_free_between_forward_and_backward(device):
    """The last layer's memory is excepted: no stream has waited for its copy yet."""
    net, x, n = masked(device, 64, layers=6, width=64, rows=2048)
    for _ in range(2):
        gradients(net, x, n, region)

    def held_by(inside):
        late.synchronize()
        before = torch.accelerator.memory_allocated(device)
        loss = net(x, n, inside)
        held = torch.accelerator.memory_allocated(device) - before
        assert loss is not None
        return held

    held = held_by(region)

    assert held < 0.3 * held_by(torch.enable_grad)


def test_memory_of_what_has_left_is_free_when_somebody_has_asked(device):
    """No layer comes after the last one and waits for it."""
    net, x, n = masked(device)
    for _ in range(3):
        gradients(net, x, n, region)
        assert ebb.experimental.paging.step_ok()
    loss = net(x, n, region)
    before = torch.accelerator.memory_allocated(device)
    assert ebb.experimental.paging.step_ok()
    assert torch.accelerator.memory_allocated(device) < before
    assert loss is not None


def test_memory_of_what_has_left_is_free_when_the_step_ends_on_another_stream(device, streams):
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


def test_memory_of_the_last_that_has_left_is_waited_for(device):
    """The order of the step has changed, so ebb frees an older stash later than the last one."""
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


def test_wait_for_one_stash_frees_no_memory_of_a_later_one(device):
    """The rows of the later one are still being read."""
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
        assert is_right(found, x, 2)
        assert not any(tensor.any() for tensor in scratch)
        assert first is not second
        Keep.last = ctx = first = second = None


# Where there are no pools


def product(live, device="cpu"):
    """The gradient of a product of which `live` rows count."""
    torch.manual_seed(3)
    x, w = torch.randn(64, 8).to(device), torch.randn(8, 8).to(device).requires_grad_()
    count = torch.tensor(live).to(device)
    with ebb.region(EVERYTHING):
        loss = (ebb.experimental.mark_rows(x.clone(), count) @ w).sigmoid()[:live].sum()
    return torch.autograd.grad(loss, w)[0]


def test_step_that_runs_twice_draws_the_same_numbers(device):
    drawn = []

    def draws_and(live):
        drawn.append([torch.rand(3, device=device).cpu(), torch.rand(3)])
        return product(live)

    for live in (4, 4, 60):
        drawn.clear()
        found = ebb.experimental.paging.run_step(lambda live=live: draws_and(live))

    assert len(drawn) == 2
    for first, second in zip(*drawn, strict=True):
        assert torch.equal(first, second)
    assert torch.equal(found, product(60))


def test_run_step_on_a_device_without_a_generator(device):
    with late.drawing("from cpu", generator=False):
        found = [
            ebb.experimental.paging.run_step(lambda live=live: product(live)) for live in (4, 4, 60)
        ]

    assert torch.equal(found[-1], product(60))


def test_warning_that_page_means_save_is_given_once(device):
    _testing.set_page_mover(0)  # other tests may have given it one
    with pytest.warns(UserWarning, match="tensors on late:0 are saved instead of paged") as caught:
        found = [product(5, device) for _ in range(2)]

    assert len([w for w in caught if "saved instead of paged" in str(w.message)]) == 1
    assert torch.equal(found[0].cpu(), found[1].cpu())


def operators_of(function):
    """The operators that it calls by itself."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    calls = [event for event in profile.events() if event.name.startswith("aten::")]
    return [event.name for event in calls if event.cpu_parent is None]


@pytest.mark.parametrize(("counts", "most"), [(5, 4), ([5], 4), ([2, 0, 3], 8)], ids=str)
def test_marking_with_the_same_count_again_runs_no_kernel(device, counts, most):
    x = torch.randn(64, 8).to(device)
    count = torch.tensor(counts).to(device)
    with ebb.region(EVERYTHING):
        first, second = x * 1, x * 2

        once = operators_of(lambda: ebb.experimental.mark_rows(first, count))
        again = operators_of(lambda: ebb.experimental.mark_rows(second, count))
        count.add_(1)
        written = operators_of(lambda: ebb.experimental.mark_rows(second.clone(), count))

    assert 0 < len(once) <= most
    assert not again
    assert len(written) >= len(once)
