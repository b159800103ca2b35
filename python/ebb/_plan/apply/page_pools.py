"""The page pools of the running engine."""

from __future__ import annotations

import contextlib

from ebb import _C
from ebb.paging import reset


def pool_bytes() -> int:
    """Current bytes of all page pools."""
    nbytes: int = _C.paging_stats()["pool_bytes"]
    return nbytes


def size_pools_anew() -> None:
    """Record pool sizes again in the next step, since other values are paged from now on."""
    _C.paging_record_next()
    if _C.paging_stats()["stashes"] == 0:
        with contextlib.suppress(RuntimeError):  # raised inside a step
            reset()
