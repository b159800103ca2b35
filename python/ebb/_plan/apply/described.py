"""Describes plans. In: a plan's choices, or a measured step. Out: text, and data of reports."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable

from ebb import _C
from ebb._config import config
from ebb._plan.choose.chooser import Chooser, Chosen
from ebb._plan.choose.memory_budget import BudgetError, in_all
from ebb._plan.profile.copies import has_rows, live_bytes
from ebb._plan.profile.profile import Profile
from ebb._plan.simulate.choice import EAGER
from ebb._plan.simulate.dataflow import EPSILON, Call, Dataflow
from ebb._plan.simulate.simulator import Estimate
from ebb._plan.simulate.step import Step
from ebb._report.planned import Again, BudgetPoint, Course, Cut, Points, ReportedPlan, thinned
from ebb._report.text import price, size
from ebb._support.names import in_ranges

_BUDGETS = 12  # points of the curve, beside the plan's own
_FEW = 4  # with fewer regions, smaller ones may lower the peak
_INPUTS = "what it reads"
_OUTSIDE = "outside of regions"  # a use of the peak


def paragraphs(chooser: Chooser, chosen: Chosen) -> Iterable[str]:
    """Lines for each kind of region."""
    for cut in cuts_of(chooser, chosen):
        if not cut.is_region:
            yield f"{cut.modules}: left eager; each saves {size(cut.held)}"
            continue
        yield f"{cut.modules}: each saves {size(cut.held)} and takes {cut.added:.2f} ms more"
        for what, sizes in (("saved", cut.kept), ("offloaded", cut.away), ("paged", cut.paged)):
            if sizes:
                parts = [f"{op} ({size(nbytes)})" for op, nbytes in sizes.items()]
                yield f"  {what}: " + ", ".join(parts)
        if cut.again:
            parts = [
                f"{op} ({size(again.bytes)} freed, {again.duration:.2f} ms)"
                for op, again in cut.again.items()
            ]
            yield "  recomputed: " + ", ".join(parts)
        if cut.often:
            parts = [f"{op} ({count} times)" for op, count in cut.often.items() if count > 1]
            yield "  of these, recomputed several times: " + ", ".join(parts)


def too_small(budget: int | float, base: int, chooser: Chooser, chosen: Chosen) -> BudgetError:
    """The error of a budget that is too small. `chosen`: the choice with the lowest peak. `base`:
    bytes in use when the step begins."""
    estimate, plain = chooser.estimate(chosen), chooser.simulator.plain
    peak, slowdown = estimate.peak, estimate.duration / plain.duration
    minimum, share = in_all(base, peak), in_all(0, peak) / max(1, plain.peak) + 0.0051
    of_eager = f"{share:.0%}, or " if isinstance(budget, float) else ""
    least = (
        f"; the lowest possible budget is {of_eager}{size(minimum)} in total, at "
        f"{price(slowdown)}. "
    )
    if isinstance(budget, float) and share >= 1:
        least = ". ebb cannot lower the memory of this job: "
    given = f"{budget:.1%}" if isinstance(budget, float) else size(budget)
    uses = users_of_peak(chooser, chosen)
    parts = ", ".join(f"{size(nbytes)} {use}" for use, nbytes in uses[:4])
    message = (
        f"ebb: a budget of {given} is too small{least}"
        f"{size(base)} are in use when the step begins, and the step allocates {size(peak)} even "
        f"with everything recomputed: {parts}. "
        f"{_remedy(uses[0][0], base > minimum // 4, len(chooser.calls) < _FEW)}"
    )
    return BudgetError(message, minimum, share, slowdown)


def users_of_peak(chooser: Chooser, chosen: Chosen) -> list[tuple[str, int]]:
    """Bytes at the peak by their use, in descending order."""
    simulator, estimate = chooser.simulator, chooser.estimate(chosen)
    choices, time = chooser.of_calls(chosen), estimate.peak_time
    counts: Counter[str] = Counter()
    for number, (call, choice) in enumerate(zip(simulator.step.calls, choices, strict=True)):
        works = call.unpacked and call.backward_begins <= time <= call.unpacked[-1][0]
        saved = "saved by blocks for their backward"
        use = f"in {call.region} while its backward runs" if works else saved
        counts[use] += simulator.needed_at(number, choice, time)
    counts["in page pools"] = simulator.pool_bytes(choices)
    counts[_OUTSIDE] = max(0, estimate.peak - counts.total())
    return [(use, nbytes) for use, nbytes in counts.most_common() if nbytes > 0]


def _remedy(use: str, is_base_large: bool, are_few: bool) -> str:
    """A remedy for a peak with this main use. `is_base_large`: of the memory in use when the step
    begins. `are_few`: of the regions."""
    remedy = "Use a smaller batch"
    if are_few:
        remedy += ", or in place of a plan ebb.region around parts of the forward"
    if use == _OUTSIDE:
        remedy += (
            ", or make more modules regions (EBB_MODULES, modules=): ebb recomputes no operator "
            "outside of regions"
        )
    elif is_base_large:
        remedy += ", or move parameters or optimizer states off the device (sharding, CPU offload)"
    return remedy


def cuts_of(chooser: Chooser, chosen: Chosen) -> tuple[Cut, ...]:
    """One `Cut` for each group of regions with the same operators and choice, in order."""
    groups: dict[tuple[int, object], list[str]] = {}
    for region, point in chosen.items():
        groups.setdefault((chooser.alike[region], point.choice), []).append(region)
    return tuple(_cut(regions, chooser, chosen) for regions in groups.values())


def _cut(regions: list[str], chooser: Chooser, chosen: Chosen) -> Cut:
    name, point = ", ".join(in_ranges(regions)), chosen[regions[0]]
    choice = point.choice
    if choice is EAGER:
        return Cut(name, len(regions), False, point.resident, point.added, {}, {}, {}, {}, {})
    simulator, call = chooser.simulator, chooser.calls[regions[0]][0]
    step = simulator.step
    kept, away, paged, freed, often = (Counter[str]() for _ in range(5))
    times: dict[str, float] = {}
    replayed = simulator.replayed(call, choice)
    for index, op in enumerate(step.calls[call].operators):
        operator = step.operators[op]
        op_name = operator.func_name.removeprefix("aten::").removesuffix(".default")
        values = [step.values[value] for value in operator.outputs]
        if index in choice.kept:
            for value in values:
                if index in choice.paged and has_rows(value):
                    paged[op_name] += live_bytes(value)
                else:
                    (away if index in choice.offloaded else kept)[op_name] += value.memory
        elif op in replayed:
            freed[op_name] += sum(value.memory for value in values if value.saved)
            time = replayed[op] * simulator.replay_time(op)
            times[op_name] = times.get(op_name, 0.0) + time
            often[op_name] += replayed[op] if index in choice.each_time else 0
    inputs = [step.values[value] for value in step.calls[call].inputs if step.may_offload(value)]
    if choice.inputs:
        away[_INPUTS] = sum(value.memory for value in inputs)
    if choice.paged_inputs:
        paged[_INPUTS] = sum(live_bytes(value) for value in inputs if has_rows(value))
    return Cut(
        name,
        len(regions),
        True,
        point.resident,
        point.added,
        dict(kept.most_common()),
        {op: Again(freed[op], times[op]) for op in sorted(times, key=lambda op: -times[op])},
        dict(away.most_common()),
        dict(paged.most_common()),
        {op: count for op, count in often.most_common() if count > 0},
    )


def reported(
    chooser: Chooser,
    chosen: Chosen,
    budget: int,
    regions: Iterable[str],
    course: Course | None = None,
) -> ReportedPlan:
    """A plan with these regions as reports show it. `course`: memory and time of a step under the
    plan; None: as predicted."""
    estimate, plain = chooser.estimate(chosen), chooser.simulator.plain
    course = course or _predicted(chooser, chosen, estimate)
    assert course.peak is not None
    assert course.duration is not None
    cuts = cuts_of(chooser, chosen)
    own = BudgetPoint(budget, course.peak, course.duration, estimate.replays, True, cuts)
    return ReportedPlan(
        budget,
        course,
        _predicted(chooser, chooser.plain(), plain),
        {*regions, *(operator.region for operator in chooser.simulator.step.operators)},
        lambda: _points(chooser, own),
        chooser.simulator.step.passes,
    )


def _points(chooser: Chooser, own: BudgetPoint) -> Points:
    points = {}
    for budget, chosen, estimate in chooser.curve(_BUDGETS):
        cuts = cuts_of(chooser, chosen)
        points[budget] = BudgetPoint(
            budget, estimate.peak, estimate.duration, estimate.replays, False, cuts
        )
    points[own.budget] = own
    return tuple(points[budget] for budget in sorted(points))


def course_of(profile: Profile, duration: float, standing: int = 0) -> Course:
    """Memory over time of a recorded step, scaled to its duration without recording. `standing`:
    bytes of page pools that were allocated before the step."""
    sums = itertools.accumulate(size for _, _, size in profile.allocations)
    timeline = thinned(
        (time, standing + size)
        for (time, _, _), size in zip(profile.allocations, sums, strict=True)
    )
    scale = duration / profile.duration if profile.duration > 0 else 1.0
    calls = Dataflow(profile, {}).calls
    return _course(profile.peak + standing, duration, timeline, calls, lambda time: time * scale)


def _course(
    peak: int,
    duration: float,
    timeline: Iterable[tuple[float, int]],
    calls: Iterable[Call],
    at: Callable[[float], float],
) -> Course:
    """A course; `at` gives its time for a recorded one. Times are rounded to a tenth of a
    microsecond, to keep files small."""
    spans = tuple(
        (kind, name, round(at(begins), 4), round(at(ends) - at(begins), 4))
        for kind, name, begins, ends in _marks(calls)
    )
    return Course(
        peak, duration, tuple((round(at(time), 4), size) for time, size in timeline), spans
    )


def _marks(calls: Iterable[Call]) -> Iterable[tuple[str, str, float, float]]:
    """When each call of a region runs forward and backward: kind, name, begin and end."""
    for call in calls:
        yield "region", call.region, call.begins, call.ends
        if call.unpacked:
            yield "backward", call.region, call.unpacked[0][0], call.unpacked[-1][0]


def measured_course(profile: Profile | None, duration: float) -> Course:
    """A measured step under a plan; its duration is without recording. Steps are recorded without
    replays ahead, so the memory of plans with replays ahead is unknown."""
    if profile is None or config.ahead.regions > 0:
        return Course(None, duration)
    return course_of(profile, duration, _C.paging_stats()["pool_bytes"])


def _predicted(chooser: Chooser, chosen: Chosen, estimate: Estimate) -> Course:
    """Predicted memory and time of a step. The recorded times include the recomputation of
    everything: that time is removed, and the time that the choice adds is placed in backward."""
    step, plain = chooser.simulator.step, chooser.simulator.plain.duration
    duration = estimate.duration
    points = chooser.simulator.timeline(chooser.of_calls(chosen))
    timeline = thinned(point for point in points if point[0] < math.inf)
    marks = [time for _, _, *span in _marks(step.calls) for time in span]
    clock = _without_replays(
        step, [step.forward_ends, step.duration, *(time for time, _ in timeline), *marks]
    )
    forward, whole = clock[step.forward_ends], max(clock.values())
    begins = forward / max(whole, EPSILON) * min(plain, duration)  # when backward begins

    def stretched(recorded: float) -> float:
        time = clock[recorded]
        if time <= forward:
            return time / max(forward, EPSILON) * begins
        return begins + (time - forward) / max(whole - forward, EPSILON) * (duration - begins)

    return _course(estimate.peak, duration, timeline, step.calls, stretched)


def _without_replays(step: Step, times: Iterable[float]) -> dict[float, float]:
    """For each time, the milliseconds before it without those of replays."""
    clock = {}
    before = now = most = 0.0
    for time in sorted(times):
        now += step.working(before, time)
        before, most = time, max(most, now)  # a time inside a replay moves to the replay's start
        clock[time] = most
    return clock
