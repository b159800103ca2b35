"""Functions that count torch's allocations, or write to tensors without torch's knowledge."""

from __future__ import annotations

import ctypes
from itertools import accumulate

import torch
from torch.profiler import ProfilerActivity, profile

from ebb_tests.exactness import resident_kib


def allocations(function):
    """Sizes of all allocations (positive) and releases (negative) while `function` runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    return [event.nbytes() for event in events if event.name() == "[memory]"]


def peak_bytes(function):
    """The peak of the bytes that `function` allocates."""
    return max(accumulate(allocations(function)), default=0)


def least_growth(function, times=3):
    """The smallest growth of resident memory, in KiB, in one of `times` calls.

    A leak grows in each call; a cache or a reserve of an allocator grows only in some.
    """
    grown = []
    for _ in range(times):
        before = resident_kib()
        function()
        grown.append(resident_kib() - before)
    return min(grown)


def address_of(tensor):
    """The address of the tensor's first byte for kernels. Waits for its device."""
    if tensor.device.type != "late":
        return tensor.data_ptr()
    torch.accelerator.synchronize(tensor.device)
    return torch.ops.late.kernel_address(tensor)


def poke(tensor, values=(5.0, -1.0)):
    """Writes to the start of a tensor behind torch's back."""
    kind = {torch.float64: ctypes.c_double, torch.float32: ctypes.c_float}[tensor.dtype]
    memory = (kind * len(values)).from_address(address_of(tensor))
    memory[:] = values


def fill_unseen(tensor, value):
    """Writes to all of a contiguous tensor of float32 behind torch's back."""
    if tensor.device.type == "cpu":
        tensor.numpy().fill(value)
    else:
        poke(tensor, (value,) * tensor.numel())
