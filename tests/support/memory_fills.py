"""Lets glibc's malloc fill new memory with a byte, also for torch's tensors on the CPU."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

M_PERTURB = -6  # glibc's malloc.h


@contextlib.contextmanager
def new_memory_filled_with(byte: int) -> Iterator[None]:
    """Memory that malloc gives is full of `byte`, and freed memory of its complement."""
    mallopt = ctypes.CDLL(None).mallopt
    # malloc fills with the complement of what it is told; 0 would switch that off, so 0xff is not
    # to be had.
    assert 0 <= byte < 0xFF
    assert mallopt(M_PERTURB, byte ^ 0xFF) == 1
    try:
        yield
    finally:
        mallopt(M_PERTURB, 0)
