"""The error of a step for which a page pool was too small."""

from __future__ import annotations


class PageOverflowError(RuntimeError):
    """A page pool was too small for a tensor, so the gradients of this step are invalid.

    Raised in the step if ``overflow="blocking"``, and by an optimizer that is about to use such
    gradients. Clear the gradients and run the step again, or let :func:`run_step` do so.
    """

    __module__ = "ebb.paging"  # the name for users and pickles
