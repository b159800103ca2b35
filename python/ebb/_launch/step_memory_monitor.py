"""Compares the bytes that a job's steps allocate with the plan."""

from __future__ import annotations

from dataclasses import dataclass

from ebb import _C
from ebb._report.text import size

_OVER = 1.02  # times the budget; a step with more bytes counts as over the budget
_MUCH_MORE = 1.25  # times the last step's peak: the limit from the second `accept` on
_SLACK = 4096  # bytes in addition, since small allocations are rounded up
_FAR_BELOW = 0.85  # times the planned bytes
_STEPS_BELOW = 32  # consecutive steps so far below the plan, after which steps count as changed
_LESS = 0.98  # times the planned bytes: maximum for the next plan


class StepMemory:
    """Counts the bytes of tensors in each step."""

    def __init__(self) -> None:
        _C.use_counting_allocator()
        # Peak bytes that the last step allocated, above the base of Note [Where a step begins];
        # without a plan, above the bytes in use when the step before ended.
        self.peak = 0
        self.is_exact = False  # False if `peak` may be too high: Note [Peaks on an accelerator]
        self.began = 0  # bytes in use when the last step began
        self.freed = 0  # bytes that are freed between two steps; 0: unknown
        self._next = 0  # bytes in use when the last step ended

    def step_ended(self) -> None:
        """Count the step that has ended, and begin the next one."""
        self.began = self._next - self.freed
        self._next, most, self.is_exact = _C.tensor_bytes()
        self.peak = max(0, most - self.began)
        _C.reset_most_tensor_bytes()

    def leave_out(self) -> None:
        """Exclude allocations since the last step ended from the next step."""
        self._next, _, _ = _C.tensor_bytes()
        _C.reset_most_tensor_bytes()


@dataclass(frozen=True)
class Terms:
    """What the bytes of steps under a plan are compared with."""

    budget: int  # bytes that a step may allocate; with a budget in bytes, that all tensors may take
    beside: int | None  # bytes that a budget in bytes does not count; None: it is for a step
    freed: int  # as in `Measured`


class PlannedMemory:
    def __init__(self, memory: StepMemory, planned: int, terms: Terms, *, fits: bool) -> None:
        self._memory, self.terms = memory, terms
        self.planned = planned  # the plan's prediction of a step's peak
        self.is_over = False  # True if the last step exceeded the budget
        self.was_over = False  # the same for the step before the last one
        # Accepted peak of a step above the budget, if no plan needs less.
        self._accepted, self._times_accepted = 0 if fits else int(_OVER * planned), 0
        self._over: list[tuple[int, int]] = []  # steps over the budget: planned and actual bytes
        self._below = 0  # consecutive steps far below the plan

    def step_ended(self) -> None:
        slack = _SLACK + (_OVER - 1) * self.terms.budget
        is_over = self._memory.peak > max(self._allowed + slack, self._accepted)
        self.was_over, self.is_over = self.is_over, is_over and self._memory.is_exact

    @property
    def limit(self) -> int:
        """Bytes of tensors within the budget, in a step that begins as the last one did."""
        return self._memory.began + self._allowed

    @property
    def _allowed(self) -> int:
        if self.terms.beside is None:
            return self.terms.budget
        return self.terms.budget + self.terms.beside - self._memory.began

    def is_far_below(self) -> bool:
        """True if steps have allocated far less than planned for a long time. Call once a step."""
        self._below = self._below + 1 if self._memory.peak < _FAR_BELOW * self.planned else 0
        return self._below >= _STEPS_BELOW

    def in_words(self) -> str:
        peak = size(self._memory.peak)
        if self.terms.beside is None:
            return f"a step allocated {peak}, more than the budget of {size(self.terms.budget)}"
        return (
            f"a step allocated {peak}, but the budget leaves only "
            f"{size(max(0, self._allowed))} for a step"
        )

    def less(self) -> int:
        """Bytes to plan for, so that a step like the last one stays within the budget. See
        Note [Steps over the budget]."""
        self._over.append((self.planned, self._memory.peak))
        wanted = self.planned * self._allowed / max(1, self._memory.peak)
        if len(self._over) > 1:
            (planned, took), (planned_then, took_then) = self._over[-1], self._over[-2]
            slope = max(0.25, (took_then - took) / max(1, planned_then - planned))
            wanted = planned - (took - self._allowed) / slope
        return max(0, int(min(wanted, _LESS * self.planned)))

    def accept(self) -> None:
        """Accept the last step's peak. Later calls accept larger growth than the first."""
        factor = _OVER if self._times_accepted == 0 else _MUCH_MORE
        self._accepted = int(factor * self._memory.peak)
        self._times_accepted += 1
