"""Decisions: what to do with an op's outputs between forward and backward."""

from __future__ import annotations

import enum


class Decision(enum.IntEnum):
    """The treatment of an op's outputs between forward and backward.

    The numbers are those of ``ebb::Decision`` in C++.
    """

    __module__ = "ebb"  # the name for users and pickles

    SAVE = 0
    """Keep the bytes, if backward or a replay will need them."""
    RECOMPUTE = 1
    """Drop the bytes and run the op again in backward."""
    OFFLOAD = 2
    """Move the bytes to pinned host memory, overlapped with compute. See :mod:`ebb.offload`."""
    PAGE = 3
    """Move the valid rows to a page pool on the device. See :mod:`ebb.paging`."""
    RECOMPUTE_EACH_TIME = 4
    """Drop the bytes and run the op again each time that a replay needs them. The bytes stay in
    memory only if backward itself unpacks them."""


SAVE = Decision.SAVE
RECOMPUTE = Decision.RECOMPUTE
OFFLOAD = Decision.OFFLOAD
PAGE = Decision.PAGE
RECOMPUTE_EACH_TIME = Decision.RECOMPUTE_EACH_TIME

MADE_AGAIN = (RECOMPUTE, RECOMPUTE_EACH_TIME)
"""Decisions that run an op again."""
