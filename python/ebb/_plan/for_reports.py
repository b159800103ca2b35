"""Describes plans for reports. In: a plan, or a measured step under it. Out: data of reports."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from ebb import ahead
from ebb._plan.choose import Chooser, Chosen
from ebb._plan.in_words import Plan, cuts_of
from ebb._plan.measured import Measured
from ebb._plan.pages import pool_bytes
from ebb._plan.profile import Profile, from_first_operator
from ebb._plan.step import EPSILON, Step
from ebb._report.planned import BudgetPoint, Course, Points, ReportedPlan, thinned

_BUDGETS = 12  # points of the curve, beside the plan's own


def reported(plan: Plan, chooser: Chooser, chosen: Chosen) -> ReportedPlan:
    """The report of a plan with these choices."""
    timeline = _predicted(chooser, chosen, plan.duration)
    return _reported(plan, chooser, chosen, Course(plan.peak, plan.duration, timeline))


def reported_as_measured(plan: Plan, chooser: Chooser, measured: Measured) -> ReportedPlan:
    """Report a measured step, in which everything was recomputed, instead of a plan that needs
    more memory."""
    chosen = chooser.recomputed()
    course = course_of(measured.profile, measured.duration)
    return _reported(plan, chooser, chosen, course)


def _reported(plan: Plan, chooser: Chooser, chosen: Chosen, predicted: Course) -> ReportedPlan:
    peak, duration = predicted.peak, predicted.duration
    assert peak is not None
    assert duration is not None
    estimate = chooser.estimate(chosen)
    own = BudgetPoint(plan.budget, peak, duration, estimate.replays, True, cuts_of(chooser, chosen))
    plain = _predicted(chooser, chooser.plain(), plan.plain_duration)
    return ReportedPlan(
        plan.budget,
        predicted,
        Course(plan.plain_peak, plan.plain_duration, plain),
        {*plan.policies, *(operator.region for operator in chooser.simulator.step.operators)},
        lambda: _points(chooser, own),
    )


def _points(chooser: Chooser, own: BudgetPoint) -> Points:
    points = {}
    for budget, chosen in chooser.curve(_BUDGETS):
        estimate, cuts = chooser.estimate(chosen), cuts_of(chooser, chosen)
        points[budget] = BudgetPoint(
            budget, estimate.peak, estimate.duration, estimate.replays, False, cuts
        )
    points[own.budget] = own
    return tuple(points[budget] for budget in sorted(points))


def course_of(profile: Profile, duration: float, standing: int = 0) -> Course:
    """Memory over time of a recorded step, scaled to its duration without recording. `standing`:
    bytes that the plan allocated before the step."""
    sums = itertools.accumulate((size for _, _, size in profile.allocations), initial=standing)
    next(sums)
    times = (time for time, _, _ in profile.allocations)
    scale = duration / profile.duration if profile.duration > 0 else 1.0
    timeline = thinned(zip(times, sums, strict=True))
    peak = profile.peak + standing
    return Course(peak, duration, _rounded((t * scale, size) for t, size in timeline))


def measured_course(profile: Profile | None, duration: float) -> Course:
    """A measured step under a plan; its duration is without recording. Steps are recorded without
    replays ahead, so the memory of plans with replays ahead is unknown."""
    if profile is None or ahead.configure()["regions"] > 0:
        return Course(None, duration)
    return course_of(from_first_operator(profile)[0], duration, pool_bytes())


def _predicted(chooser: Chooser, chosen: Chosen, duration: float) -> tuple[tuple[float, int], ...]:
    """Predicted memory over time. The recorded times include the recomputation of everything: that
    time is removed, and the time that the choice adds is placed in backward."""
    step, plain = chooser.simulator.step, chooser.simulator.plain.duration
    timeline = thinned(point for point in chooser.timeline(chosen) if point[0] < math.inf)
    clock = _without_replays(
        step, [step.forward_ends, step.duration, *(time for time, _ in timeline)]
    )
    forward, whole = clock[step.forward_ends], max(clock.values())
    begins = forward / max(whole, EPSILON) * min(plain, duration)  # when backward begins

    def stretched(time: float) -> float:
        if time <= forward:
            return time / max(forward, EPSILON) * begins
        return begins + (time - forward) / max(whole - forward, EPSILON) * (duration - begins)

    return _rounded((stretched(clock[time]), size) for time, size in timeline)


def _without_replays(step: Step, times: Iterable[float]) -> dict[float, float]:
    """For each time, the milliseconds before it without those of replays."""
    clock = {}
    before = now = most = 0.0
    for time in sorted(times):
        now += step.working(before, time)
        before, most = time, max(most, now)  # a time inside a replay moves to the replay's start
        clock[time] = most
    return clock


def _rounded(timeline: Iterable[tuple[float, int]]) -> tuple[tuple[float, int], ...]:
    """Round times to a tenth of a microsecond, to keep files small."""
    return tuple((round(time, 4), size) for time, size in timeline)
