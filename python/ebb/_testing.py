"""For tests of ebb. Not part of the interface."""

from __future__ import annotations

from ebb import _C
from ebb._policy import Policy


def failing_policy(at: int) -> Policy:
    """Recomputes everything, and makes a region's `at`-th op (from 1) raise before it runs.

    Args:
        at: number of the op; views are not counted. Each region counts for itself.

    Example:
        >>> with ebb.region(ebb._testing.failing_policy(2)):
        ...     y = torch.zeros(2).exp()
        Traceback (most recent call last):
        ...
        RuntimeError: ebb: fault injected before aten::exp.default
    """
    if at < 1:
        raise ValueError(f"ebb: at must be 1 or more; got {at}")
    return Policy._from_compiled(_C.failing_policy(at))
