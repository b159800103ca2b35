"""Lets glibc's malloc fill new memory with a byte, also for torch's tensors on the CPU."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

M_PERTURB = -6  # glibc's malloc.h

# malloc does not fill memory from a thread's cache, so a process that relies on each fill has no
# such caches.
NO_CACHES = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}


def fills_all_memory() -> bool:
    return NO_CACHES.items() <= os.environ.items()


@contextlib.contextmanager
def new_memory_filled_with(byte: int) -> Iterator[None]:
    """malloc fills new memory with `byte`, and freed memory with its complement."""
    mallopt = ctypes.CDLL(None).mallopt
    # malloc fills new memory with the complement of M_PERTURB. 0 disables M_PERTURB, so 0xff is not
    # possible.
    assert 0 <= byte < 0xFF
    assert mallopt(M_PERTURB, byte ^ 0xFF) == 1
    try:
        yield
    finally:
        mallopt(M_PERTURB, 0)
