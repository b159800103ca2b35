"""What to do with an op's outputs between forward and backward."""

from __future__ import annotations

import enum


class Decision(enum.IntEnum):
    """What happens to an op's outputs between forward and backward.

    The numbers are those of ``ebb::Decision`` in C++.
    """

    __module__ = "ebb"  # where users, and pickles, find it

    SAVE = 0
    """Keep the bytes, if anything will need them."""
    RECOMPUTE = 1
    """Drop the bytes and run the op again in backward."""
    OFFLOAD = 2
    """Move the bytes to pinned host memory, in the shadow of compute. See :mod:`ebb.offload`."""
    PAGE = 3
    """Move the live rows to a page pool on the device. See :mod:`ebb.paging`."""
    RECOMPUTE_EACH_TIME = 4
    """Drop the bytes and run the op again in backward, each time that something needs them: they
    are held only when backward asks for them themselves."""


SAVE = Decision.SAVE
RECOMPUTE = Decision.RECOMPUTE
OFFLOAD = Decision.OFFLOAD
PAGE = Decision.PAGE
RECOMPUTE_EACH_TIME = Decision.RECOMPUTE_EACH_TIME

MADE_AGAIN = (RECOMPUTE, RECOMPUTE_EACH_TIME)
"""Decisions by which an op is run again."""
