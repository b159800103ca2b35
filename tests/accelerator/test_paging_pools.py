"""Page pools on a device: named with an index or without, while another one is current."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ebb
from ebb._testing import PagePool
from ebb_tests import device as late
from ebb_tests.programs.paged import (
    EVERYTHING,
    Masked,
    gradients,
    masked,
    programs_of,
    region,
    same,
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
def test_schedules(name, device):
    """Pages against the model of tests/paging/test_page_pool.py."""

    @settings(max_examples=30, database=None)
    @given(POOLS.schedules(), st.sampled_from(sorted(POOLS.ORDERS)))
    def program(schedule, order):
        options, steps = schedule
        POOLS.run(POOLS.Checked(resolved(name), *options), steps, POOLS.ORDERS[order])

    program()
    late.synchronize()


@DEVICES
def test_stacks(name, device):
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
    """By the end of a step, in the thread that runs it: the current device is the first one."""
    here = torch.device("late", index)
    net = Masked(device=here)
    x, n = net.inputs(0), net.live(20)
    for _ in range(3):
        if bracketed == "step":
            with ebb.experimental.paging.step():
                found = gradients(net, x, n, region)
        elif bracketed == "run_step":
            found = ebb.experimental.paging.run_step(lambda: gradients(net, x, n, region))
        else:
            found = gradients(net, x, n, region)
        assert same(gradients(net, x, n), found)
        assert ebb.experimental.paging.step_ok()
    assert {pool["device"] for pool in ebb.stats()["paging"]["pools"]} == {str(here)}
    assert torch.ops.late.current_device() == 0


def test_the_flag_of_a_device():
    """Without an index it is the current device's."""
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


def test_an_assertion_on_the_device(device):
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
def test_counts_on_the_device(counts, device):
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
def test_counts_that_cannot_be_show_in_the_end(count, device):
    net = Masked(device=device)
    gradients(net, net.inputs(0), net.live(20), region)
    gradients(net, net.inputs(0), net.live(count), region)
    with pytest.raises(RuntimeError, match="paging failed in this step"):
        ebb.experimental.paging.step_ok()


def test_padded_memory_is_free_between_forward_and_backward(device):
    """Of each layer but the last, which nothing has come after yet."""
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


@pytest.mark.parametrize("dead_rows", ["nan", "zero"])
def test_dead_rows_that_are_to_show(dead_rows, device):
    """Of the last layer too, which nothing has come after."""
    ebb.config.paging.dead_rows = dead_rows
    _, x, n = masked(device)
    for _ in range(3):
        with ebb.region(EVERYTHING):
            loss = ebb.experimental.mark_rows(x * 2, n).sin()
        (found,) = torch.autograd.grad(loss.sum(), [x])
        dead = found[20:].cpu()
        assert bool(dead.isnan().all()) if dead_rows == "nan" else torch.equal(dead, dead * 0 + 2)
    late.synchronize()
