"""Host memory: malloc's settings, and the bytes that malloc has allocated."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable

# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def keep_freed_memory() -> None:
    """Lets malloc keep freed memory instead of returning it to the system (glibc only).

    Returned memory causes page faults in later allocations: a tenth of a step's time in the wider
    models. The faults may hit another system than the one that freed the memory.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


_FIGURES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _MallInfo(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIGURES.split())


def allocated() -> int | None:
    """Bytes that are allocated and not freed in this process; None without glibc's mallinfo2."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return None
    mallinfo2.restype = _MallInfo
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def bytes_held_by(make: Callable[[], object], count: int = 1) -> float | None:
    """Bytes of host memory that a result of `make` keeps alive, including CPU tensors.

    Measures `count` results while as many earlier ones are alive: else the results could use memory
    that allocators keep for reuse, such as the 1 MiB of ebb's arena.
    """
    earlier = [make() for _ in range(count)]
    gc.collect()
    before = allocated()
    results = [make() for _ in range(count)]
    gc.collect()
    after = allocated()
    del earlier, results
    return None if before is None or after is None else (after - before) / count


def most_allocated(step: Callable[[], None]) -> int:
    """The peak of the bytes that a step allocates, on all threads. Asks malloc every 0.2 ms.

    The bytes include malloc's own overhead: about one percent for small tensors.
    """
    gc.collect()
    before = most = allocated() or 0
    done = threading.Event()

    def look() -> None:
        nonlocal most
        while not done.is_set():
            most = max(most, allocated() or 0)
            time.sleep(2e-4)

    watching = threading.Thread(target=look)
    watching.start()
    try:
        step()
    finally:
        done.set()
        watching.join()
    return most - before
