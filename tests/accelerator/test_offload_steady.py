"""What a step with OFFLOAD asks of the device once all is warm, and what it leaves behind."""

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
from ebb_tests.programs.offloaded import SINES, chain_of_sines, sine_and_cosine

LENGTH = 8


chain = functools.partial(chain_of_sines, length=LENGTH)


def step(x, region=None):
    with region or ebb.region(SINES):
        loss = chain(x).sum()
    return torch.autograd.grad(loss, x)[0]


def asked(counts):
    return counts.get("synchronize", 0) + counts.get("query", 0)


def counts_of_a_step(x, region=None):
    for _ in range(3):
        step(x, region)
    late.synchronize()
    torch.ops.late.counts()
    step(x, region)
    return torch.ops.late.counts()


@pytest.mark.parametrize("keep_last", [0, 2])
@pytest.mark.parametrize("prefetch", [0, 1 << 30])
@pytest.mark.parametrize("in_flight", [0, 1 << 30])
def test_the_host_neither_waits_nor_asks(in_flight, prefetch, keep_last, x):
    ebb.config.update(
        offload_in_flight_bytes=in_flight,
        offload_prefetch_bytes=prefetch,
        offload_keep_last=keep_last,
    )
    counts = counts_of_a_step(x)

    assert asked(counts) == 0
    assert counts.get("event made", 0) == 0  # making one takes as long as recording it
    assert counts.get("allocate pinned", 0) == 0


def test_the_device_waits_once_for_all_that_is_leaving(x):
    """Those that backward took before they had left; each of them waits once itself."""
    ebb.config.offload.min_bytes = 1 << 30
    eager = counts_of_a_step(x)
    ebb.config.update(offload_min_bytes=1, offload_in_flight_bytes=1 << 30)
    counts = counts_of_a_step(x)

    assert counts["wait"] == eager.get("wait", 0) + LENGTH + 1


def test_what_is_recomputed_on_one_stream_needs_no_event(x):
    ebb.config.offload.min_bytes = 1 << 30
    counts = counts_of_a_step(x)
    eager = counts_of_a_step(x, contextlib.nullcontext())

    for what in ("record", "wait", "query", "synchronize"):
        assert counts.get(what, 0) == eager.get(what, 0)


def test_after_a_step_no_memory_is_left_on_the_device(x):
    step(x)
    gc.collect()
    late.synchronize()
    ebb.stats()["offload"]
    before = torch.accelerator.memory_allocated(x.device)
    with ebb.region(SINES):
        y = chain(x)
    late.synchronize()  # all has left, but nobody has asked
    torch.autograd.grad(y, x, torch.ones_like(y))
    del y

    def left():
        return torch.accelerator.memory_allocated(x.device) - before

    deadline = time.monotonic() + 10  # autograd's thread may have the last reference
    while left() > 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left() == 0


@pytest.mark.parametrize("under_a_limit", [False, True])
def test_host_memory_is_freed_after_its_copies(under_a_limit, x):
    """Of which the host has not asked yet. A limit frees it; a drain frees all host memory that is
    free."""
    step(x)
    assert ebb.stats()["offload"]["host_bytes_held"] > ebb.stats()["offload"]["host_bytes_used"]
    if under_a_limit:
        ebb.config.offload.pinned_limit = 1
        with ebb.region(SINES):
            x.sin().cos()
    else:
        _testing.drain_offload()
    late.synchronize()


def test_host_memory_is_freed_after_a_copy_that_nobody_needs(x):
    """A write made it leave early, and then it was dropped."""
    with ebb.region(SINES):
        h, y = sine_and_cosine(x)
        with torch.no_grad():
            h.zero_()
    ebb.config.update(offload_min_bytes=1, offload_pinned_limit=1)
    with ebb.region(SINES):
        x.sin().cos()  # the limit holds from now on
    del y, h
    late.synchronize()


def test_the_host_asks_nothing_of_what_is_never_fetched(x):
    ebb.config.offload.in_flight_bytes = 0
    step(x)
    late.synchronize()
    torch.ops.late.counts()
    with ebb.region(SINES):
        x.sin().cos().sin().cos()
    counts = torch.ops.late.counts()

    assert asked(counts) == 0


def test_what_is_dropped_is_freed_though_others_are_away(x):
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


def test_a_drain_frees_what_was_on_its_way_back(x):
    used = ebb.stats()["offload"]["host_bytes_used"]  # by graphs
    with ebb.region(SINES):
        first, second = x.sin().cos(), x.sin().cos()
    late.synchronize()
    torch.autograd.grad(second, x, torch.ones_like(second))  # and the first one ahead
    del first, second
    _testing.drain_offload()

    stats = ebb.stats()["offload"]
    assert stats["host_bytes_held"] == stats["host_bytes_used"] == used
