"""Measures steps under a plan, so that reports have them beside what was predicted."""

from __future__ import annotations

from ebb import ahead, paging
from ebb._launch.budgeted import Blocks
from ebb._launch.measured_steps import Do, Recording
from ebb._plan.for_reports import measured_course
from ebb._plan.profile import Profile
from ebb._report.planned import ReportedPlan
from ebb._support.log import log

# Steps that are recorded have no report. So the first one is not, nor is one after a step that did
# not count: a job may end at any.
_ORDER = (Do.TIME, Do.LISTEN, Do.PROFILE, Do.TIME, Do.TIME)
_MOST_AGAIN = 20  # steps that did not count, before nothing is measured


class Checking:
    """Goes through the first steps under a plan, one at each boundary.

    Args:
        plan: gets what was measured.
        blocks: tell whether a step is like those for which the plan was made.
    """

    def __init__(self, plan: ReportedPlan, blocks: Blocks) -> None:
        self._plan = plan
        self._blocks = blocks
        self._recording = Recording()
        # Bytes are recorded without replays ahead, so they would not be those of the plan.
        runs_ahead = ahead.settings()["regions"] > 0
        self._todo = [do for do in _ORDER if do is Do.TIME or not runs_ahead]
        self._again = 0  # steps that did not count
        self._rests = False  # for one step
        self._profile: Profile | None = None
        self._times: list[float] = []
        self._begin_recording()

    def step_ended(self) -> bool:
        """And another begins.

        Returns:
            Whether there is more to be measured.
        """
        try:
            return self._step_ended()
        except Exception:  # a report is not worth a plan
            log.info("steps under the plan are not measured", exc_info=True)
            self._todo = []
            return False

    def stop(self) -> None:
        """Nothing is measured any more."""
        if self._todo:
            self._recording.end()
            self._todo = []

    def _step_ended(self) -> bool:
        ended = self._recording.end()
        if self._rests:
            self._rests = False
        elif ended is not None and self._is_usual():
            self._note(*ended)
        else:
            self._do_again()
        if self._todo:
            self._begin_recording()
        return bool(self._todo)

    def _begin_recording(self) -> None:
        self._sized = paging.stats()["recorded_steps"]
        self._recording.begin(Do.NOTHING if self._rests else self._todo[0])

    def _is_usual(self) -> bool:
        """Whether it did as the steps that were measured, and no page pool was made anew in it."""
        return self._blocks.did_as_measured() and paging.stats()["recorded_steps"] == self._sized

    def _do_again(self) -> None:
        self._again += 1
        self._rests = True
        if self._again > _MOST_AGAIN:
            self._todo = []
        elif self._todo[0] is Do.PROFILE:
            self._todo.insert(0, Do.LISTEN)

    def _note(self, duration: float, profile: Profile | None) -> None:
        do = self._todo.pop(0)
        if do is Do.TIME:
            self._times.append(duration)
        self._profile = profile or self._profile
        if not self._todo:
            self._plan.measured = measured_course(self._profile, min(self._times))
