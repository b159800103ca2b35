"""Page pools that hold the valid rows of padded tensors until backward.

A padded buffer, such as the input of an expert that may get all tokens or none, has valid rows and
padding rows. With ``ebb.experimental.mark_rows`` and the decision ``ebb.PAGE``, ebb keeps only
the valid rows for backward, in pages of a pool, although only the device knows their number.
``ebb.config.paging`` has the settings.
"""

from __future__ import annotations

from ebb.experimental.paging._steps import found_inf, microbatch, reset, run_step, step, step_ok

__all__ = ["found_inf", "microbatch", "reset", "run_step", "step", "step_ok"]
