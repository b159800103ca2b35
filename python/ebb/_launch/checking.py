"""Measures steps under a plan, so that reports can compare them with the prediction."""

from __future__ import annotations

from ebb import _C
from ebb._config import config
from ebb._plan.apply.described import measured_course
from ebb._plan.profile.profile import Profile, from_first_operator
from ebb._plan.profile.recording import Purpose, Recording
from ebb._report.planned import ReportedPlan
from ebb._support.log import log

# While ebb records a profile, the step has no report, and a job may end after any step. So ebb does
# not record the first step under a plan, nor a step directly after one that did not count.
_ORDER = (Purpose.TIME, Purpose.WARM_UP, Purpose.PROFILE, Purpose.TIME, Purpose.TIME)
_LEAST = 0.9  # of the predicted bytes; a step with fewer has other sizes


class Checking:
    """Measures the first steps under a plan, and passes the results to the reported plan."""

    def __init__(self, plan: ReportedPlan) -> None:
        self._plan = plan
        self._recording = Recording(gives_way=True)
        # Profiles are recorded without replays ahead, so their bytes would not match the plan.
        self._runs_ahead = config.ahead.regions > 0
        self._todo = [
            purpose for purpose in _ORDER if purpose is Purpose.TIME or not self._runs_ahead
        ]
        self._rests = False  # the next step is not measured
        self._profile: Profile | None = None
        self._times: list[float] = []
        self._begin_recording()

    def step_ended(self, peak: int) -> bool:
        """Record the step that has ended, and begin the next. True if more are to be measured."""
        try:
            self._record(peak)
            if self._todo:
                self._begin_recording()
        except Exception:  # an error in reports must not end the plan
            log.info(
                "could not measure steps under the plan; reports will not show measured values",
                exc_info=True,
            )
            self._todo = []
        return bool(self._todo)

    def stop(self) -> None:
        if self._todo:
            self._recording.end()
            self._todo = []

    def _begin_recording(self) -> None:
        self._sized = _C.paging_stats()["recorded_steps"]
        self._recording.begin(Purpose.SKIP if self._rests else self._todo[0])

    def _record(self, peak: int) -> None:
        ended = self._recording.end()
        if self._rests:
            self._rests = False
        elif ended is None or not self._is_usual(peak):
            self._rests = True  # and the purpose is tried again
            if self._todo[0] is Purpose.PROFILE:
                self._todo.insert(0, Purpose.WARM_UP)
        else:
            duration, profile = ended
            if self._todo.pop(0) is Purpose.TIME:
                self._times.append(duration)
            if profile is not None:
                self._profile, _ = from_first_operator(profile)
            if not self._todo:
                self._plan.measured = measured_course(self._profile, min(self._times))

    def _is_usual(self, peak: int) -> bool:
        """True if the peak is close to the prediction, and the step made no page pool."""
        if _C.paging_stats()["recorded_steps"] != self._sized:
            return False
        predicted = self._plan.predicted.peak or 0
        return self._runs_ahead or _LEAST * predicted <= peak <= predicted / _LEAST
