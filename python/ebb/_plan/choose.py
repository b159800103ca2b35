"""Chooses what each region saves, so that a step stays within a budget and takes least time."""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from ebb._plan.choice import PLAIN, Choice, Operators
from ebb._plan.front import Point, front, hull, not_beaten, point_of
from ebb._plan.simulate import Estimate, Simulator
from ebb._plan.step import Call, Step
from ebb._plan.tight import made_each_time

Chosen = Mapping[str, Point]
"""The point for each region, by the region's name."""

_MOST_TRIED = 300  # choices tried for the lowest peak
_MOST_WORK = 12_000  # operators simulated for that, in about 0.1 s
_MOST_TIGHT_WORK = 30_000  # operators simulated if even that peak exceeds the budget
_MOST_IMPROVED = 60  # choices for single regions that the last stage tries


# Note [How a plan is chosen]
# Regions that ran the same (operators, sizes and dependencies) share one front of choices, see
# `front`. All regions begin with the choice that needs the fewest bytes. Then the chooser takes
# steps along the hulls of the fronts, those with the largest gain in time per byte first. Each step
# is taken by as many regions as the budget allows, found by bisection. The latest regions come
# first, since backward frees their saved tensors first. Also, backward begins with the last region,
# whose results are all in memory at that time in any case. At last, choices between the corners of
# the hulls fill the rest of the budget. The whole step is simulated after each change, so no plan
# exceeds the budget in the simulation.


class Chooser:
    """Finds choices for memory budgets.

    Args:
        simulator: of the step.
        given: all choices for a region, by its name; for other regions the chooser finds them.
    """

    def __init__(
        self,
        simulator: Simulator,
        given: Mapping[str, Sequence[Choice]] | None = None,
    ) -> None:
        self.simulator = simulator
        self._given = given or {}
        self._found: list[tuple[Estimate, Chosen]] = []
        self.calls: dict[str, list[int]] = defaultdict(list)  # by region name
        for number, call in enumerate(simulator.step.calls):
            self.calls[call.region].append(number)
        self.fronts: dict[str, list[Point]] = {}
        self.alike: dict[str, int] = {}  # equal numbers for regions that ran the same
        self._find_fronts()

    def estimate(self, chosen: Chosen) -> Estimate:
        """Peak and time of a step with these choices."""
        return self.simulator.estimate(self._of_calls(chosen))

    def pool_bytes(self, chosen: Chosen) -> int:
        """Bytes of page pools in a step with these choices."""
        return self.simulator.pool_bytes(self._of_calls(chosen))

    def timeline(self, chosen: Chosen) -> list[tuple[float, int]]:
        """Bytes over time that a step with these choices allocates."""
        return self.simulator.timeline(self._of_calls(chosen))

    def _of_calls(self, chosen: Chosen) -> list[Choice | None]:
        choices: list[Choice | None] = [PLAIN] * len(self.simulator.step.calls)
        for region, numbers in self.calls.items():
            for number in numbers:
                choices[number] = self._translated(chosen[region].choice, numbers[0], number)
        return choices

    def who_holds(self, chosen: Chosen) -> list[tuple[str, int]]:
        """Bytes at the peak by their use, in descending order."""
        found = self.estimate(chosen)
        counts: Counter[str] = Counter()
        for number, choice in enumerate(self._of_calls(chosen)):
            call = self.simulator.step.calls[number]
            works = call.asked and call.asked[0][0] <= found.peaks_at <= call.asked[-1][0]
            who = f"in {call.region} while its backward runs" if works else "saved by other blocks"
            counts[who] += self.simulator.held_at(number, choice, found.peaks_at)
        counts["in page pools"] = self.pool_bytes(chosen)
        counts["outside of regions"] = max(0, found.peak - counts.total())
        return [(who, held) for who, held in counts.most_common() if held > 0]

    def plain(self) -> Chosen:
        """The choice without any region."""
        return {region: self._point(region, PLAIN) for region in self.fronts}

    def recomputed(self) -> Chosen:
        """The choice that recomputes everything."""
        return {region: self._point(region, Choice()) for region in self.fronts}

    def least(self) -> Chosen:
        """The choice with the lowest peak."""
        return min([self.plain(), self._least, *self._tight], key=self._costs)

    def least_made_once(self) -> Chosen:
        """The choice with the lowest peak if no operator is recomputed twice."""
        return self._least

    @functools.cached_property
    def _least(self) -> Chosen:
        """As `least_made_once`. To save a result from which others are recomputed may lower the
        peak in backward. To save nothing may do so too, even if the memory before backward is the
        same."""
        best = self.recomputed()
        costs = self._costs(best)
        most = self.simulator.work + _MOST_WORK
        for other in itertools.islice(self._candidates(), _MOST_TRIED):
            if self.simulator.work > most:
                break
            tried = {**best, **other}
            if (found := self._costs(tried)) < costs:
                best, costs = tried, found
        return best

    @functools.cached_property
    def _tight(self) -> list[Chosen]:
        """Choices with lower peaks than `_least`: the groups of like regions, one after the other,
        recompute some of their results each time."""
        found: list[Chosen] = []
        best, costs = self._least, self._costs(self._least)
        most = self.simulator.work + _MOST_TIGHT_WORK
        for regions in self._groups():
            tried = []
            for choice in self._tight_choices(regions[0]):
                if self.simulator.work > most:
                    break
                chosen = {**best, **dict.fromkeys(regions, self._point(regions[0], choice))}
                tried.append((self._costs(chosen), chosen))
            found += [chosen for one, chosen in tried if one < costs]
            costs, best = min([(costs, best), *tried], key=lambda one: one[0])
        return found

    def _tight_choices(self, region: str) -> Iterable[Choice]:
        if region in self._given:
            return self._given[region]
        return made_each_time(self.simulator, self.calls[region][0])

    def _start(self, budget: int) -> Chosen | None:
        """The start of a plan: the fastest low-memory choice within the budget, or None."""
        if self.estimate(self._least).peak <= budget:
            return self._least
        fitting = [one for one in self._tight if self.estimate(one).peak <= budget]
        return min(fitting, key=lambda one: self.estimate(one).duration, default=None)

    def _candidates(self) -> Iterable[Chosen]:
        """Choices for groups of like regions."""
        longest = max(map(len, self.fronts.values()), default=0)
        for place in range(longest):
            yield {r: points[min(place, len(points) - 1)] for r, points in self.fronts.items()}
        for regions in self._groups():
            if regions[0] in self._given:
                continue
            operators = self.simulator.step.calls[self.calls[regions[0]][0]].operators
            for place in range(len(operators)):
                yield dict.fromkeys(regions, self._point(regions[0], Choice(frozenset([place]))))

    def _groups(self) -> Iterable[list[str]]:
        """Regions that ran the same."""
        groups: dict[int, list[str]] = defaultdict(list)
        for region, number in self.alike.items():
            groups[number].append(region)
        return groups.values()

    def _costs(self, chosen: Chosen) -> tuple[int, float]:
        found = self.estimate(chosen)
        return found.peak, found.duration

    def _point(self, region: str, choice: Choice | None) -> Point:
        numbers = self.calls[region]
        found = [
            point_of(self.simulator, number, self._translated(choice, numbers[0], number))
            for number in numbers
        ]
        return Point(choice, found[0].held, sum(one.added for one in found))

    def choose(self, budget: int) -> Chosen | None:
        """The fastest choice that was found; None if none stays within the budget.

        Args:
            budget: peak bytes that the step may allocate.
        """
        plain = self.plain()
        if self.estimate(plain).peak <= budget:
            return plain
        start = self._start(budget)
        if start is None:
            return None
        found = self._filled(self._along_hulls(dict(start), budget), budget)
        self._improve(found, budget)
        self._found.append((self.estimate(found), found))
        fitting = [one for one in self._found if one[0].peak <= budget]
        # A plan found for a lower budget may be faster: more memory must never cost time.
        return min(fitting, key=lambda one: one[0].duration)[1]

    def _along_hulls(self, chosen: dict[str, Point], budget: int) -> dict[str, Point]:
        steps = []
        for regions in self._groups():
            for low, high in itertools.pairwise(hull(self.fronts[regions[0]])):
                gain = (low.added - high.added) / max(1, high.held - low.held)
                steps.append((gain, regions, low, high))
        on_hull = {}
        for region, point in chosen.items():
            corners = hull(self.fronts[region])
            on_hull[region] = point if point in corners else corners[0]
        if self.estimate(on_hull).peak <= budget:
            chosen = on_hull
        for _, regions, low, high in sorted(steps, key=lambda step: -step[0]):
            ready = [region for region in regions if chosen[region] == low]
            self._raise(chosen, ready, high, budget)
        return chosen

    def _filled(self, chosen: dict[str, Point], budget: int) -> dict[str, Point]:
        for regions in self._groups():
            for target in reversed(self.fronts[regions[0]]):
                left = budget - self.estimate(chosen).peak
                ready = [
                    region
                    for region in regions
                    if chosen[region].added > target.added
                    and (target.held - chosen[region].held <= left or region == regions[-1])
                ]
                self._raise(chosen, ready, target, budget)
        return chosen

    def _improve(self, chosen: dict[str, Point], budget: int) -> None:
        """Improve single regions: one may save more at a time when others hold less."""
        tries = (
            (region, point) for region, points in self.fronts.items() for point in reversed(points)
        )
        for region, point in itertools.islice(tries, _MOST_IMPROVED):
            if point.added < chosen[region].added:
                self._raise(chosen, [region], point, budget)

    def _raise(
        self, chosen: dict[str, Point], regions: Sequence[str], to: Point, budget: int
    ) -> None:
        """Give a choice to as many regions as the budget allows, the latest first."""
        order = sorted(regions, key=lambda region: -self.calls[region][0])

        def fits(count: int) -> bool:
            tried = {**chosen, **dict.fromkeys(order[:count], to)}
            return self.estimate(tried).peak <= budget

        tried = {**chosen, **dict.fromkeys(order[: _most(len(order), fits)], to)}
        if not to.sends or self.estimate(tried).duration <= self.estimate(chosen).duration:
            chosen.update(tried)

    def _find_fronts(self) -> None:
        known: dict[Hashable, tuple[int, list[Point]]] = {}
        step = self.simulator.step
        for region, numbers in self.calls.items():
            signature = tuple(_signature(step, step.calls[number]) for number in numbers)
            if signature not in known:
                known[signature] = (len(known), self._front_of(region))
            self.alike[region], self.fronts[region] = known[signature]

    def _front_of(self, region: str) -> list[Point]:
        if region in self._given:
            return not_beaten(self._point(region, one) for one in (*self._given[region], PLAIN))
        points = front(self.simulator, self.calls[region][0])
        return [self._point(region, point.choice) for point in points]

    def _translated(self, choice: Choice | None, origin: int, call: int) -> Choice | None:
        """Translate a choice to another call of the region, by operator names and counts."""
        if choice is PLAIN or origin == call:
            return choice
        names_there = self.simulator.step.names_of(origin)
        names = self.simulator.step.names_of(call)

        def those_here(operators: Operators) -> Operators:
            wanted = {names_there[place] for place in operators}
            return frozenset(place for place, name in enumerate(names) if name in wanted)

        return choice.mapped(those_here)


def _signature(step: Step, call: Call) -> Hashable:
    """Equal for calls that ran the same."""
    places: dict[int, int] = {}

    def place(value: int) -> int:
        return places.setdefault(value, len(places))

    return tuple(
        (
            one.func_name,
            tuple(map(place, one.inputs)),
            tuple((place(v), step.values[v].memory, step.values[v].saved) for v in one.outputs),
            number in step.stays,
        )
        for number in call.operators
        for one in [step.operators[number]]
    )


def _most(count: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `count` that fits. Assumes that all smaller numbers fit too; 0
    always fits."""
    if count == 0 or fits(count):
        return count
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
