"""Decisions: what to do with an op's outputs between forward and backward."""

from __future__ import annotations

import enum


class Decision(enum.IntEnum):
    """The treatment of an op's outputs between forward and backward.

    The numbers are those of ``ebb::Decision`` in C++.
    """

    __module__ = "ebb"  # the name for users and pickles

    def __reduce_ex__(self, _: object) -> str:  # type: ignore[override]  # pickles as ebb.SAVE
        return self.name

    SAVE = 0
    RECOMPUTE = 1
    OFFLOAD = 2
    PAGE = 3
    RECOMPUTE_EACH_TIME = 4


SAVE = Decision.SAVE
"""Keep the bytes in memory, if backward or a replay needs them."""

RECOMPUTE = Decision.RECOMPUTE
"""Free the bytes, and recompute them in backward. The result then stays until backward has used
it."""

RECOMPUTE_EACH_TIME = Decision.RECOMPUTE_EACH_TIME
"""Free the bytes, and recompute them for each replay that needs them. They stay in memory only once
backward unpacks them, or another such value that the same nested region computed."""

OFFLOAD = Decision.OFFLOAD
"""Move the bytes to pinned host memory, overlapped with compute, and back before backward needs
them. See ``ebb.config.offload``."""

PAGE = Decision.PAGE
"""Move the valid rows of a tensor that ``ebb.experimental.mark_rows`` has marked to a page pool on
the device. See ``ebb.experimental.paging``."""

MADE_AGAIN = (RECOMPUTE, RECOMPUTE_EACH_TIME)
"""Decisions that recompute an op."""
