"""Memory budgets. In: a user's text or number. Out: bytes that a step may allocate, or an error."""

from __future__ import annotations

import math

from ebb._support.shown import shown
from ebb._support.sizes import number_of_bytes

_MOST_PERCENT = 100  # numbers up to this without a unit are rejected: the user may mean percent
_MARGIN = 0.01  # share of a budget that plans leave free for errors of the simulator


class BudgetError(ValueError):
    """No plan stays within the memory budget.

    Attributes:
        minimum: the lowest possible budget in total, in bytes.
        share: the lowest possible budget as a share of the step's peak without regions.
        slowdown: predicted time of a step under that budget, as a multiple of a step without
            regions.
    """

    __module__ = "ebb"  # the public name, also for pickle

    def __init__(
        self, message: str, minimum: int = 0, share: float = 0.0, slowdown: float = 1.0
    ) -> None:
        super().__init__(message)
        self.minimum, self.share, self.slowdown = minimum, share, slowdown


class NothingToPlanError(ValueError):
    """No module that may become a region ran forward and backward."""


def read_budget(budget: object) -> int | float:
    """Parse a user's memory budget: an int of bytes, which limits all memory in use; or a float
    above 0 and up to 1, a share of the peak that an eager step allocates.

    Raises:
        TypeError: ``budget`` is neither a number nor text.
        ValueError: ``budget`` is invalid.
    """
    if isinstance(budget, bool) or not isinstance(budget, int | float | str):
        raise TypeError(
            f"ebb: a budget must be a number of bytes, such as '24GiB', or a share, such as 0.4 or "
            f"'40%'; got {shown(budget)} of type {type(budget).__name__}"
        )
    has_unit = isinstance(budget, str) and not budget.strip().isdecimal()
    if isinstance(budget, str):
        budget = _number(budget)
    if isinstance(budget, float):
        if not math.isfinite(budget) or not 0 < budget <= 1:
            raise ValueError(
                f"ebb: a budget given as a share must be above 0 and at most 1 (100%); got "
                f"{shown(budget)}. For bytes, pass an int or text with a unit, such as '24GiB'"
            )
        return budget
    if number_of_bytes("a budget", budget) == 0:
        raise ValueError("ebb: a budget must be more than 0 bytes")
    if budget <= _MOST_PERCENT and not has_unit:
        raise ValueError(
            f"ebb: a budget of {budget} bytes is too small for any step; did you mean "
            f"'{budget}%' or '{budget}GiB'?"
        )
    return budget


def _number(text: str) -> int | float:
    text = text.strip()
    is_percent = text.endswith("%")
    digits = text.removesuffix("%").strip()
    if is_percent or ("." in digits and digits.replace(".", "", 1).isdecimal()):
        try:
            number = float(digits)
        except ValueError:
            raise ValueError(
                f"ebb: a budget must be bytes, such as '24GiB', or a share, such as '40%' or "
                f"'0.4'; got {shown(text)}"
            ) from None
        return number / 100 if is_percent else number
    try:
        return number_of_bytes("a budget", digits)
    except ValueError as error:
        raise ValueError(f"{error}; a share, such as '40%' or '0.4', is valid too") from None


def allowed(budget: int | float, base: int, plain_peak: int) -> int:
    """Bytes that a step may allocate above `base`, the bytes in use when it begins, less a margin.
    `budget`: a result of `read_budget`. `plain_peak`: of a step without regions."""
    whole = budget * plain_peak if isinstance(budget, float) else budget - base
    return math.floor(whole * (1 - _MARGIN))


def in_all(base: int, peak: int) -> int:
    """The lowest budget in total bytes that allows a peak."""
    return base + math.ceil(peak / (1 - _MARGIN)) + 1
