"""OFFLOAD: memory is freed after its copies, also where there is none left or the device failed."""

from __future__ import annotations

import contextlib
import functools
import gc
import time

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import ebb
from ebb import _testing
from ebb_tests import device as late
from ebb_tests.device_leaves import assert_gradient
from ebb_tests.programs import offloaded
from ebb_tests.programs.offloaded import SINES, chain_of_sines, overwritten, sine_and_cosine

EVERYTHING = ebb.Policy({"*": ebb.OFFLOAD})


def chain(x):
    return chain_of_sines(x, 6).sum()


forward = functools.partial(offloaded.forward, length=6, policy=SINES)


def assert_backward_is_exact(y, x, program=chain):
    assert_gradient(torch.autograd.grad(y, x)[0], program, x)


def stats(name):
    return ebb.stats()["offload"][name]


def in_use(device):
    return torch.accelerator.memory_allocated(device)


# Memory that is freed


def test_no_memory_is_left_on_the_device_after_a_step(x):
    torch.autograd.grad(forward(x), x)
    gc.collect()
    late.synchronize()
    ebb.stats()["offload"]
    before = in_use(x.device)
    y = forward(x)
    late.synchronize()  # the copies are done, and ebb has not noticed yet
    torch.autograd.grad(y, x)
    del y

    deadline = time.monotonic() + 10  # autograd's thread may have the last reference
    while in_use(x.device) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert in_use(x.device) <= before


@pytest.mark.parametrize("under_a_limit", [False, True])
def test_host_memory_is_freed_after_its_copies(under_a_limit, x):
    """A limit frees it, or a drain, before the host has asked whether the copies are done."""
    torch.autograd.grad(forward(x), x)
    assert stats("host_bytes_held") > stats("host_bytes_used")
    if under_a_limit:
        ebb.config.offload.pinned_limit = 1
        with ebb.region(SINES):
            x.sin().cos()
    else:
        _testing.drain_offload()
    late.synchronize()


def test_host_memory_is_freed_after_a_copy_that_is_never_fetched(x):
    """A write sent the tensor early, and then the tensor was dropped."""
    with ebb.region(SINES):
        h, y = sine_and_cosine(x)
        with torch.no_grad():
            h.zero_()
    ebb.config.update(offload_min_bytes=1, offload_pinned_limit=1)
    with ebb.region(SINES):
        x.sin().cos()  # the limit holds from now on
    del y, h
    late.synchronize()


def test_dropped_tensor_is_freed_though_others_are_away(x):
    with ebb.region(SINES):
        h, first = sine_and_cosine(x)
        second = x.sin().cos()
    watch = StorageWeakRef(h.untyped_storage())
    del h, first
    assert not watch.expired()
    with ebb.region(SINES):
        third = x.sin().cos()

    assert watch.expired()
    del second, third


def test_drain_frees_what_was_on_its_way_back(x):
    used = stats("host_bytes_used")  # by graphs
    with ebb.region(SINES):
        first, second = x.sin().cos(), x.sin().cos()
    late.synchronize()
    torch.autograd.grad(second, x, torch.ones_like(second))  # and the first one ahead
    del first, second
    _testing.drain_offload()

    assert stats("host_bytes_held") == stats("host_bytes_used") == used


def test_fetched_tensor_is_not_sent_any_more(x):
    """It was among the last ones, which are kept."""
    ebb.config.offload.keep_last = 1
    with ebb.region(SINES):
        y = x.sin().cos()
    late.synchronize()
    _ = y.grad_fn._saved_self
    before = stats("bytes_sent")
    with ebb.region(SINES):
        z = x.sin().cos()  # is the last one now

    assert stats("bytes_sent") == before
    assert torch.equal(y.grad_fn._saved_self.detach().cpu(), x.detach().cpu().sin())
    del z


# A device that failed


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
def test_failed_device_raises_and_ends_no_process(fails, keep_last, x):
    """Destructors throw nothing."""
    used = stats("host_bytes_used")  # by graphs
    ebb.config.offload.keep_last = keep_last
    torch.autograd.grad(forward(x), x)
    fails(x)
    gc.collect()
    late.synchronize()

    assert_backward_is_exact(forward(x), x)
    assert stats("stashes") == stats("in_flight_bytes") == 0
    assert stats("host_bytes_used") == used


def test_taken_tensor_is_not_fetched_ahead_though_the_device_failed(x):
    """It lives, so nothing is copied for it; what is fetched ahead of it fails."""
    ebb.config.update(offload_in_flight_bytes=0, offload_prefetch_bytes=1 << 30)
    with ebb.region(SINES):
        living = x.sin()
        values = [x.cos().sin().cos(), living.cos(), x.tanh().sin().cos()]
    with late.broken(), pytest.raises(RuntimeError, match="device-side assert"):
        _ = values[1].grad_fn._saved_self
    fetched = stats("bytes_fetched")
    found = [value.grad_fn._saved_self.cpu() for value in (values[2], values[1], values[0])]

    cpu = x.detach().cpu()
    expected = [cpu.tanh().sin(), cpu.sin(), cpu.cos().sin()]
    assert all(map(torch.equal, found, expected))
    assert stats("bytes_fetched") == fetched + 2 * x.nbytes


# No memory left


def saved(y):
    """The tensor that each function saved, unpacked in the order of backward, without the input."""
    node = y.grad_fn.next_functions[0][0]
    while node.next_functions[0][0].next_functions:
        yield node._saved_self
        node = node.next_functions[0][0]


def test_fetch_that_finds_no_memory_waits_for_what_is_leaving(x):
    ebb.config.update(offload_in_flight_bytes=0, offload_prefetch_bytes=0)
    early = forward(x)  # it has left
    late.synchronize()
    ebb.config.update(offload_in_flight_bytes=1 << 30, offload_prefetch_bytes=0)
    leaving = forward(x)
    assert stats("in_flight_bytes") > 0
    with late.limited(device=in_use(x.device)):
        next(saved(early))

    assert stats("in_flight_bytes") == 0
    for y in (leaving, early):
        assert_backward_is_exact(y, x)


def test_gathered_part_that_finds_no_memory_waits_for_what_is_leaving(x):
    ebb.config.offload.in_flight_bytes = 1 << 30
    with ebb.region(SINES):
        h = x.sin()
        y = h[:1].cos()
        del h
        z = chain(x)
        limit = late.limited(device=in_use(x.device))
        limit.__enter__()
    limit.__exit__(None, None, None)
    assert_backward_is_exact(y.sum() + z, x, lambda x: x.sin()[:1].cos().sum() + chain(x))


def test_fetch_ahead_without_memory_is_tried_once_a_step(x):
    ebb.config.update(offload_in_flight_bytes=0, offload_prefetch_bytes=1 << 30)
    torch.autograd.grad(forward(x, policy=EVERYTHING), x)
    one = torch.ones((), device=x.device, requires_grad=True)
    torch.autograd.grad(one.sin(), one)  # autograd's thread has now dropped its last gradient of x
    y = forward(x, policy=EVERYTHING)
    before = stats("fetched_late")
    unpacked = saved(y)
    with late.limited(device=in_use(x.device) + 4 * x.nbytes):
        kept = [next(unpacked)]  # and three more, ahead
        torch.ops.late.counts()
        kept.append(next(unpacked))
        assert torch.ops.late.counts().get("allocate", 0) == 0
    kept += unpacked
    assert stats("fetched_late") == before + len(kept) - 3
    assert_backward_is_exact(y, x)

    before = stats("fetched_late")
    torch.autograd.grad(forward(x, policy=EVERYTHING), x)
    assert stats("fetched_late") == before + 1


# The disk tier


def spill(x, tmp_path, length, room):
    """Forward and backward of a chain with pinned memory for `room` more tensors."""
    limit = stats("host_bytes_held") + room * x.nbytes  # graphs have some
    ebb.config.update(
        offload_disk=tmp_path,
        offload_pinned_limit=limit,
        offload_in_flight_bytes=0,
    )
    y = offloaded.forward(x, length=length, policy=SINES)

    assert stats("bytes_spilled") > 0
    assert_backward_is_exact(y, x, lambda x: chain_of_sines(x, length).sum())


def test_tensor_from_disk_waits_for_the_last_copy_of_its_host_memory(tmp_path, x):
    """The memory was given back when backward took another tensor, whose copy may not be done."""
    spill(x, tmp_path, length=6, room=2)


def test_second_of_two_that_make_room_goes_to_disk_after_its_copy(tmp_path, x):
    """The host waits only for the first of them."""
    spill(x, tmp_path, length=24, room=16)  # an eighth is two


def test_tensor_that_a_write_sent_goes_to_disk_after_its_copy(tmp_path, x):
    """It has left for the device, which waits for the copy; the host has not."""

    def program(x):
        return (overwritten(x).sin().cos() * 2).sum()

    ebb.config.update(offload_disk=tmp_path, offload_pinned_limit=x.nbytes)
    with ebb.region(SINES):
        y = program(x)

    assert_backward_is_exact(y, x, program)
