"""Measures steps under a plan, so that reports have them beside what was predicted."""

from __future__ import annotations

from ebb import _C, ahead
from ebb._launch.measured_steps import Do, Recording
from ebb._plan.for_reports import measured_course
from ebb._plan.profile import Profile
from ebb._report.planned import ReportedPlan
from ebb._support.log import log

# Steps that are recorded have no report. So the first one is not, nor is one after a step that did
# not count: a job may end at any.
_ORDER = (Do.TIME, Do.LISTEN, Do.PROFILE, Do.TIME, Do.TIME)
_LEAST = 0.9  # of the bytes that were predicted; of steps that take fewer, sizes differ


class Checking:
    """Goes through the first steps under a plan, one at each boundary.

    Args:
        plan: gets what was measured.
    """

    def __init__(self, plan: ReportedPlan) -> None:
        self._plan = plan
        self._recording = Recording()
        # Bytes are recorded without replays ahead, so they would not be those of the plan.
        self._runs_ahead = ahead.configure()["regions"] > 0
        self._todo = [do for do in _ORDER if do is Do.TIME or not self._runs_ahead]
        self._rests = False  # for one step
        self._profile: Profile | None = None
        self._times: list[float] = []
        self._begin_recording()

    def step_ended(self, peak: int) -> bool:
        """And another begins.

        Args:
            peak: the most bytes that the step allocated.

        Returns:
            Whether there is more to be measured.
        """
        try:
            return self._step_ended(peak)
        except Exception:  # a report is not worth a plan
            log.info("steps under the plan are not measured", exc_info=True)
            self._todo = []
            return False

    def stop(self) -> None:
        """Nothing is measured any more."""
        if self._todo:
            self._recording.end()
            self._todo = []

    def _step_ended(self, peak: int) -> bool:
        ended = self._recording.end()
        if self._rests:
            self._rests = False
        elif ended is not None and self._is_usual(peak):
            self._note(*ended)
        else:
            self._do_again()
        if self._todo:
            self._begin_recording()
        return bool(self._todo)

    def _begin_recording(self) -> None:
        self._sized = _C.paging_stats()["recorded_steps"]
        self._recording.begin(Do.NOTHING if self._rests else self._todo[0])

    def _is_usual(self, peak: int) -> bool:
        """Whether it took what was predicted, roughly, and no page pool was made anew in it."""
        if _C.paging_stats()["recorded_steps"] != self._sized:
            return False
        predicted = self._plan.predicted.peak or 0
        return self._runs_ahead or _LEAST * predicted <= peak <= predicted / _LEAST

    def _do_again(self) -> None:
        self._rests = True
        if self._todo[0] is Do.PROFILE:
            self._todo.insert(0, Do.LISTEN)

    def _note(self, duration: float, profile: Profile | None) -> None:
        do = self._todo.pop(0)
        if do is Do.TIME:
            self._times.append(duration)
        self._profile = profile or self._profile
        if not self._todo:
            self._plan.measured = measured_course(self._profile, min(self._times))
