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
def test_backward_on_a_device_that_failed_raises_and_drops_all(prefetch, step):
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
def test_graph_dropped_after_the_device_failed_asks_it_nothing(back, step):
    """Also not for pages that were coming back ahead."""
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
    """The graph gives back the pages of the kernels that did not fail."""
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


def test_prefetch_without_memory_leaves_it_to_the_asker(device):
    """Then the step brings nothing else back ahead: each try may cost all that the allocator has
    cached."""
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
def test_steps_without_memory_for_pools_run_without_them(host_headroom, step):
    """The host waits for each count."""
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
@pytest.mark.parametrize(
    ("room", "message"),
    [
        (4096, r".* of pinned memory .*Lower ebb.config.paging.host"),
        (None, "the page pools"),
    ],
    ids=["none for the second tier", "none"],
)
def test_warning_without_pinned_memory_names_the_setting(room, message, bracketed, step):
    """A pool without a second tier, or no pool."""
    ebb.config.paging.host_headroom = 0.0 if room is None else 4.0
    limit = 0 if room is None else torch.ops.late.host_usage()[0] + room
    with late.limited(host=limit), pytest.warns(UserWarning, match=f"could not allocate {message}"):
        assert step(bracketed=bracketed)
    stats = ebb.stats()["paging"]
    assert (stats["pools"] == []) == (room is None)
    assert stats["host_pool_bytes"] == 0
    for _ in range(2):
        assert step(bracketed=bracketed)
        assert ebb.experimental.paging.step_ok()
    assert ebb.stats()["paging"]["recorded_steps"] == (2 if room is None else 1)


@pytest.mark.parametrize("tier", ["device", "host"])
def test_memory_of_dropped_pools_is_reused_after_copies_back(tier, step):
    """Pinned memory belongs to no stream."""
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


def test_kernels_that_cannot_run_raise_in_the_first_forward():
    """Before anything depends on pages."""
    done = fork_server.run(["-c", BAD], cwd=TESTS)
    first, *rest = done.stdout.splitlines()
    assert "PAGE does not work on late:0: page kernel: no kernel image" in first, done.stderr
    assert rest == ["0 0", first, "0 0", "7 True"]
