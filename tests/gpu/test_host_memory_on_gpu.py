"""Host memory that copies go to and come from: pinned for torch too, and as fast as torch's."""

from __future__ import annotations

import contextlib

import pytest
import torch

import ebb
from ebb_tests.gpus import (
    MIB,
    NEEDS_GPU,
    OFFLOAD_ALL,
    chain,
    leaf,
    notice_finished_copies,
    offloading,
)
from ebb_tests.pinned_memory import Registered

pytestmark = NEEDS_GPU


@contextlib.contextmanager
def registered(nbytes, huge=False, touched=False):
    memory = Registered(nbytes, huge)
    if touched:
        memory.touch()
    memory.register()
    try:
        yield memory.tensor()
    finally:
        torch.cuda.synchronize()
        memory.unregister()


@pytest.mark.parametrize("touched", [False, True])
@pytest.mark.parametrize("huge", [False, True])
def test_registered_memory_is_pinned(huge, touched):
    with registered(16 * MIB, huge, touched) as host:
        assert host.is_pinned()
        data = torch.randint(0, 256, (16 * MIB,), dtype=torch.uint8, device="cuda")
        host.copy_(data, non_blocking=True)
        back = host.to("cuda", non_blocking=True)
        assert torch.equal(back, data)


def milliseconds(copy):
    times = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        copy()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times)


@pytest.mark.not_dry("copies must take the time that they take on a GPU")
@pytest.mark.parametrize("direction", ["out", "in"])
def test_registered_memory_is_as_fast_as_torchs(direction):
    device = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")

    def copy_with(host):
        if direction == "out":
            return lambda: host.copy_(device, non_blocking=True)
        return lambda: device.copy_(host, non_blocking=True)

    theirs = milliseconds(copy_with(torch.empty(64 * MIB, dtype=torch.uint8, pin_memory=True)))
    with registered(64 * MIB) as memory:
        ours = milliseconds(copy_with(memory))

    assert ours <= 1.1 * theirs


def test_pinned_memory_has_the_exact_size():
    """4.5 MiB, which a pool of powers of two would make 8 MiB."""
    x = torch.randn(9 * MIB // 8, device="cuda", requires_grad=True)
    with offloading(pinned_limit="1GiB"):
        before = ebb.stats()["offload"]
        with ebb.region(OFFLOAD_ALL):
            loss = chain(x).sum()
        after = ebb.stats()["offload"]

        sent = after["bytes_sent"] - before["bytes_sent"]
        assert sent >= 10 * x.nbytes
        used = after["host_bytes_used"] - before["host_bytes_used"]
        assert sent <= used <= 1.05 * sent
        assert after["host_bytes_held"] - before["host_bytes_held"] <= 1.05 * sent
        torch.autograd.grad(loss, x)


def test_host_memory_is_held_no_longer_than_the_limit_says():
    x = leaf(8)
    expected = torch.autograd.grad(chain(x).sum(), x)[0]
    with offloading(pinned_limit=32 * MIB):
        held = ebb.stats()["offload"]["host_bytes_held"]  # by graphs that other tests captured
        for _ in range(3):
            with ebb.region(OFFLOAD_ALL):
                loss = chain(x).sum()
            notice_finished_copies()
            assert ebb.stats()["offload"]["host_bytes_held"] <= held + 32 * MIB
            assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


@pytest.mark.parametrize("mebibytes", [(4, 6), (64, 3, 17)])
def test_sizes_that_change_from_step_to_step(mebibytes):
    """The host memory of one size serves the next; all of it stays below the limit."""
    leaves = [leaf(m) for m in mebibytes]
    expected = [torch.autograd.grad(chain(x).sum(), x)[0] for x in leaves]
    with offloading(pinned_limit=512 * MIB):
        held = ebb.stats()["offload"]["host_bytes_held"]
        for _ in range(4):
            for x, gradient in zip(leaves, expected, strict=True):
                with ebb.region(OFFLOAD_ALL):
                    loss = chain(x).sum()
                notice_finished_copies()
                assert torch.equal(torch.autograd.grad(loss, x)[0], gradient)
                assert ebb.stats()["offload"]["host_bytes_held"] <= held + 512 * MIB
