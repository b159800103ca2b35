"""OFFLOAD on a device that has failed, or has no memory left."""

from __future__ import annotations

import contextlib
import functools
import gc

import pytest
import torch

import ebb
from ebb import _testing
from ebb_tests import device as late
from ebb_tests.device_leaves import assert_gradient, leaf
from ebb_tests.programs import offloaded
from ebb_tests.programs.offloaded import SINES, chain_of_sines, overwritten, sine_and_cosine

EVERYTHING = ebb.Policy({"*": ebb.OFFLOAD})


def chain(x):
    return chain_of_sines(x, 6).sum()


forward = functools.partial(offloaded.forward, length=6, policy=SINES)


def drop(x):
    y = forward(x)
    with late.broken():
        del y
        gc.collect()


def drop_what_was_written(x):
    with ebb.region(SINES):
        h, y = sine_and_cosine(x)
        with torch.no_grad():
            h.zero_()
    with late.broken():
        del y


def drop_in_backward(x):
    y = forward(x)
    with late.broken(), pytest.raises(RuntimeError, match="device-side assert"):
        torch.autograd.grad(y, x)


def break_in_a_region(x, breaking):
    with ebb.region(SINES):
        x.sin().cos()
        breaking.enter_context(late.broken())
        x.sin().cos()


def fail_in_a_region(x):
    with (
        contextlib.ExitStack() as breaking,
        pytest.raises(RuntimeError, match="device-side assert"),
    ):
        break_in_a_region(x, breaking)


@pytest.mark.parametrize("keep_last", [0, 2])
@pytest.mark.parametrize("fails", [drop, drop_what_was_written, drop_in_backward, fail_in_a_region])
def test_a_device_that_has_failed_is_an_exception(fails, keep_last, x):
    """And never the end of the process: destructors throw nothing."""
    used = ebb.stats()["offload"]["host_bytes_used"]  # by graphs
    ebb.config.offload.keep_last = keep_last
    torch.autograd.grad(forward(x), x)
    fails(x)
    gc.collect()
    late.synchronize()

    assert_gradient(torch.autograd.grad(forward(x), x)[0], chain, x)
    assert ebb.stats()["offload"]["stashes"] == ebb.stats()["offload"]["in_flight_bytes"] == 0
    assert ebb.stats()["offload"]["host_bytes_used"] == used


def test_what_was_taken_is_not_fetched_ahead_though_the_device_failed(x):
    """It lives, so nothing is copied for it; what is fetched ahead of it fails."""
    ebb.config.update(offload_in_flight_bytes=0, offload_prefetch_bytes=1 << 30)
    with ebb.region(SINES):
        living = x.sin()
        values = [x.cos().sin().cos(), living.cos(), x.tanh().sin().cos()]
    with late.broken(), pytest.raises(RuntimeError, match="device-side assert"):
        _ = values[1].grad_fn._saved_self
    fetched = ebb.stats()["offload"]["bytes_fetched"]
    found = [value.grad_fn._saved_self.cpu() for value in (values[2], values[1], values[0])]

    cpu = x.detach().cpu()
    expected = [cpu.tanh().sin(), cpu.sin(), cpu.cos().sin()]
    assert all(map(torch.equal, found, expected))
    assert ebb.stats()["offload"]["bytes_fetched"] == fetched + 2 * x.nbytes


def in_use(device):
    return torch.accelerator.memory_allocated(device)


def saved(y):
    """What each function saved, as backward asks for it; not what the input is."""
    node = y.grad_fn.next_functions[0][0]
    while node.next_functions[0][0].next_functions:
        yield node._saved_self
        node = node.next_functions[0][0]


def test_a_fetch_that_finds_no_memory_waits_for_what_is_leaving(x):
    ebb.config.update(offload_in_flight_bytes=0, offload_prefetch_bytes=0)
    early = forward(x)  # it has left
    late.synchronize()
    ebb.config.update(offload_in_flight_bytes=1 << 30, offload_prefetch_bytes=0)
    leaving = forward(x)
    assert ebb.stats()["offload"]["in_flight_bytes"] > 0
    with late.limited(device=in_use(x.device)):
        next(saved(early))

    assert ebb.stats()["offload"]["in_flight_bytes"] == 0
    for y in (leaving, early):
        assert_gradient(torch.autograd.grad(y, x)[0], chain, x)


def test_what_is_gathered_finds_no_memory_and_waits_for_what_is_leaving(x):
    ebb.config.offload.in_flight_bytes = 1 << 30
    with ebb.region(SINES):
        h = x.sin()
        y = h[:1].cos()
        del h
        z = chain(x)
        limit = late.limited(device=in_use(x.device))
        limit.__enter__()
    limit.__exit__(None, None, None)
    found = torch.autograd.grad(y.sum() + z, x)[0]
    assert_gradient(found, lambda x: x.sin()[:1].cos().sum() + chain(x), x)


def test_no_memory_to_fetch_ahead(x):
    """It is tried once, and not at each unpack; in the next step it is tried again."""
    ebb.config.update(offload_in_flight_bytes=0, offload_prefetch_bytes=1 << 30)
    torch.autograd.grad(forward(x, policy=EVERYTHING), x)
    one = torch.ones((), device=x.device, requires_grad=True)
    torch.autograd.grad(one.sin(), one)  # autograd's thread has now dropped its last gradient of x
    y = forward(x, policy=EVERYTHING)
    before = ebb.stats()["offload"]["fetched_late"]
    unpacked = saved(y)
    with late.limited(device=in_use(x.device) + 4 * x.nbytes):
        kept = [next(unpacked)]  # and three more, ahead
        torch.ops.late.counts()
        kept.append(next(unpacked))
        assert torch.ops.late.counts().get("allocate", 0) == 0
    kept += unpacked
    assert ebb.stats()["offload"]["fetched_late"] == before + len(kept) - 3
    assert_gradient(torch.autograd.grad(y, x)[0], chain, x)

    before = ebb.stats()["offload"]["fetched_late"]
    torch.autograd.grad(forward(x, policy=EVERYTHING), x)
    assert ebb.stats()["offload"]["fetched_late"] == before + 1


def test_what_comes_from_disk_waits_for_the_last_copy_of_its_host_memory(tmp_path, device):
    """The memory was given back when backward took another tensor, whose copy may not be done."""
    _testing.drain_offload()
    x = leaf(device)
    limit = ebb.stats()["offload"]["host_bytes_held"] + 2 * x.nbytes  # graphs have some
    ebb.config.update(
        offload_min_bytes=1,
        offload_disk=tmp_path,
        offload_pinned_limit=limit,
        offload_in_flight_bytes=0,
    )
    y = forward(x)

    assert ebb.stats()["offload"]["bytes_spilled"] > 0
    assert_gradient(torch.autograd.grad(y, x)[0], chain, x)


def test_what_a_write_made_leave_goes_to_disk_after_its_copy(tmp_path, device):
    """It has left for the device, which waits for the copy; the host has not."""

    def program(x):
        return (overwritten(x).sin().cos() * 2).sum()

    _testing.drain_offload()
    x = leaf(device)
    ebb.config.update(offload_min_bytes=1, offload_disk=tmp_path, offload_pinned_limit=x.nbytes)
    with ebb.region(SINES):
        y = program(x)

    assert_gradient(torch.autograd.grad(y, x)[0], program, x)


def test_what_is_not_waited_for_goes_to_disk_after_its_copy(tmp_path, device):
    """Of two that make room, the host waits for the first."""
    _testing.drain_offload()
    x = leaf(device)
    limit = ebb.stats()["offload"]["host_bytes_held"] + 16 * x.nbytes  # an eighth is two
    ebb.config.update(
        offload_min_bytes=1,
        offload_disk=tmp_path,
        offload_pinned_limit=limit,
        offload_in_flight_bytes=0,
    )
    y = offloaded.forward(x, length=24, policy=SINES)

    assert ebb.stats()["offload"]["bytes_spilled"] > 0
    found = torch.autograd.grad(y, x)[0]
    assert_gradient(found, lambda x: chain_of_sines(x, 24).sum(), x)
