"""How values with the decision PAGE move to page pools and back.

A padded buffer, such as the input of an expert that may get all tokens or none, has rows that live
and rows that do not. With :func:`ebb.mark_rows` and the decision ``ebb.PAGE`` only the live rows
are kept for backward, in pages of a pool, though only the device knows how many they are.

>>> ebb.paging.configure(page_rows=64, headroom=1.2)
"""

from __future__ import annotations

from ebb.paging._overflow import PageOverflowError
from ebb.paging._run_step import run_step
from ebb.paging._settings import configure, settings
from ebb.paging._stats import stats
from ebb.paging._steps import found_inf, microbatch, reset, step, step_ok

__all__ = [
    "PageOverflowError",
    "configure",
    "found_inf",
    "microbatch",
    "reset",
    "run_step",
    "settings",
    "stats",
    "step",
    "step_ok",
]
