"""The accelerator of a process, if the process has begun to use one.

``torch.cuda.is_available()`` initialises the driver, and then the process cannot fork workers that
use the accelerator. An unused accelerator has no allocations and no work to wait for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import torch


def in_use() -> torch.device | None:
    """The kind of accelerator that this process uses; None before the process uses one."""
    device = torch.accelerator.current_accelerator()  # of torch's build: initialises nothing
    if device is None:
        return None
    module = torch.get_device_module(device)
    has_begun = getattr(module, "is_initialized", module.is_available)  # some have only the latter
    return device if has_begun() else None


def wait() -> None:
    """Waits for all work on the accelerator."""
    if in_use() is not None:
        torch.accelerator.synchronize()


def timed(work: Callable[[], object]) -> float:
    """Milliseconds that work takes, on the host and on the accelerator."""
    wait()
    begin = time.perf_counter()
    work()
    wait()
    return (time.perf_counter() - begin) * 1e3


def free_cache() -> None:
    """Returns memory that the allocator holds and no tensor uses to the device, except in a capture
    of a CUDA graph, which forbids that."""
    device = in_use()
    if device is None or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return
    with suppress(RuntimeError):  # not in every backend
        torch.accelerator.empty_cache()


def allocated() -> int:
    """Bytes of tensors on the accelerator; 0 if unknown."""
    if in_use() is not None:
        with suppress(RuntimeError):
            return int(torch.accelerator.memory_allocated())
    return 0


def peaks_of(device: torch.device) -> tuple[int, int] | None:
    """Peaks of allocated and reserved bytes on an accelerator; None for the CPU or if unknown."""
    if device.type != "cpu":
        with suppress(RuntimeError):
            allocated_peak = torch.accelerator.max_memory_allocated(device)
            return allocated_peak, torch.accelerator.max_memory_reserved(device)
    return None


def why_uncounted() -> str:
    """Why no budget is possible on the accelerator in use: its allocator counts no bytes. Empty if
    the allocator counts them, or if no accelerator is in use."""
    device = in_use()
    if device is None:
        return ""
    with suppress(RuntimeError):
        if torch.accelerator.memory_stats():
            return ""
    return (
        f"the memory allocator of {device.type} does not count bytes (torch's own allocator does, "
        "CUDAPluggableAllocator does not), so ebb cannot keep to a budget"
    )


def allowed_of(device: torch.device) -> int:
    """Bytes of a CUDA device that the process may reserve: see
    ``torch.cuda.set_per_process_memory_fraction``."""
    total = torch.cuda.get_device_properties(device).total_memory
    return int(total * torch.cuda.get_per_process_memory_fraction(device))


def memory_of(device: torch.device) -> tuple[int, int] | None:
    """Bytes of a device that are free or reserved by this process, and bytes that the process could
    allocate in addition to its tensors; None for the CPU or if unknown. Initialises the device."""
    if device.type != "cpu":
        with suppress(RuntimeError):
            free, _ = torch.accelerator.get_memory_info(device)
            available = free + torch.accelerator.memory_reserved(device)
            if device.type == "cuda":
                available = min(available, allowed_of(device))
            return available, available - torch.accelerator.memory_allocated(device)
    return None
