"""Compares the bytes that a job's steps allocate with the plan."""

from __future__ import annotations

from ebb import _C
from ebb._report.text import size

_OVER = 1.02  # times the budget; a step with more bytes counts as over the budget
_MUCH_MORE = 1.25  # times the last step's peak: the limit from the second `accept` on
_SLACK = 4096  # bytes in addition, since small allocations are rounded up
_FAR_BELOW = 0.85  # times the planned bytes
_STEPS_BELOW = 32  # consecutive steps so far below the plan, after which steps count as changed
_LESS = 0.98  # times the planned bytes: maximum for the next plan


class StepMemoryMonitor:
    """Counts the bytes of tensors in each step."""

    def __init__(self) -> None:
        _C.use_counting_allocator()
        # Peak bytes that the last step allocated, above the base of Note [Where a step begins];
        # without a plan, above the bytes in use when the step before ended. On an accelerator the
        # number may be too high: see Note [Peaks on an accelerator].
        self.peak = 0
        self.has_plan = False  # True if a plan is in place
        self.planned = 0  # the plan's prediction of `peak`
        self.was_over = False  # True if the step before the last one exceeded the budget
        self._began = self._next = 0  # bytes in use when the last step began, and when it ended
        self._budget = 0  # bytes, see `begin`
        self._freed = 0  # bytes that are freed between the end of a step and the next one's begin
        # Bytes of tensors that a budget in total does not count; None: the budget is for a step.
        self._beside: int | None = None
        self._accepted = 0  # accepted peak of a step above the budget, if no plan needs less
        self._times_accepted = 0
        self.is_over = False  # True if the last step exceeded the budget
        self._over: list[tuple[int, int]] = []  # steps over the budget: planned and actual bytes
        self._below = 0  # consecutive steps far below the plan
        self._replays = 0

    def begin(
        self,
        planned: int,
        budget: int,
        beside: int | None,
        *,
        fits: bool,
        freed: int,
    ) -> None:
        """Compare steps with a plan from now on.

        Args:
            planned: predicted bytes.
            budget: bytes that tensors may take in total, or that a step may allocate.
            beside: bytes of tensors that a budget in total bytes does not count; None: the budget
                is for a step.
            fits: True if the prediction is within the budget; if not, steps may take as much as
                was planned.
            freed: bytes that are freed between the end of a step and the next one's begin.
        """
        self.has_plan, self.planned, self._freed = True, planned, freed
        self.was_over = self.is_over = False
        self._budget, self._beside = budget, beside
        self._accepted, self._times_accepted = 0 if fits else int(_OVER * planned), 0
        self._below, self._over = 0, []

    def end(self) -> None:
        """Stop comparing: no plan is in place."""
        self.has_plan, self._freed = False, 0

    def step_ended(self) -> None:
        """Count the step that has ended, and begin the next one."""
        self.was_over = self.is_over
        self._began = self._next - self._freed
        self._next, most, is_exact = _C.tensor_bytes()
        self.peak = max(0, most - self._began)
        slack = _SLACK + (_OVER - 1) * self._budget
        is_over = self.peak > max(self._allowed + slack, self._accepted)
        self.is_over = self.has_plan and is_over and is_exact
        _C.reset_most_tensor_bytes()

    def leave_out(self) -> None:
        """Exclude allocations since the last step ended from the next step."""
        self._next, _, _ = _C.tensor_bytes()
        _C.reset_most_tensor_bytes()

    @property
    def _allowed(self) -> int:
        if self._beside is None:
            return self._budget
        return self._budget + self._beside - self._began

    def is_far_below(self) -> bool:
        """True if steps have allocated far less than planned for a long time. Call once a step."""
        self._below = self._below + 1 if self.peak < _FAR_BELOW * self.planned else 0
        return self._below >= _STEPS_BELOW

    def in_words(self) -> str:
        """Describe the last step's memory."""
        if self._beside is None:
            return (
                f"a step allocated {size(self.peak)}, more than the budget of {size(self._budget)}"
            )
        return (
            f"a step allocated {size(self.peak)}, but the budget leaves only "
            f"{size(max(0, self._allowed))} for a step"
        )

    def less(self) -> int:
        """Bytes to plan for, so that a step like the last one stays within the budget. See
        Note [Steps over the budget]."""
        self._over.append((self.planned, self.peak))
        wanted = self.planned * self._allowed / max(1, self.peak)
        if len(self._over) > 1:
            (planned, took), (planned_then, took_then) = self._over[-1], self._over[-2]
            slope = max(0.25, (took_then - took) / max(1, planned_then - planned))
            wanted = planned - (took - self._allowed) / slope
        return max(0, int(min(wanted, _LESS * self.planned)))

    def accept(self) -> None:
        """Accept the last step's peak, since no plan needs less. Later calls accept larger growth
        than the first."""
        factor = _OVER if self._times_accepted == 0 else _MUCH_MORE
        self._accepted = int(factor * self.peak)
        self._times_accepted += 1

    def has_replayed(self) -> bool:
        """True if an operator was recomputed since the last call."""
        before, self._replays = self._replays, int(_C.stats()["total"]["ops_replayed"])
        return self._replays > before
