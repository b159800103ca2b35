"""Which rows of a padded tensor live."""

from __future__ import annotations

from collections import Counter

import torch
from torch.compiler import is_compiling

from ebb import _C
from ebb._support.subclasses import plain_tensors
from ebb.paging import _attempt
from ebb.paging._optimizers import guard_optimizers

marks: Counter[bool] = Counter()  # for backward, by whether run_step runs them


def mark_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Say that only the first rows of a tensor live, for the decision ``ebb.PAGE``.

    What is in the other rows must not matter to anything that the program computes: in backward
    they come back as copies of a row that lives. ``ebb.verify`` brings them back as NaN, so that a
    program which depends on them shows.

    The mark follows the tensor through operators that keep rows apart: element by element, products
    with ``x`` on the left, normalisations and reductions over other dimensions than the first.
    Where an operator may mix rows its results have no mark, nor where it also reads a tensor that
    has a row for each and no mark: a residual, a mask, weights of tokens. Mark those too if their
    rows live by the same count. Without a mark the decision PAGE means SAVE, and
    ``bytes_not_paged`` in :func:`ebb.stats` counts it.

    Outside of regions and under ``torch.compile`` it does nothing.

    Args:
        x: of shape (rows, ...), the rows one after the other in a storage of its own. Mark it
            before other operators read it.
        rows: how many of the first rows live, as one integer, or as counts whose sum it is (tokens
            per expert); of an integer dtype, on ``x``'s device. It may be written afterwards.

    Returns:
        ``x`` itself.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: ``x`` is not laid out row after row, ``rows`` is on another device, or, on the
            CPU, out of range. On other devices nobody waits for the count; one that cannot be shows
            in :func:`ebb.paging.step_ok`.

    Example:
        >>> policy = ebb.Policy({"aten::mm": ebb.PAGE})
        >>> x, w = torch.randn(64, 8), torch.randn(8, 8, requires_grad=True)
        >>> with ebb.region(policy):
        ...     h = ebb.mark_rows(x.clone(), torch.tensor([3, 0, 5])) @ w
        ...     loss = h.relu()[:8].sum()
        >>> loss.backward()
    """
    if is_compiling():
        return x
    for name, value in (("x", x), ("rows", rows)):
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"ebb: mark_rows takes a tensor as {name}; got {type(value).__name__}")
    guard_optimizers()
    marks[_attempt.is_any()] += torch.is_grad_enabled()
    for inner in plain_tensors(x):
        _C.mark_rows(inner, rows)
    return x
