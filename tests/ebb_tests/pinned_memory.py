"""Pinned host memory, allocated as ebb does: with mmap, then registered with CUDA."""

from __future__ import annotations

import ctypes
import mmap

import torch

HUGE_PAGE = 2 << 20


class Registered:
    """Anonymous host memory, registered with CUDA, so that copies need no staging buffer.

    Args:
        nbytes: size, a multiple of 2 MiB.
        huge: True requests huge pages (MADV_HUGEPAGE).
    """

    def __init__(self, nbytes: int, huge: bool = False) -> None:
        self._memory = mmap.mmap(-1, nbytes + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if huge:
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._offset = -start % HUGE_PAGE
        self._address, self._nbytes = start + self._offset, nbytes
        self._registered = False

    def tensor(self) -> torch.Tensor:
        """The memory as a tensor of bytes."""
        view = memoryview(self._memory)[self._offset : self._offset + self._nbytes]
        return torch.frombuffer(view, dtype=torch.uint8)

    def touch(self) -> None:
        """Writes to each page, so that the system allocates it."""
        self.tensor()[:: mmap.PAGESIZE] = 0

    def register(self) -> None:
        """Pins the pages. The system allocates missing pages first."""
        self._check(torch.cuda.cudart().cudaHostRegister(self._address, self._nbytes, 0))
        self._registered = True

    def unregister(self) -> None:
        if self._registered:
            self._check(torch.cuda.cudart().cudaHostUnregister(self._address))
            self._registered = False

    @staticmethod
    def _check(error: object) -> None:
        if int(error) != 0:  # type: ignore[call-overload]
            raise RuntimeError(f"CUDA cannot register or unregister host memory: error {error}")
