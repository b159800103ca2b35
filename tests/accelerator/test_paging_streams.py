"""PAGE with several compute streams: each waits for values of others, and frees its own memory."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

import ebb
from ebb_tests import device as late
from ebb_tests.other_threads import together
from ebb_tests.programs.paged import (
    EVERYTHING,
    Keep,
    Masked,
    asks_when_it_dies,
    fresh,
    gradients,
    is_right,
    masked,
    maybe_step,
    page_and_bring_back,
    paged,
    region,
    same,
    wait_for_all,
)

pytestmark = pytest.mark.usefixtures("fresh_pages")


@pytest.fixture
def one(device, streams):
    """Pools are there; x and the number of its valid rows. All streams have waited."""
    _, x, n = masked(device)
    for _ in range(2):
        for ctx, _ in paged(x, n, ("a", "b")):
            assert ctx.saved_tensors[0] is not None
    Keep.last = None
    late.synchronize()
    wait_for_all(device, streams)
    return x, n


def assert_steps_are_exact(run, expected, streams=(), brackets=(False,) * 4, fixed_order=True):
    """Runs steps, each in `paging.step()` or not, and compares their gradients with `expected`."""
    wait_for_all("late:0", streams)
    for bracketed in brackets:
        with maybe_step(bracketed, fixed_order):
            found = run()
        wait_for_all("late:0", streams)
        assert same(expected, found)
        assert ebb.experimental.paging.step_ok()


SOME_BRACKETED = (False, False, True, True, True)


def test_micro_batches_on_two_streams_in_turn(device, streams):
    """All forwards, then all backwards."""
    nets = [Masked(device=device, seed=seed) for seed in range(4)]
    data = [(net.inputs(1), net.live(5 + 7 * i)) for i, net in enumerate(nets)]
    expected = [g for net, given in zip(nets, data, strict=True) for g in gradients(net, *given)]

    def run():
        losses, found = [], []
        for i, net in enumerate(nets):
            with streams[i % 2]:
                losses.append(net(*data[i], region))
        for i, net in reversed(list(enumerate(nets))):
            with streams[i % 2]:
                found = [*torch.autograd.grad(losses.pop(), [data[i][0], *net.weights]), *found]
        return found

    assert_steps_are_exact(run, expected, streams)
    assert ebb.stats()["paging"]["recorded_steps"] == 1


@pytest.mark.parametrize("bracketed", [False, True])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_pipeline_on_two_streams(prefetch, bracketed, device, streams):
    """One forward and one backward in turn, each micro-batch on one of two streams."""
    ebb.config.update(paging_prefetch=prefetch, paging_headroom=4.0)
    net = Masked(device=device)
    n, inputs = net.live(20), [net.inputs(seed) for seed in range(6)]
    expected = [g for x in inputs for g in gradients(net, x, n)]

    def run():
        losses, found = [], []

        def backward():
            batch, loss = losses.pop(0)
            with streams[batch % 2]:
                found.extend(torch.autograd.grad(loss, [inputs[batch], *net.weights]))

        for batch, x in enumerate(inputs):
            with streams[batch % 2]:
                losses.append((batch, net(x, n, region)))
            if batch >= 2:
                backward()
        while losses:
            backward()
        return found

    assert_steps_are_exact(run, expected, streams, [bracketed] * 4)


def test_layers_on_two_streams(device, streams):
    """Each layer of one model on one of two streams; what was paged on one comes back there."""
    net, x, n = masked(device, layers=4)
    expected = gradients(net, x, n)

    def run(inside=region):
        lives = net.places < n
        h = torch.where(lives, x, 0)
        for index in range(4):
            here, before = streams[index % 2], torch.accelerator.current_stream(device)
            here.wait_stream(before)
            h.record_stream(here)
            with here, inside():
                h = net.layer(ebb.experimental.mark_rows(h.mul(1.5), n), index)
            before.wait_stream(here)
            h.record_stream(before)
        loss = torch.where(lives, h, 0).square().sum()
        return torch.autograd.grad(loss, [x, *net.weights])

    assert_steps_are_exact(lambda: run(torch.enable_grad), expected, streams, [False])
    assert late.findings() == []
    assert_steps_are_exact(run, expected, streams, SOME_BRACKETED)


@pytest.mark.parametrize("part", ["made on one", "ends on one"])
def test_value_paged_at_region_end_was_made_on_another_stream(part, device, streams):
    """The stream on which a region ends pages what only recipes read."""
    policy = ebb.Policy({"aten::sin": ebb.PAGE})
    net, x, n = masked(device)

    def program(x):
        h = ebb.experimental.mark_rows(x * 1, n).sin()
        return torch.where(net.places < n, h.exp().cos(), 0).sum()

    late.synchronize()
    for _ in range(3):
        around = contextlib.nullcontext() if part == "made on one" else streams[1]
        with around, ebb.region(policy), streams[0]:
            loss = program(x)
        with streams[0]:
            found = torch.autograd.grad(loss, [x])
        late.synchronize()
        assert same(torch.autograd.grad(program(x), [x]), found)
        assert ebb.experimental.paging.step_ok()


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "in pools"])
def test_another_stream_asks_for_what_one_has_paged(recorded, device, streams, one):
    x, n = one
    if recorded:
        ebb.experimental.paging.reset()
    with streams[0]:
        kept = paged(x, n)
    with late.behind(streams[1], streams[0]):
        found = kept[0][0].saved_tensors[0].clone()
    torch.accelerator.synchronize()
    assert is_right(found, x, 1)


@pytest.mark.parametrize("ordered", [True, False], ids=["each waits", "none waits"])
def test_more_streams_ask_for_what_one_brought_back(ordered, device, streams, one):
    """They need not wait for each other: all come after the forward that saved it."""
    x, n = one
    kept = paged(x, n)
    wait_for_all(device, streams)
    found = []
    for stream in (*streams, streams[0]):
        if ordered:
            stream.wait_stream(streams[0])
        with stream:
            found.append(kept[0][0].saved_tensors[0].clone())
    torch.accelerator.synchronize()
    assert all(is_right(value, x, 1) for value in found)


def test_a_write_on_another_stream_comes_after_the_rows_have_left(device, streams, one):
    x, n = one
    with ebb.region(EVERYTHING):
        with streams[0]:
            h = ebb.experimental.mark_rows(x.detach() + 1, n)
            y = Keep.apply(h.requires_grad_())
            ctx = Keep.last
        with late.behind(streams[1], streams[0]), torch.no_grad():
            h.data.zero_()
    with late.behind(streams[0], streams[1]):
        found = ctx.saved_tensors[0].clone()
    late.synchronize()
    assert y is not None
    assert not found.isnan().any()


def test_memory_goes_back_to_the_stream_that_allocated_it(device, streams, one):
    """That stream knows nothing of the lane."""
    x, n = one
    for _ in range(3):
        with ebb.region(EVERYTHING, "a"):
            with streams[0]:
                h = ebb.experimental.mark_rows(x.detach() + 1, n).requires_grad_()
            with late.behind(streams[1], streams[0]):
                out = Keep.apply(h)  # before torch 2.13 the node dies with its result
                ctx = Keep.last
        streams[0].wait_stream(streams[1])
        del h
        with streams[1], ebb.region(EVERYTHING, "b"):
            Keep.apply(ebb.experimental.mark_rows(x + 2, n))  # frees what "a" has paged
        with streams[0]:
            scratch = [torch.zeros_like(x) for _ in range(4)]
        with streams[1]:
            found = ctx.saved_tensors[0].clone()
        Keep.last = ctx = None
        del out
        wait_for_all(device, streams)
        assert is_right(found, x, 1)
        assert not any(tensor.any() for tensor in scratch)


def test_memory_of_one_stream_does_not_wait_for_another(device, streams, one):
    """The other stream waits for the lane, and runs nothing meanwhile."""
    x, n = one

    def page(name):
        with ebb.region(EVERYTHING, name):
            h = ebb.experimental.mark_rows(x + 1, n)
            Keep.apply(h)
            return h.data_ptr(), Keep.last

    with streams[0]:
        place, first = page("a")
    with streams[1]:
        others = [page(name)[1] for name in ("a", "b")]  # the second waits for the lane
    with streams[0]:
        last = page("b")[1]  # and lets go what the first has paged
        taken = [torch.empty_like(x) for _ in range(4)]
    assert place in [tensor.data_ptr() for tensor in taken]
    assert all((first, last, *others))
    Keep.last = None
    wait_for_all(device, streams)


def test_pools_serve_a_stream_that_has_not_waited_for_the_one_that_made_them(device, streams):
    nets = [Masked(device=device) for _ in streams]
    data = [(net.inputs(0), net.live(20)) for net in nets]
    expected = gradients(nets[1], *data[1])
    late.synchronize()
    for stream, net, given in zip(streams, nets, data, strict=True):
        with stream:
            found = gradients(net, *given, region)
        assert ebb.stats()["paging"]["recorded_steps"] == 1
    late.synchronize()
    assert same(expected, found)


def test_memory_of_a_dropped_stash_is_reused_after_the_lane(device, streams, one):
    x, n = one
    for _ in range(3):
        with streams[0], ebb.region(EVERYTHING):
            h = ebb.experimental.mark_rows(x.detach() + 1, n).requires_grad_()
            out = Keep.apply(h)  # as above
            ctx = Keep.last
        with late.behind(streams[1], streams[0]):
            found = ctx.saved_tensors[0].clone()  # it lives
        with late.behind(streams[0], streams[1]):
            Keep.last = ctx = h = None
            del out
            scratch = [torch.zeros_like(x) for _ in range(4)]
        wait_for_all(device, streams)
        assert is_right(found, x, 1)
        assert not any(tensor.any() for tensor in scratch)


def test_a_graph_that_is_dropped_on_another_stream(device, streams, one):
    """Pages that were coming back ahead belong to the stream of the graph."""
    x, n = one
    ebb.config.paging.prefetch = 1
    ebb.experimental.paging.reset()
    for _ in range(4):
        with ebb.experimental.paging.step(False), streams[0]:
            pass
        with ebb.experimental.paging.step(), streams[0]:
            kept = paged(x, n, ("a", "b", "c"))
            ctx = kept[-1][0]
            back = ctx.saved_tensors[0].clone()
            with streams[1]:
                del kept, ctx
                Keep.last = None
                scratch = [torch.zeros_like(x) for _ in range(3)]
            again = [torch.zeros_like(x) for _ in range(6)]
        torch.accelerator.synchronize()
        assert is_right(back, x, 3)
        assert all(not tensor.any() for tensor in [*scratch, *again])
        ebb.experimental.paging.step_ok()


def test_threads_of_two_devices(device):
    """Backwards of both at once, in threads of autograd's and of the user's."""
    nets = [Masked(device=torch.device("late", i % 2), seed=i) for i in range(4)]
    data = [(net.inputs(1), net.live(11)) for net in nets]
    expected = [gradients(net, *given) for net, given in zip(nets, data, strict=True)]
    ebb.config.paging.headroom = 8.0
    with ebb.experimental.paging.step(False):
        for net, given in zip(nets, data, strict=True):
            gradients(net, *given, region)
    late.synchronize()
    wrong = []
    barrier = threading.Barrier(4)

    def work(i):
        with torch.Stream(device=nets[i].device):
            for _ in range(10):
                barrier.wait(60)
                found = gradients(nets[i], *data[i], region)
                if not same(expected[i], found):
                    wrong.append(i)

    with ebb.experimental.paging.step(False):
        together(work, 4)
    assert wrong == []
    assert ebb.experimental.paging.step_ok()


def test_one_graph_over_two_devices(device):
    """Its backward has a thread for each device."""
    nets = [Masked(device=torch.device("late", i)) for i in (0, 1)]
    data = [(net, net.inputs(0), net.live(20)) for net in nets]
    leaves = [leaf for net, x, _ in data for leaf in (x, *net.weights)]
    expected = [g for given in data for g in gradients(*given)]

    def run():
        loss = sum(net(x, n, region).to("late:0") for net, x, n in data)
        return torch.autograd.grad(loss, leaves)

    assert_steps_are_exact(run, expected, (), SOME_BRACKETED, fixed_order=False)


def test_streams_that_run_by_themselves(device, streams):
    """Threads run each task late at random."""
    ebb.config.paging.headroom = 2.0
    net = Masked(device=device)
    given = [(net.inputs(seed), net.live(20 + seed)) for seed in range(4)]
    expected = [gradients(net, *each) for each in given]
    late.synchronize()
    with late.delayed(50, 300):
        for number in range(12):
            with streams[number % 2]:
                found = gradients(net, *given[number % 4], region)
            wait_for_all(device, streams)
            assert same(expected[number % 4], found)
            assert ebb.experimental.paging.step_ok()


def test_another_stream_asks_again_after_an_error_at_the_end_of_the_step(device, streams):
    """The stream that asks waits for the one that brought it back."""
    _, x, n = masked(device)
    with fresh(device_limit=16):
        kept = paged(x, n)
        ctx = kept[0][0]
        wait_for_all(device, streams)
        with streams[0], pytest.raises(ValueError, match=r"device_limit, .* is too small"):
            ctx.saved_tensors  # noqa: B018
        with streams[1]:
            found = ctx.saved_tensors[0].clone()
        late.synchronize()
        assert is_right(found, x, 1)


def test_write_on_another_stream_to_a_resident_layer(device, streams):
    """The writer copies it first; backward is on a stream that knows nothing of the write."""
    net = Masked(device=device)
    x, n, w = net.inputs(0), net.live(20), net.weights[0]
    lives = net.places < n
    written = ebb.Policy({"aten::mm": ebb.PAGE})

    def program():
        h = ebb.experimental.mark_rows(x @ w, n)
        y = h.exp().cos()
        kept = h.sin()
        with late.behind(streams[1], streams[0]):
            h.data.mul_(2.0)
        return torch.where(lives, y, 0).sum(), (kept, h)

    late.synchronize()
    for _ in range(3):
        with ebb.experimental.paging.step(), streams[0]:
            with ebb.region(written):
                loss, kept = program()
            found = torch.autograd.grad(loss, [w])
        late.synchronize()
        with streams[0]:
            expected = torch.autograd.grad(torch.where(lives, (x @ w).exp().cos(), 0).sum(), [w])
        late.synchronize()
        assert same(expected, found)
        assert kept
        assert ebb.experimental.paging.step_ok()
    assert ebb.stats()["paging"]["resident"] > 0


def test_finalizer_of_freed_memory_may_ask_for_statistics(device):
    """Python's finalizers run when the engine's lock has been given back."""
    _, x, n = masked(device)
    for _ in range(2):
        page_and_bring_back(x, n)
    with ebb.region(EVERYTHING, "a"):
        h = ebb.experimental.mark_rows(x + 1, n)
        found = asks_when_it_dies(h.untyped_storage())
        kept = Keep.apply(h)
        del h
    assert found == []  # its rows are leaving
    kept = [kept, *paged(x, n, ("b",))]
    assert found == [True]
    assert kept
