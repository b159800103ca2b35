"""The plan in a report: predicted and measured memory and time of a step, and the cost of other
budgets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ebb import _C

Points = tuple["BudgetPoint", ...]


@dataclass(frozen=True)
class Course:
    """The memory and the time of a step."""

    peak: int | None  # bytes above the memory in use when the step begins; None: unknown
    duration: float | None  # milliseconds; None: unknown
    # Milliseconds since the step began, and bytes from then on. A long timeline is thinned but
    # keeps its highest points.
    timeline: tuple[tuple[float, int], ...] = field(repr=False, default=())
    # When regions run forward and backward: "region" or "backward", the region's name, and start
    # and duration in milliseconds.
    spans: tuple[tuple[str, str, float, float], ...] = field(repr=False, default=())


@dataclass(frozen=True)
class Again:
    """The results of an operator that a region recomputes."""

    bytes: int  # freed
    duration: float  # milliseconds


@dataclass(frozen=True)
class Cut:
    """Regions with equal decisions: their kept and freed bytes. Bytes and times are per region."""

    modules: str  # names of the regions, such as "layers.0-3"
    count: int  # how many regions
    is_region: bool  # False if the modules are not regions and keep all, as in eager
    held: int  # bytes that one region has in memory when the forward ends
    added: float  # milliseconds that one region adds to the step
    kept: Mapping[str, int]  # kept bytes by operator, the largest first
    again: Mapping[str, Again]  # by recomputed operator, the longest time first
    away: Mapping[str, int]  # offloaded bytes by operator, and "what it reads" for inputs
    paged: Mapping[str, int]  # bytes of valid rows that go to page pools, as for `away`
    often: Mapping[str, int]  # number of runs, by operator with RECOMPUTE_EACH_TIME


@dataclass(frozen=True)
class BudgetPoint:
    """The plan for one budget. The first fields are as in ``ParetoPoint``."""

    budget: int
    peak: int
    duration: float
    replays: int
    is_plan: bool  # True for the budget of the plan in use
    cuts: tuple[Cut, ...]  # one for each group of equal regions


@dataclass(eq=False, repr=False)
class ReportedPlan:
    """A plan, as shown in reports of steps under it."""

    budget: int  # bytes that the step may allocate above the memory in use when it begins
    predicted: Course
    plain: Course  # without regions
    regions: Collection[str]  # names
    _points: Points | Callable[[], Points]
    passes: int = 1  # in one step; other fields of a report describe only the last
    measured: Course | None = None  # None: no step was measured
    # The most bytes of tensors within the budget, as the last step began; None: unknown.
    limit: int | None = None
    steps: int | None = None  # that have ended under the plan, if a budget counts them
    source: str = ""  # the file that the plan came from; empty: it was made in this job

    def __post_init__(self) -> None:
        self.regions = frozenset(self.regions)

    @property
    def points(self) -> Points:
        """The plans for other budgets, from the lowest to one that frees nothing."""
        if callable(self._points):
            self._points = self._points()
        return self._points

    def keep_points(self, wanted: bool) -> None:
        """Computes ``points`` now if `wanted`, else drops them. Then frees the data from which they
        are computed."""
        self._points = self.points if wanted else ()

    @property
    def deviation(self) -> dict[str, float | None]:
        """Measured over predicted, minus 1, for ``peak`` and ``duration``; None if unknown."""
        found = self.measured or Course(None, None)
        return {
            "peak": _share(found.peak, self.predicted.peak),
            "duration": _share(found.duration, self.predicted.duration),
        }

    def to_dict(self) -> dict[str, Any]:
        """The plan as a dictionary for JSON."""
        return {
            "budget": self.budget,
            "passes": self.passes,
            "predicted": asdict(self.predicted),
            "measured": None if self.measured is None else asdict(self.measured),
            "deviation": self.deviation,
            "plain": asdict(self.plain),
            "regions": sorted(self.regions),
            "points": list(map(asdict, self.points)),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ReportedPlan:
        """The plan whose `to_dict` returned these values."""
        return cls(
            values["budget"],
            _course_of(values["predicted"]),
            _course_of(values["plain"]),
            values.get("regions", ()),  # absent in older files
            tuple(map(_point_of, values["points"])),
            values["passes"],
            None if values["measured"] is None else _course_of(values["measured"]),
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_points": self.points}  # the function itself is not pickled


def _share(measured: float | None, predicted: float | None) -> float | None:
    return measured / predicted - 1 if measured is not None and predicted else None


def _course_of(values: dict[str, Any]) -> Course:
    lists = {name: tuple(map(tuple, values[name])) for name in ("timeline", "spans")}
    return Course(**values | lists)


def _point_of(values: dict[str, Any]) -> BudgetPoint:
    return BudgetPoint(**values | {"cuts": tuple(map(_cut_of, values["cuts"]))})


def _cut_of(values: dict[str, Any]) -> Cut:
    return Cut(**values | {"again": {op: Again(**one) for op, one in values["again"].items()}})


def thinned(timeline: Iterable[tuple[float, int]], most: int = 600) -> list[tuple[float, int]]:
    """Thins a long timeline: keeps the lowest, the highest and the last point of each stretch."""
    all_points = list(timeline)
    length = -(-3 * len(all_points) // most)
    if length <= 3:
        return all_points
    found = []
    for begin in range(0, len(all_points), length):
        stretch = range(begin, min(begin + length, len(all_points)))
        by_size = sorted(stretch, key=lambda place: all_points[place][1])
        found += [all_points[one] for one in sorted({by_size[0], by_size[-1], stretch[-1]})]
    return found


# Note [Steps under a plan]
# A report finds its plan by the number of its step and by the name of a region of the plan. A step
# that had recorded rows before the plan was put in place does not count as under the plan. Step
# numbers are those of ebb.stats(). ebb.reset_stats() restarts them, so ebb then forgets all plans
# that are no longer in place.


@dataclass
class _InPlace:
    plan: ReportedPlan | None  # None: forgotten
    first: int
    last: int | None = None  # None while the plan is in place
    passes: int = 0  # `_C.totals()["passes"]` when the plan was put in place


_known: list[_InPlace] = []  # replaced, and not changed, because other threads may iterate over it
_lock = threading.Lock()  # held while `_known` is replaced


def begins(plan: ReportedPlan) -> None:
    """Shows a plan in reports of the steps from now on."""
    global _known
    recorded = [(found["number"], bool(found["rows"])) for found in _C.reports()]
    now = int(_C.stats()["passes"])
    with _lock:
        known = [
            one
            for one in _known
            if one.plan is not None
            and (one.last is None or any(one.first <= step <= one.last for step, _ in recorded))
        ]
        first = now + ((now, True) in recorded)
        _known = [*known, _InPlace(plan, first, passes=int(_C.totals()["passes"]))]


def ends(plan: ReportedPlan) -> None:
    """Shows a plan only in reports of steps up to the current one."""
    for one in _known:
        if one.plan is plan and one.last is None:
            one.last = int(_C.stats()["passes"])


def forget(plan: ReportedPlan) -> None:
    """Forgets a plan whose model was freed, since another model may have regions of the same names.
    Calls no C++ and takes no lock, since garbage collection may call this anywhere."""
    for one in _known:
        if one.plan is plan:
            one.plan = None


def is_in_place(plan: ReportedPlan) -> bool:
    return any(one.plan is plan and one.last is None for one in _known)


def only_plan() -> tuple[ReportedPlan, int | None] | None:
    """The plan in place, and how many steps have ended under it, None if unknown. None if there is
    no plan, or more than one."""
    in_place = [one for one in _known if one.plan is not None and one.last is None]
    if len(in_place) != 1 or (plan := in_place[0].plan) is None:
        return None
    if plan.steps is not None or not plan.regions:  # without a region, ebb sees no pass
        return plan, plan.steps
    return plan, (int(_C.totals()["passes"]) - in_place[0].passes) // max(1, plan.passes)


def steps_are_renumbered() -> None:
    global _known
    with _lock:
        _known = [replace(one, first=0) for one in _known if one.last is None]


def plan_of_step(step: int, regions: Iterable[str]) -> ReportedPlan | None:
    """The plan of a recorded step in which these regions ran; the latest if there are several."""
    names = set(regions)
    for one in reversed(_known):
        plan, last = one.plan, step if one.last is None else one.last
        if plan is not None and one.first <= step <= last and not names.isdisjoint(plan.regions):
            return plan
    return None
