"""Host memory, as the C library's malloc counts it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable

from torch import Tensor


class _MallInfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


def allocated() -> int | None:
    """Bytes that are allocated and not freed in this process; None without glibc's mallinfo2."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return None
    mallinfo2.restype = _MallInfo
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def bytes_held_by(make: Callable[[], Tensor]) -> int | None:
    """Host memory that exists because the result of `make` does, tensors on the CPU included."""
    make()  # what is allocated once
    gc.collect()
    before = allocated()
    result = make()
    gc.collect()
    after = allocated()
    del result
    return None if before is None or after is None else after - before
