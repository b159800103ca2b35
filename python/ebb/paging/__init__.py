"""Paging: page pools that hold the valid rows of padded tensors until backward.

A padded buffer, such as the input of an expert that may get all tokens or none, has valid rows and
padding rows. With :func:`ebb.mark_rows` and the decision ``ebb.PAGE``, ebb keeps only the valid
rows for backward, in pages of a pool, although only the device knows their number.

>>> settings = ebb.paging.configure(page_rows=64, headroom=1.2)
"""

from __future__ import annotations

from ebb.paging._run_step import run_step
from ebb.paging._settings import configure
from ebb.paging._steps import found_inf, microbatch, reset, step, step_ok

__all__ = ["configure", "found_inf", "microbatch", "reset", "run_step", "step", "step_ok"]
