"""Values with the decision PAGE: gradients equal eager's, with the memory of the live rows."""

from __future__ import annotations

import contextlib
import gc
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ebb
from ebb_tests.exactness import same_bits
from ebb_tests.other_threads import together
from ebb_tests.programs.paged import (
    EVERYTHING,
    PAGES,
    Mlp,
    fresh,
    gradients,
    paged,
    products,
    region,
    same,
)

LOADS = [17, 40, 0, 1, 39, 5, 33]


@pytest.mark.parametrize("policy", PAGES)
@pytest.mark.parametrize("page_rows", [1, 4, 64])
def test_gradients_at_every_load(policy, page_rows, net):
    ebb.config.update(paging_page_rows=page_rows, paging_headroom=3)
    for step, live in enumerate([40, *LOADS]):
        x, n = net.inputs(step), torch.tensor(live)
        expected = gradients(net, x, n)

        found = gradients(net, x, n, lambda: ebb.region(PAGES[policy]))

        assert same(expected, found)
        assert ebb.experimental.paging.step_ok()
    stats = ebb.stats()["paging"]
    assert stats["recorded_steps"] == 1
    assert stats["stashes"] == 0
    assert ebb.stats()["total"]["bytes_paged"] > 0


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 40), min_size=2, max_size=6),
    st.sampled_from(sorted(PAGES)),
    st.sampled_from([1, 3, 8, 64]),
    st.sampled_from([0.0, 2.0]),
    st.booleans(),
)
def test_random_loads_with_overflow_and_spill(loads, policy, page_rows, host, nested):
    net = Mlp(layers=2)
    region = (lambda: ebb.region(PAGES[policy])) if nested else None
    with fresh(page_rows=page_rows, host_headroom=host):
        for step, live in enumerate(loads):
            x, n = net.inputs(step), torch.tensor(live)
            expected = gradients(net, x, n)

            def run(x=x, n=n):
                if region:
                    return gradients(net, x, n, region)
                with ebb.region(PAGES[policy]):
                    loss = net(x, n)
                return torch.autograd.grad(loss, [x, *net.weights])

            assert same(expected, ebb.experimental.paging.run_step(run))


def test_pools_hold_little_more_than_live_rows():
    """At four times the rows that live: at most 0.3 of what padded rows take."""
    net = Mlp(layers=3, width=64, rows=4096)
    x, n = net.inputs(0), torch.tensor(1024)
    for _ in range(2):
        gradients(net, x, n, products)

    stats = ebb.stats()["paging"]

    assert stats["live_bytes"] == stats["padded_bytes"] / 4
    assert stats["pool_bytes"] <= 0.3 * stats["padded_bytes"]


@pytest.mark.parametrize("order", ["forward then backward", "1F1B"])
def test_pages_waste_less_than_one_page_for_each_tensor(order):
    """Stacks waste nothing; pages are used where tensors come back in another order."""
    ebb.config.update(paging_page_rows=16, paging_headroom=1.0)
    net = Mlp(layers=1, width=64, rows=256)
    n = torch.tensor(100)

    def forward(batch):
        with products():
            return net.layer(ebb.experimental.mark_rows(net.inputs(batch) * 1, n), 0)[:100].sum()

    for _ in range(3):
        losses = []
        for batch in range(6):
            losses.append(forward(batch))
            if order == "1F1B" and batch >= 2:
                losses.pop(0).backward()
        while losses:
            losses.pop().backward()

    stats = ebb.stats()["paging"]
    assert ebb.experimental.paging.step_ok()
    assert stats["recorded_steps"] == 1
    assert [pool["stack"] for pool in stats["pools"]] == [order == "forward then backward"]
    rows = sum(p["device_pages"] * p["page_rows"] * p["row_bytes"] for p in stats["pools"])
    tensors = 6 * 2
    assert stats["live_bytes"] <= rows <= stats["live_bytes"] + tensors * 16 * 256


def held_bytes(function):
    """What CPU memory a function leaves behind."""
    with torch.profiler.profile(profile_memory=True) as profile:
        kept = function()
    events = profile.profiler.kineto_results.events()
    assert kept is not None
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


def test_memory_is_freed_between_forward_and_backward():
    net = Mlp(layers=4, width=256, rows=2048)
    x, n = net.inputs(0), torch.tensor(64)
    for _ in range(2):
        gradients(net, x, n, region)

    held = held_bytes(lambda: net(x, n, region))

    assert held < 0.05 * held_bytes(lambda: net(x, n))


def test_a_write_after_the_pack_leaves_what_was_packed():
    w = torch.randn(8, 8, requires_grad=True)
    x = torch.randn(16, 8)

    def program():
        h = ebb.experimental.mark_rows(x * 1, torch.tensor(5))
        y = (h @ w).sigmoid()
        z = y * 2
        with torch.no_grad():
            y.data.zero_()  # unseen by autograd: eager's backward sees it
        return z[:5].sum()

    (expected,) = torch.autograd.grad(program(), [w])
    for _ in range(3):
        with ebb.region(EVERYTHING):
            loss = program()
        assert same_bits(expected, torch.autograd.grad(loss, [w])[0])


def test_eager_raises_and_so_do_we():
    w = torch.randn(8, 8, requires_grad=True)
    for _ in range(2):
        with ebb.region(EVERYTHING):
            h = ebb.experimental.mark_rows(torch.randn(16, 8), torch.tensor(5))
            y = (h @ w).sigmoid()
            z = y * 2
            y.mul_(3)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z[:5].sum().backward()


def test_graphs_that_are_dropped_give_their_pages_back(net):
    x, n = net.inputs(0), torch.tensor(20)
    gradients(net, x, n, region)
    for _ in range(30):
        loss = net(x, n, region)
        del loss
        gc.collect()
        assert ebb.stats()["paging"]["stashes"] == 0
    expected = gradients(net, x, n)
    assert same(expected, gradients(net, x, n, region))
    assert ebb.experimental.paging.step_ok()
    assert ebb.stats()["paging"]["recorded_steps"] == 1


def test_retained_graphs_and_second_backwards():
    net = Mlp(layers=2)
    n = torch.tensor(9)
    for seed in range(3):
        x = net.inputs(seed)
        loss = net(x, n, region)
        leaves = [x, *net.weights]
        first = torch.autograd.grad(loss, leaves, retain_graph=True)
        second = torch.autograd.grad(loss, leaves)
        expected = gradients(net, x, n)
        assert same(expected, first)
        assert same(expected, second)
    assert ebb.experimental.paging.step_ok()


def test_only_some_gradients_are_asked_for():
    net = Mlp(layers=3)
    n = torch.tensor(9)
    for seed in range(4):
        x = net.inputs(seed)
        loss = net(x, n, region)
        (found,) = torch.autograd.grad(loss, [net.weights[-1]])
        (expected,) = torch.autograd.grad(net(x, n), [net.weights[-1]])
        assert same_bits(expected, found)
        del loss
    assert ebb.experimental.paging.step_ok()


@pytest.fixture
def four_threads():
    """A function that runs 20 steps in each of four threads, and tells how many gradients of each
    were right. Between two steps a thread does what it is told to.
    """
    ebb.config.paging.headroom = 8.0
    nets = [Mlp(seed=seed) for seed in range(4)]
    loads = [torch.tensor(load) for load in (3, 11, 20, 40)]
    wanted = [gradients(net, net.inputs(1), n) for net, n in zip(nets, loads, strict=True)]
    gradients(nets[3], nets[3].inputs(1), loads[3], region)

    def run(between):
        right = [0] * 4

        def work(i):
            for _ in range(20):
                between()
                x = nets[i].inputs(1)
                found = gradients(nets[i], x, loads[i], region)
                right[i] += same(wanted[i], found)

        together(work, 4)
        return right

    return run


def test_threads(four_threads):
    """Each has a graph of its own; pages are shared."""
    assert four_threads(threading.Barrier(4).wait) == [20] * 4
    assert ebb.experimental.paging.step_ok()


def test_threads_whose_steps_have_no_common_end(four_threads):
    """A pool may then run full; whatever is wrong is told of."""
    right = four_threads(lambda: None)
    assert right == [20] * 4 or not ebb.experimental.paging.step_ok()


def test_checkpoint_and_apply():
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Sigmoid(), torch.nn.Linear(8, 8))

    class Experts(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x, n):
            return self.inner(ebb.experimental.mark_rows(x * 1, n))

    model = Experts(net)
    x, n = torch.randn(32, 8, requires_grad=True), torch.tensor([3, 0, 4])
    leaves = [x, *net.parameters()]
    expected = torch.autograd.grad(model(x, n)[:7].sum(), leaves)
    for _ in range(2):
        found = ebb.checkpoint(model, x, n, policy=EVERYTHING)
        assert same(expected, torch.autograd.grad(found[:7].sum(), leaves))
    ebb.apply(model, EVERYTHING, "inner")
    for _ in range(2):
        assert same(expected, torch.autograd.grad(model(x, n)[:7].sum(), leaves))


def test_verify_mode_shows_programs_that_read_dead_rows():
    w = torch.randn(8, 8, requires_grad=True)
    x, n = torch.randn(16, 8), torch.tensor(5)

    def run(live_only):
        with ebb.region(EVERYTHING):
            y = (ebb.experimental.mark_rows(x * 1, n) * w.sum()).sin()
            loss = y[:5].sum() if live_only else y.sum()
        return torch.autograd.grad(loss, [w])[0]

    for _ in range(2):
        with ebb.verify():
            assert run(False).isnan().any()


def test_verify_mode_compares_live_rows(net):
    mixed = ebb.Policy({"aten::mm": ebb.PAGE, "aten::native_layer_norm": ebb.PAGE})
    ebb.config.paging.dead_rows = "zero"
    for live in (40, 40, 40):
        x, n = net.inputs(live), torch.tensor(live)
        expected = gradients(net, x, n)
        with ebb.verify():
            found = gradients(net, x, n, lambda: ebb.region(mixed))
        assert same(expected, found)


@pytest.mark.parametrize("dead_rows", ["repeat", "zero", "nan"])
def test_what_dead_rows_come_back_as(dead_rows):
    ebb.config.paging.dead_rows = dead_rows
    x = torch.randn(16, 4, requires_grad=True)
    for _ in range(2):
        # In the last region, what has been paged leaves where it was still held.
        (ctx, y), last = paged(x, torch.tensor(6), ("only", "last"))
        found = ctx.saved_tensors[0].clone()
        assert y is not last
        assert same_bits(found[:6], (x + 1).detach()[:6])
        dead = found[6:]
        if dead_rows == "nan":
            assert bool(dead.isnan().all())
        else:
            assert torch.equal(dead, found[:1].expand(10, 4) * (dead_rows == "repeat"))


@pytest.mark.parametrize(
    ("step", "fate"),
    [(contextlib.nullcontext, "paged"), (ebb.experimental.paging.step, "saved")],
    ids=["paged", "stays"],
)
def test_reports_tell_what_was_paged(step, fate):
    net = Mlp(layers=1)
    with ebb.record_reports():
        for _ in range(2):
            with step():
                gradients(net, net.inputs(0), torch.tensor(9), products)
        report = ebb.report()

    fates = {row.op: row.fate for row in report.rows}
    assert fates["aten::mm.default"] == fate
    assert "paged" not in {fates[op] for op in fates if op != "aten::mm.default"}
    assert fate in str(report)
    assert (ebb.stats()["total"]["bytes_paged"] > 0) == (fate == "paged")
