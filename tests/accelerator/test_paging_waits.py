"""The waits of PAGE: each is needed, and there are no more."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch

import ebb
from ebb_tests import device as late
from ebb_tests.programs.paged import (
    Keep,
    Masked,
    forget,
    gradients,
    masked,
    maybe_step,
    paged,
    region,
    wait_for_all,
)

pytestmark = pytest.mark.usefixtures("fresh_pages")


def steady(*devices, bracketed=False):
    """Runs until pools are there; gives a step of each device's own."""

    def step_of(net):
        x, n = net.inputs(0), net.live(20)

        def step():
            with maybe_step(bracketed):
                return gradients(net, x, n, region)

        return step

    steps = [step_of(Masked(device=device)) for device in devices]
    if len(steps) > 1:
        together(steps)
    for step in steps * 3:
        step()
        assert ebb.experimental.paging.step_ok()
    late.synchronize()
    torch.ops.late.counts()
    return steps


def together(steps):
    with ebb.experimental.paging.step(False):  # sizes the pools of all
        for step in steps:
            step()


def counted(*names):
    counts = torch.ops.late.counts()
    return [counts.get(name, 0) for name in names]


# The host


@pytest.mark.parametrize("bracketed", [False, True])
@pytest.mark.parametrize("settings", [{}, {"page_rows": 4}, {"host_headroom": 2.0}], ids=str)
def test_host_neither_waits_nor_asks_in_a_steady_step(settings, bracketed, device):
    ebb.config.update({f"paging.{name}": value for name, value in settings.items()})
    (step,) = steady(device, bracketed=bracketed)
    for _ in range(2):  # the second time, there are as many events as three steps need
        torch.ops.late.counts()
        for _ in range(3):
            step()
        counts = torch.ops.late.counts()
        assert ebb.experimental.paging.step_ok()

    for what in ("synchronize", "query", "copies that the host waited for", "allocate pinned"):
        assert counts.get(what, 0) == 0, what
    assert counts.get("event made", 0) == 0  # making one takes as long as recording it
    assert counts["wait"] > 0
    assert counts["record"] > 0


def test_host_waits_for_nothing_after_a_dropped_graph(device):
    net = Masked(device=device)
    (step,) = steady(device)
    for _ in range(3):
        net(net.inputs(0), net.live(20), region)
        gc.collect()
        torch.ops.late.counts()
        step()
        assert counted("synchronize", "query") == [0, 0]


@pytest.mark.parametrize("devices", [["late:0"], ["late:0", "late:1"]], ids=len)
def test_asking_waits_for_devices_with_work_and_gives_them_none(devices, device):
    """The flags are on their way since the step has ended. Only the first device runs a step."""
    step = steady(*map(torch.device, devices))[0]
    step()
    torch.ops.late.counts()
    assert ebb.experimental.paging.step_ok()
    assert counted("synchronize", "record", "wait") == [1, 0, 0]


@pytest.mark.parametrize("ask", ["step_ok", "optimizer"])
def test_asking_waits_for_one_event_of_each_device(ask, device):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    steps = steady(torch.device("late", 0), torch.device("late", 1))
    assert len(ebb.stats()["paging"]["pools"]) >= 4
    together(steps)
    assert ebb.experimental.paging.step_ok() if ask == "step_ok" else optimizer.step() is None
    assert counted("synchronize", "query") == [2, 0]
    assert ebb.experimental.paging.step_ok()
    assert counted("synchronize") == [0]  # it is known


@pytest.mark.parametrize("ask", ["step_ok", "optimizer", "found_inf", "before backward"])
def test_asking_waits_for_pools_alone(ask, device):
    """And not for work that the compute stream was given after the last rows had left or come back.
    A stream runs its work only when something waits for it."""
    (step,) = steady(device)
    net = Masked(device=device)
    parameter = torch.ones(4).to(device).requires_grad_()
    parameter.grad = torch.ones(4).to(device)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    loss = net(net.inputs(0), net.live(20), region) if ask == "before backward" else None
    found = [loss] if loss is not None else step()
    for _ in range(5):
        found = [g * 2 for g in found]
    behind = torch.Event("late")
    behind.record()
    if ask == "optimizer":
        optimizer.step()
    elif ask == "found_inf":
        ebb.experimental.paging.found_inf(device)
    else:
        assert ebb.experimental.paging.step_ok()

    assert not behind.query()
    late.synchronize()


def test_asking_within_a_bracketed_step_waits_for_what_pools_were_given(device):
    net, x, n = masked(device)
    for _ in range(3):
        with ebb.experimental.paging.step(False):
            gradients(net, x, n, region)
            net(x, net.live(20), region)
            assert ebb.experimental.paging.step_ok()
    with ebb.experimental.paging.step(False):
        loss = net(x, net.live(40), region)
        assert not ebb.experimental.paging.step_ok()
    assert loss is not None


@pytest.mark.parametrize("asked", [False, True])
def test_dropped_pools_are_waited_for_once(asked, device):
    """And not at all if somebody has asked."""
    (step,) = steady(device)
    assert len(ebb.stats()["paging"]["pools"]) > 1
    step()
    if asked:
        assert ebb.experimental.paging.step_ok()
    torch.ops.late.counts()
    ebb.experimental.paging.reset()
    assert counted("synchronize") == [0 if asked else 1]


# Streams that need not wait


def test_stream_that_has_copied_rows_waits_for_nothing(device):
    net = Masked(device=device)
    kept = paged(net.inputs(0), net.live(20))
    torch.ops.late.counts()
    assert kept[0][0].saved_tensors[0] is not None
    assert counted("wait") == [0]


def test_one_stream_needs_few_events(device):
    """Each stash and restore has one event to wait for before and one after it."""
    net = Masked(device=device)
    (step,) = steady(device)
    before = ebb.stats()["paging"]["stashed"]
    step()
    records, waits = counted("record", "wait")
    stashed = ebb.stats()["paging"]["stashed"] - before

    assert stashed > 0
    assert records <= 4 * stashed + 1  # and one for the flags
    assert waits <= 3 * stashed + len(net.weights)


def test_layer_waits_only_for_what_its_own_stream_has_paged(device, streams):
    """The other stream has paged rows since, and runs nothing."""
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


# Each wait that is left out shows


class Single(Masked):
    """Each node of its backward asks for one paged tensor, so each wait is the only one."""

    def layer(self, h, index):
        return h.sin().exp().mul(0.5).tanh()


class Program:
    """A step to be run again and again, from the same start, and what it should give."""

    def __init__(self, device, **settings):
        ebb.config.update(
            {f"paging.{name}": value for name, value in settings.items()}, paging_headroom=4.0
        )
        self.net = Single(layers=3, device=device)
        self.x, self.n, self.many = self.net.inputs(0), self.net.live(20), self.net.live(40)
        self.streams = torch.Stream(device=device), torch.Stream(device=device)
        self.device = device

    def loss(self):
        return self.net(self.x, self.n, region)

    def plain(self):
        return torch.autograd.grad(self.loss(), [self.x])

    def bracketed(self):
        with ebb.experimental.paging.step():
            return self.plain()

    def too_small(self):
        """Pools with room for the rows of `plain` only."""
        ebb.experimental.paging.reset()
        ebb.config.paging.headroom = 1.0
        self.plain()
        ebb.experimental.paging.step_ok()

    def join(self):
        wait_for_all(self.device, self.streams)


def pages(program):
    """Not stacks: two micro-batches come back in the order in which they were paged."""
    with ebb.experimental.paging.step():
        losses = [program.loss() for _ in range(2)]
        return [g for loss in losses for g in torch.autograd.grad(loss, [program.x])]


def two_streams(program):
    """Micro-batches on two streams; each stream waits for the other in the end only."""
    program.join()
    losses = []
    for stream in program.streams:
        with stream:
            losses.append(program.loss())
    found = []
    for stream in reversed(program.streams):
        with stream:
            found += torch.autograd.grad(losses.pop(), [program.x])
    program.join()
    return found


def another_stream_asks(program):
    """Paged on one stream, fetched on another; what came ahead is for a third."""
    program.join()
    found = []
    with ebb.experimental.paging.step():
        with program.streams[0]:
            kept = paged(program.x, program.n, ("layer 1", "layer 2", "layer 3"))
        program.join()
        for number in (2, 1, 0):
            stream = program.streams[1] if number else torch.accelerator.current_stream()
            with stream:
                torch.empty_like(program.x).fill_(1.0)  # what comes back gets its memory
                found.append(kept[number][0].saved_tensors[0][:20] * 1)
        program.join()
        del kept
        Keep.last = None
    return found


def a_write(program):
    """To a storage whose rows are leaving."""
    w = program.net.weights[0]
    with region():
        h = ebb.experimental.mark_rows(program.x.detach() * 1, program.n)
        y = (h @ w).sigmoid()
        z = y * 2
        y.data.zero_()
    loss = torch.where(program.net.places < program.n, z, 0).sum()
    return torch.autograd.grad(loss, [w])


def partial_backward(program):
    with ebb.experimental.paging.step(False):
        middle = []
        layer, program.net.layer = program.net.layer, None
        program.net.layer = lambda h, index: middle.append(layer(h, index)) or middle[-1]
        loss = program.loss()
        program.net.layer = layer
        found = torch.autograd.grad(loss, middle[:1])
        del loss
        middle.clear()
        scratch = [torch.zeros_like(program.x) for _ in range(8)]
    return [*found, *scratch]


def a_dropped_graph(program):
    with ebb.experimental.paging.step(False):
        loss = program.loss()
        del loss
        scratch = [torch.zeros_like(program.x) for _ in range(8)]
        return [*scratch, *program.plain()]


def asked(program):
    """Whether there was room, when there was none."""
    torch.autograd.grad(program.net(program.x, program.many, region), [program.x])
    return [torch.tensor(ebb.experimental.paging.step_ok())]


def a_flag(program):
    found = program.plain()
    flag = ebb.experimental.paging.found_inf(program.device)
    return [*found, flag, *program.plain()]


def a_reset(program):
    """What it drops may still be coming back; and what it found is told."""
    kept = program.loss()
    loss = program.net(program.x, program.many, region)
    ebb.experimental.paging.reset()
    found = torch.autograd.grad(loss, [program.x])
    assert kept is not None
    del kept  # and with it the pool
    pinned = torch.ones(4096, dtype=torch.uint8).pin_memory()
    return [*found, pinned, torch.tensor(ebb.experimental.paging.step_ok())]


PROGRAMS = {  # each with settings of paging
    "plain": (Program.plain, {"prefetch": 0}),
    "bracketed": (Program.bracketed, {"prefetch": 1}),  # one layer stays, others come back ahead
    "not_ahead": (Program.bracketed, {"prefetch": 0}),
    "pages": (pages, {"prefetch": 1}),
    "two_streams": (two_streams, {}),
    "another_stream_asks": (another_stream_asks, {"prefetch": 1}),
    "a_write": (a_write, {}),
    "partial_backward": (partial_backward, {"prefetch": 1}),
    "a_dropped_graph": (a_dropped_graph, {}),
    "asked": (asked, {}),
    "a_flag": (a_flag, {}),
    "a_reset": (a_reset, {"host_headroom": 4.0}),
}


def lane_of(device):
    """The number of ebb's stream: the other one of the first wait in a step on the default one."""
    program = Program(device).plain
    for _ in range(2):
        program()
    late.synchronize()
    torch.ops.late.drop_wait(0)
    program()
    torch.ops.late.drop_wait(-1)
    late.synchronize()
    late.findings()
    forget()
    return max(torch.ops.late.left_out())


def on_cpu(tensors):
    return [tensor.detach().cpu() for tensor in tensors]


def differs(expected, found):
    return any(
        not torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
        for a, b in zip(expected, found, strict=True)
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_wait_that_is_left_out_shows(name, device):
    lane = lane_of(device)
    step, settings = PROGRAMS[name]
    program = Program(device, **settings)

    def start():
        """Whatever the last run has done to pools."""
        for _ in range(3):
            with contextlib.suppress(RuntimeError):  # of before
                program.too_small() if name in ("asked", "a_reset") else step(program)
                ebb.experimental.paging.step_ok()
        late.synchronize()
        late.findings()

    def run():
        try:
            return on_cpu(step(program))
        except RuntimeError as error:
            return error

    start()
    assert late.findings() == []
    runs = late.each_wait_left_out(run)
    _, expected, found = next(runs)
    assert found == []
    assert not isinstance(expected, Exception)
    start()
    ours, silent = 0, []
    for which, result, found in runs:
        if lane in torch.ops.late.left_out():  # else torch's, or the program's own
            ours += 1
            if not found and not isinstance(result, Exception) and not differs(expected, result):
                silent.append(which)
        start()
    assert ours > 0
    assert silent == []
