"""Marks the valid rows of a padded tensor."""

from __future__ import annotations

from collections import Counter

import torch
from torch.compiler import is_compiling

from ebb import _C
from ebb._support.subclasses import plain_tensors
from ebb.experimental.paging._attempt import guard_optimizers, is_any

marks: Counter[bool] = Counter()  # calls with grad enabled; key: True inside run_step


def mark_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Mark the first rows of a tensor as valid and the others as padding, for ``ebb.PAGE``.

    The contents of padding rows must not affect the program's results: backward restores them as
    copies of a valid row. ``ebb.verify`` restores them as NaN, which reveals a program that depends
    on them.

    The mark follows the tensor through operators that keep rows apart: elementwise operators,
    products with ``x`` on the left, normalisations and reductions over dimensions other than the
    first. The result of an operator that may mix rows has no mark. The result also has no mark if
    the operator reads an unmarked tensor with as many rows: a residual, a mask, weights of tokens.
    Mark such tensors too if the same count applies to them. Without a mark the decision PAGE means
    SAVE, and ``bytes_not_paged`` in :func:`ebb.stats` counts the bytes.

    Outside of regions and under ``torch.compile`` mark_rows does nothing.

    Args:
        x: of shape (rows, ...), with contiguous rows in a storage of its own. Mark ``x`` before
            other operators read it.
        rows: the number of valid rows, as one integer or as counts that sum to it (tokens per
            expert); of an integer dtype, on ``x``'s device. It may be overwritten afterwards.

    Returns:
        ``x`` itself.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: ``x`` is not contiguous or not a whole storage, ``rows`` is on another device,
            or, on the CPU, out of range. On other devices the host does not wait for the count;
            :func:`ebb.experimental.paging.step_ok` reports an invalid one.

    Examples:
        >>> policy = ebb.Policy({"aten::mm": ebb.PAGE})
        >>> x, w = torch.randn(64, 8), torch.randn(8, 8, requires_grad=True)
        >>> with ebb.region(policy):
        ...     h = ebb.experimental.mark_rows(x.clone(), torch.tensor([3, 0, 5])) @ w
        ...     loss = h.relu()[:8].sum()
        >>> loss.backward()
    """
    if is_compiling():
        return x
    for name, value in (("x", x), ("rows", rows)):
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"ebb: mark_rows: {name} must be a tensor; got {type(value).__name__}")
    guard_optimizers()
    marks[is_any()] += torch.is_grad_enabled()
    for inner in plain_tensors(x):
        _C.mark_rows(inner, rows)
    return x
