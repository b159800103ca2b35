"""How many bytes the steps of a job take, and whether that is what was planned for."""

from __future__ import annotations

from ebb import _C
from ebb._report.text import size
from ebb._support import devices

_OVER = 1.02  # of the budget, from which on a step is over it
_MUCH_MORE = 1.25  # likewise, if no plan needs less and a line has said so
_SLACK = 4096  # bytes, beside that: small blocks of memory are rounded up
_FAR_BELOW = 0.85  # of what was planned
_STEPS_BELOW = 32  # that are far below, one after the other, before steps have changed
_LESS = 0.98  # of what was planned, at most, in the next plan


class Watch:
    """Counts bytes of tensors, in each step.

    Attributes:
        peak: the most bytes that the last step allocated above what was there when it began. On an
            accelerator, where the peak is not reset after each step, the most since it was.
        has_plan: there is one, and `planned` is what it predicts for `peak`.
        was_over: whether the step before the last one was over the budget.
    """

    def __init__(self) -> None:
        _C.count_host_tensors()
        self.peak = self.planned = 0
        self.has_plan = self.was_over = False
        self._began = self._next = 0  # bytes that were there when the last step began, and ended
        self._whole: int | None = None  # the budget, in bytes
        self._beside = 0  # of the program's other tensors, which the budget does not count
        self._share = 0  # likewise, of what a step allocates
        self._accepted = 0  # bytes of a step above the budget, where no plan needs less
        self._times_accepted = 0
        self._is_over = False
        self._over: list[tuple[int, int]] = []  # of steps over the budget: planned, and taken
        self._below = 0  # steps of late
        self._replays = 0

    def begin(
        self,
        planned: int,
        *,
        fits: bool,
        whole: int | None = None,
        beside: int = 0,
        share: int = 0,
    ) -> None:
        """From now on steps are under a plan.

        Args:
            planned: bytes that it predicts.
            fits: they are in the budget; if not, steps may take as much as was planned.
            whole: that tensors may take, all told; None: `share` counts.
            beside: of tensors that ``whole`` does not count.
            share: that a step may allocate.
        """
        self.has_plan, self.planned = True, planned
        self.was_over = self._is_over = False
        self._whole, self._beside, self._share = whole, beside, share
        self._accepted, self._times_accepted = 0 if fits else int(_OVER * planned), 0
        self._below, self._over = 0, []

    def end(self) -> None:
        """From now on no plan is in place."""
        self.has_plan = False

    def step_ended(self, is_counted: bool) -> None:
        """A step has ended, and another begins.

        Args:
            is_counted: on an accelerator, whether the peak is reset now, so that the next step's is
                its own; torch.accelerator.max_memory_allocated() then begins anew, too.
        """
        self.was_over = self._is_over
        self._began = self._next
        self._next, most = _C.tensor_bytes()
        self.peak = max(0, most - self._began)
        slack = _SLACK + (_OVER - 1) * (self._share if self._whole is None else self._whole)
        is_over = self.peak > max(self._allowed + slack, self._accepted)
        self._is_over = self.has_plan and is_over
        if is_counted or devices.in_use() is None or self.is_over():
            _C.reset_most_tensor_bytes()

    def leave_out(self) -> None:
        """What has been allocated since the last step ended is no part of the next one."""
        self._next, _ = _C.tensor_bytes()
        _C.reset_most_tensor_bytes()

    @property
    def _allowed(self) -> int:
        if self._whole is None:
            return self._share
        return self._whole + self._beside - self._began

    def is_over(self) -> bool:
        """Whether the last step took more than the budget allows."""
        return self._is_over

    def is_far_below(self) -> bool:
        """Whether steps have taken far less than was planned for, for long."""
        self._below = self._below + 1 if self.peak < _FAR_BELOW * self.planned else 0
        return self._below >= _STEPS_BELOW

    def in_words(self) -> str:
        """What the last step took."""
        if self._whole is None:
            return f"a step allocated {size(self.peak)}, and the budget is {size(self._share)}"
        return (
            f"a step allocated {size(self.peak)}, and the budget left "
            f"{size(max(0, self._allowed))} for it"
        )

    def less(self) -> int:
        """Bytes to plan for, so that a step as the last one is in the budget. See Note [Steps over
        the budget]."""
        self._over.append((self.planned, self.peak))
        wanted = self.planned * self._allowed / max(1, self.peak)
        if len(self._over) > 1:
            (planned, took), (planned_then, took_then) = self._over[-1], self._over[-2]
            slope = max(0.25, (took_then - took) / max(1, planned_then - planned))
            wanted = planned - (took - self._allowed) / slope
        return max(0, int(min(wanted, _LESS * self.planned)))

    def accept(self) -> None:
        """There is no plan for less than the last step took. If steps grow on, only a large growth
        counts again."""
        factor = _OVER if self._times_accepted == 0 else _MUCH_MORE
        self._accepted = int(factor * self.peak)
        self._times_accepted += 1

    def has_replayed(self) -> bool:
        """Whether an operator has run again since this was last asked."""
        before, self._replays = self._replays, int(_C.stats()["total"]["ops_replayed"])
        return self._replays > before
