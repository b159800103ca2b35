"""What reports tell of a plan: what a step was to need under it, what it did, and what other
budgets would cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ebb import _C

Points = tuple["BudgetPoint", ...]


@dataclass(frozen=True)
class Course:
    """What a step allocates, and how long it takes.

    Attributes:
        peak: the most bytes at a time, above what is there when it begins; None: not known.
        duration: milliseconds; None: not known.
        timeline: tuples of milliseconds since it began, and bytes from then on. Of a long step not
            all, but the highest.
    """

    peak: int | None
    duration: float | None
    timeline: tuple[tuple[float, int], ...] = field(repr=False, default=())


@dataclass(frozen=True)
class Cut:
    """What regions that do the same keep, and what they give up. Bytes and times are of one.

    Attributes:
        modules: the names of the regions, such as ``"layers.0-3"``.
        count: how many they are.
        is_region: if not, they are as they were, and keep all.
        held: bytes that one holds when the forward ends.
        added: milliseconds that one adds to the step.
        kept: bytes by operator, the largest first.
        again: by operator that runs again the bytes that are given up, and its milliseconds; what
            takes longest first.
        away: bytes of what leaves memory, by operator, and ``"what it reads"``.
        paged: bytes of live rows that go to page pools, likewise.
        often: by operator that is made again each time that something needs it, how often.
    """

    modules: str
    count: int
    is_region: bool
    held: int
    added: float
    kept: Mapping[str, int]
    again: Mapping[str, tuple[int, float]]
    away: Mapping[str, int]
    paged: Mapping[str, int]
    often: Mapping[str, int]


@dataclass(frozen=True)
class BudgetPoint:
    """What one budget comes to.

    Attributes:
        budget, peak, duration, replays: as of :class:`ebb.ParetoPoint`.
        is_plan: whether it is what is done.
        cuts: where it cuts.
    """

    budget: int
    peak: int
    duration: float
    replays: int
    is_plan: bool
    cuts: tuple[Cut, ...]


class ReportedPlan:
    """A plan, as reports of steps under it show it.

    Attributes:
        budget: bytes that the step may allocate above what is there when it begins.
        predicted: what it was to need.
        plain: what it needs without regions.
        measured: what it did need; None: nobody has measured it.

    Args:
        regions: names of those that it makes.
        points: makes ``points`` when somebody asks for them.
    """

    measured: Course | None = None

    def __init__(
        self,
        budget: int,
        predicted: Course,
        plain: Course,
        regions: Iterable[str],
        points: Callable[[], Points],
    ) -> None:
        self.budget, self.predicted, self.plain = budget, predicted, plain
        self.regions = frozenset(regions)
        self._points: Points | Callable[[], Points] = points

    @property
    def points(self) -> Points:
        """What budgets would cost, from the least to one at which nothing is given up."""
        if callable(self._points):
            self._points = self._points()
        return self._points

    def keep_points(self, wanted: bool) -> None:
        """What makes them is not needed after this: they are made now, or there are none."""
        self._points = self.points if wanted else ()

    @property
    def deviation(self) -> dict[str, float | None]:
        """By how much more was measured than predicted: shares, of ``peak`` and ``duration``."""
        found = self.measured or Course(None, None)
        return {
            "peak": _share(found.peak, self.predicted.peak),
            "duration": _share(found.duration, self.predicted.duration),
        }

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "budget": self.budget,
            "predicted": asdict(self.predicted),
            "measured": None if self.measured is None else asdict(self.measured),
            "deviation": self.deviation,
            "plain": asdict(self.plain),
            "points": [_point(point) for point in self.points],
        }

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_points": self.points}  # what makes them stays here


def _share(measured: float | None, predicted: float | None) -> float | None:
    return measured / predicted - 1 if measured is not None and predicted else None


def _point(point: BudgetPoint) -> dict[str, Any]:
    found = asdict(point)
    for cut in found["cuts"]:
        cut["again"] = {
            op: {"bytes": given_up, "duration": time}
            for op, (given_up, time) in cut["again"].items()
        }
    return found


def thinned(timeline: Iterable[tuple[float, int]], most: int = 600) -> list[tuple[float, int]]:
    """A part of a long timeline: of each stretch the lowest, the highest and the last."""
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
# A report knows its plan by the number of its step, and by a region that is the plan's. A step of
# which something was recorded before the plan was put in place is not under it. Steps are those of
# the statistics; when these are set to zero, only plans that are in place now are still known.


@dataclass
class _InPlace:
    plan: ReportedPlan
    first: int
    last: int | None = None  # while it is in place


_known: list[_InPlace] = []


def begins(plan: ReportedPlan) -> None:
    """From now on steps are under this plan."""
    recorded = [(found["step"], bool(found["rows"])) for found in _C.reports()]
    now = _step()
    _known[:] = [
        one
        for one in _known
        if one.last is None or any(one.first <= step <= one.last for step, _ in recorded)
    ]
    _known.append(_InPlace(plan, now + ((now, True) in recorded)))


def ends(plan: ReportedPlan) -> None:
    """From now on they are not."""
    for one in _known:
        if one.plan is plan and one.last is None:
            one.last = _step()


def forget(plan: ReportedPlan) -> None:
    """Its model is gone, and another one may have regions of the same names. Asks nothing of C++,
    since it may be called wherever garbage is collected."""
    _known[:] = [one for one in _known if one.plan is not plan]


def is_in_place(plan: ReportedPlan) -> bool:
    return any(one.plan is plan and one.last is None for one in _known)


def steps_are_renumbered() -> None:
    _known[:] = [_InPlace(one.plan, 0) for one in _known if one.last is None]


def plan_of_step(step: int, regions: Iterable[str]) -> ReportedPlan | None:
    """The plan of a recorded step; of several that which came last.

    Args:
        regions: that ran in it.
    """
    names = set(regions)
    for one in reversed(_known):
        last = step if one.last is None else one.last
        if one.first <= step <= last and names & one.plan.regions:
            return one.plan
    return None


def _step() -> int:
    step: int = _C.stats()["step"]
    return step
