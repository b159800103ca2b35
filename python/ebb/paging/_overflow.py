"""What a step ends with that found too little room."""

from __future__ import annotations


class PageOverflowError(RuntimeError):
    """A page pool had no room for a tensor, so the gradients of this step are of no use.

    Raised in the step where ``overflow="blocking"``, and by an optimizer that is about to use such
    gradients. Clear them and run the step again, or let :func:`run_step` do so.
    """

    __module__ = "ebb.paging"  # where users, and pickles, find it
