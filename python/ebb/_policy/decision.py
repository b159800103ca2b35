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
    """Keep the bytes in memory, if backward or a replay needs them."""
    RECOMPUTE = 1
    """Free the bytes, and recompute them in backward."""
    OFFLOAD = 2
    """Move the bytes to pinned host memory, overlapped with compute. See
    ``ebb.config.offload``."""
    PAGE = 3
    """Move the valid rows to a page pool on the device. See
    ``ebb.experimental.paging``."""
    RECOMPUTE_EACH_TIME = 4
    """Free the bytes, and recompute them for each replay that needs them. They stay in memory only
    once backward unpacks them, or another such value that the same nested region computed."""


SAVE = Decision.SAVE
RECOMPUTE = Decision.RECOMPUTE
OFFLOAD = Decision.OFFLOAD
PAGE = Decision.PAGE
RECOMPUTE_EACH_TIME = Decision.RECOMPUTE_EACH_TIME

MADE_AGAIN = (RECOMPUTE, RECOMPUTE_EACH_TIME)
"""Decisions that recompute an op."""
