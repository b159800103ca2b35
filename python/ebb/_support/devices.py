"""The accelerator of a process, if it has begun to use one.

``torch.cuda.is_available()`` initialises the driver, and a process that has done so cannot fork
workers that use it. An accelerator that nobody has used yet holds nothing, and need not be waited
for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


def in_use() -> torch.device | None:
    """The kind of accelerator that this process uses; None: it has not begun to use one."""
    device = torch.accelerator.current_accelerator()  # of the build: initialises nothing
    if device is None:
        return None
    module = torch.get_device_module(device)
    has_begun = getattr(module, "is_initialized", module.is_available)  # MPS tells nothing else
    return device if has_begun() else None


def wait() -> None:
    """Waits for all work that the accelerator has been given."""
    if in_use() is not None:
        torch.accelerator.synchronize()


def allocated() -> int:
    """Bytes that tensors have on the accelerator; 0 if it cannot say."""
    device = in_use()
    if device is None:
        return 0
    if device.type == "mps":
        return torch.mps.current_allocated_memory()
    try:
        return int(torch.accelerator.memory_allocated())
    except (RuntimeError, NotImplementedError):
        return 0


@dataclass(frozen=True)
class Memory:
    """Of an accelerator, in bytes.

    Attributes:
        available: to this process: what is free, and what it has.
        free: what it could allocate beside its tensors.
    """

    available: int
    free: int


def memory_of(device: torch.device) -> Memory | None:
    """None if it does not tell, or is none. Initialises it."""
    if device.type == "cpu":
        return None
    if device.type == "mps":
        available = torch.mps.recommended_max_memory()
        return Memory(available, available - torch.mps.driver_allocated_memory())
    try:
        free, _ = torch.accelerator.get_memory_info(device)
        reserved = torch.accelerator.memory_reserved(device)
        return Memory(free + reserved, free + reserved - torch.accelerator.memory_allocated(device))
    except (RuntimeError, NotImplementedError):
        return None
