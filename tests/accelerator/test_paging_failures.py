"""PAGE where something goes wrong: the device, its memory, its kernels."""

from __future__ import annotations

import gc

import pytest
import torch

import ebb
from ebb_tests import TESTS, fork_server
from ebb_tests import device as late
from ebb_tests.programs.paged import (
    Keep,
    Masked,
    gradients,
    is_right,
    masked,
    maybe_step,
    paged,
    region,
    same,
)

pytestmark = pytest.mark.usefixtures("fresh_pages")

MIB = 1 << 20


@pytest.fixture
def step(device):
    """Runs one, and tells whether its gradients are eager's."""
    net = Masked(layers=3, rows=256, width=64, device=device)
    x = net.inputs(0)

    def run(live=100, bracketed=False):
        n = net.live(live)
        expected = gradients(net, x, n)
        with maybe_step(bracketed):
            found = gradients(net, x, n, region)
        return same(expected, found)

    run.net, run.x = net, x
    return run


# A device that fails


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_backward_on_a_device_that_failed(prefetch, step):
    """The error is an exception, and all is dropped."""
    ebb.config.update(paging_prefetch=prefetch, paging_headroom=4.0)
    for _ in range(2):
        assert step(bracketed=bool(prefetch))
    n = step.net.live(100)

    def fail():
        with ebb.experimental.paging.step(False):
            loss = step.net(step.x, n, region)
            with late.broken():
                torch.autograd.grad(loss, step.net.weights)

    with pytest.raises(RuntimeError, match="device-side assert"):
        fail()
    late.synchronize()
    gc.collect()
    assert step()
    assert ebb.experimental.paging.step_ok()


@pytest.mark.parametrize("back", [0, 1])
def test_a_graph_that_is_dropped_after_the_device_failed(back, step):
    """Its destructors ask the device for nothing; not for what was coming back ahead either."""
    ebb.config.update(paging_prefetch=1, paging_headroom=4.0)
    for _ in range(2):
        assert step(bracketed=True)

    def fail():
        with ebb.experimental.paging.step():
            loss = step.net(step.x, step.net.live(100), region)
            if back:
                torch.autograd.grad(loss, step.net.weights[-1:], retain_graph=True)
            with late.broken():
                del loss
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert ebb.stats()["paging"]["stashes"] == 0
    assert step(bracketed=True)
    assert ebb.experimental.paging.step_ok()


def test_asking_a_device_that_failed_raises(step):
    for _ in range(2):
        assert step()
    with late.broken(), pytest.raises(RuntimeError, match="device-side assert"):
        step.net.n = gradients(step.net, step.x, step.x, region)
    for ask in (ebb.experimental.paging.step_ok, lambda: ebb.experimental.paging.found_inf("late")):
        loss = step.net(step.x, step.net.live(100), region)
        with late.broken(), pytest.raises(RuntimeError, match="device-side assert"):
            ask()
        del loss
    late.synchronize()
    assert step()


@pytest.mark.parametrize("which", [0, 1, 2, 5])
def test_a_kernel_that_fails_in_forward(which, step):
    """The pages of those that did not are given back with the graph."""
    ebb.config.paging.headroom = 1.0
    for _ in range(2):
        assert step()
    torch.ops.late.fail_page_kernel(which)
    with pytest.raises(RuntimeError, match="page kernel: too large"):
        step()
    torch.ops.late.fail_page_kernel(-1)
    gc.collect()
    assert step()
    assert ebb.experimental.paging.step_ok()


# Memory


def test_no_memory_for_what_comes_back_ahead(device):
    """It comes back when it is needed, and what is asked for comes back all the same. In that step
    nothing more comes ahead: each try may cost an allocator all that it has cached."""
    ebb.config.paging.prefetch = 1
    _, x, n = masked(device)
    for limited in (False, False, True, True, False):
        with ebb.experimental.paging.step():
            a, b, c, d = kept = paged(x, n, ("a", "b", "c", "d"))
            if limited:
                torch.ops.late.limit(torch.accelerator.memory_allocated(device), -1)
            found = [d[0].saved_tensors[0]]  # it stayed; the one before is to come ahead
            torch.ops.late.limit(-1, -1)
            before = torch.accelerator.memory_allocated(device)
            found += c[0].saved_tensors
            more = torch.accelerator.memory_allocated(device) - before
            found += b[0].saved_tensors + a[0].saved_tensors
        assert all(is_right(value, x, 4 - i) for i, value in enumerate(found))
        assert not limited or more < 1.5 * x.nbytes  # the one that was needed
        assert ebb.experimental.paging.step_ok()
        assert kept
    Keep.last = None


@pytest.mark.parametrize("host_headroom", [0.0, 4.0])
def test_no_memory_for_pools(host_headroom, step):
    """Steps run without them, and the host waits for each count."""
    ebb.config.paging.host_headroom = host_headroom
    n = step.net.live(100)
    expected = gradients(step.net, step.x, n)
    late.synchronize()

    def run():
        with ebb.experimental.paging.step(False):
            found = gradients(step.net, step.x, n, region)
            late.synchronize()
            torch.ops.late.limit(0, -1)  # until pools have been made
        return found

    with pytest.warns(
        UserWarning,
        match=r"could not allocate the page pools.*Lower ebb.config.paging.device_limit",
    ):
        found = run()
    torch.ops.late.limit(-1, -1)

    assert same(expected, found)
    assert ebb.stats()["paging"]["pools"] == []
    for _ in range(3):
        assert step()
        assert ebb.experimental.paging.step_ok()
    assert ebb.stats()["paging"]["pools"] != []


@pytest.mark.parametrize("bracketed", [False, True])
def test_no_pinned_memory_for_the_second_tier(bracketed, step):
    """The pool has none, and says which setting asks for it."""
    ebb.config.paging.host_headroom = 4.0
    with (
        late.limited(host=torch.ops.late.host_usage()[0] + 4096),
        pytest.warns(
            UserWarning,
            match=r"could not allocate .* of pinned memory .*Lower ebb.config.paging.host",
        ),
    ):
        assert step(bracketed=bracketed)
    stats = ebb.stats()["paging"]
    assert stats["pools"] != []
    assert stats["host_pool_bytes"] == 0
    for _ in range(2):
        assert step(bracketed=bracketed)
        assert ebb.experimental.paging.step_ok()
    assert ebb.stats()["paging"]["recorded_steps"] == 1


def test_no_pinned_memory_at_all(step):
    with (
        late.limited(host=0),
        pytest.warns(UserWarning, match="could not allocate the page pools"),
    ):
        assert step()
    assert ebb.stats()["paging"]["pools"] == []
    for _ in range(2):
        assert step()
        assert ebb.experimental.paging.step_ok()


@pytest.mark.parametrize("tier", ["device", "host"])
def test_pools_that_go_while_something_is_on_its_way_back(tier, step):
    """Their memory is not used again before; pinned memory is of no stream."""
    if tier == "host":
        ebb.config.paging.host_headroom = 4.0
    assert step(20)
    n, x, net = step.net.live(90 if tier == "host" else 20), step.x, step.net
    expected = gradients(net, x, n)
    for _ in range(2):
        loss = net(x, n, region)
        ebb.experimental.paging.reset()
        others = [torch.zeros(256, 64).to("late") for _ in range(4)]
        pinned = [torch.zeros(MIB, dtype=torch.uint8).pin_memory() for _ in range(4)]
        found = torch.autograd.grad(loss, [x, *net.weights])
        pinned += [torch.zeros(MIB, dtype=torch.uint8).pin_memory() for _ in range(4)]
        assert same(expected, found)
        assert others
        assert pinned
        assert step(20)


# Kernels


BAD = """
import sys
import torch, ebb._testing
from ebb_tests import device as late
late.load()
ebb._testing.set_page_mover(torch.ops.late.failing_page_mover())
from ebb_tests.programs.paged import Masked, gradients, region
net = Masked(device=torch.device("late", 0))
x, n = net.inputs(0), net.live(20)
for _ in range(2):
    try:
        net(x, n, region)
    except NotImplementedError as error:
        print(type(error).__name__, str(error).splitlines()[0])
    print(ebb.stats()["paging"]["stashes"], ebb.stats()["open_regions"])
late.have_pages()
print(len(gradients(net, x, n, region)), ebb.experimental.paging.step_ok())
"""


def test_kernels_that_cannot_run_show_in_the_first_forward():
    """A mover whose launches fail: before anything depends on pages."""
    done = fork_server.run(["-c", BAD], cwd=TESTS)
    first, *rest = done.stdout.splitlines()
    assert "PAGE does not work on late:0: page kernel: no kernel image" in first, done.stderr
    assert rest == ["0 0", first, "0 0", "7 True"]
