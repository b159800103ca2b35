"""Chooses for all regions. In: a `Simulator`, a budget. Out: the fastest choices within it."""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cached_property

from ebb._plan.choose.region_pareto import (
    Point,
    front,
    hull,
    not_beaten,
    point_of,
    recomputed_each_time,
)
from ebb._plan.choose.stacks import Stacked
from ebb._plan.simulate.changes import highest
from ebb._plan.simulate.choice import EAGER, Choice, Operators
from ebb._plan.simulate.dataflow import Call
from ebb._plan.simulate.simulator import Estimate, Simulator
from ebb._plan.simulate.step import Step

Chosen = Mapping[str, Point]
"""The point for each region, by the region's name."""

_MOST_TRIED = 300  # choices tried for the lowest peak
_MOST_WORK = 12_000  # operators simulated in that search, in about 0.1 s
_MOST_TIGHT_WORK = 150_000  # operators simulated in the search for lower peaks, see `_tight`
_MOST_PASSES = 12  # of that search over all groups
_MOST_IMPROVED = 60  # choices for single regions that the last stage tries


# Note [How a plan is chosen]
# Equal regions share one front of choices, see `front` and Note [Equal blocks].
# All regions begin with the choice that needs the fewest bytes. Then the chooser goes along the
# lower convex hulls of the fronts, from corner to corner, and takes the moves with the largest gain
# in time per byte first. As many regions make each move as the budget allows, found by bisection.
# Regions at the end of forward come first, since backward frees their saved tensors first. Also,
# backward begins with the last region, whose results are all in memory at that time in any case. At
# last, choices between the corners fill the rest of the budget. The whole step is simulated after
# each change, so no plan exceeds the budget in the simulation.


class Chooser:
    """Finds choices for memory budgets. `stacked`: the simulator's step, if it has several blocks
    in a region; the choices for such regions are given."""

    def __init__(self, simulator: Simulator, stacked: Stacked | None = None) -> None:
        self.simulator, self.stacked = simulator, stacked
        self._given = stacked.choices if stacked else {}
        self._estimates: dict[tuple[Choice | None, ...], Estimate] = {}
        self._plans: list[tuple[Estimate, Chosen]] = []  # all plans that `choose` found
        self.calls: dict[str, list[int]] = defaultdict(list)  # by region name
        for number, call in enumerate(simulator.step.calls):
            self.calls[call.region].append(number)
        self.fronts: dict[str, list[Point]] = {}
        self.alike: dict[str, int] = {}  # equal numbers for regions that share a front
        self._groups: dict[int, list[str]] = defaultdict(list)  # regions that share a front
        self._find_fronts()
        # Searches for low peaks simulate a limited number of operators; results in the simulator's
        # cache do not count. Each search begins with this copy of the cache, so what was simulated
        # earlier does not change its result.
        self._after_fronts = simulator.copy()

    def _find_fronts(self) -> None:
        numbers_of: dict[Hashable, int] = {}
        step = self.simulator.step
        for region, numbers in self.calls.items():
            signature = tuple(_signature(step, step.calls[number]) for number in numbers)
            self.alike[region] = numbers_of.setdefault(signature, len(numbers_of))
            group = self._groups[self.alike[region]]
            group.append(region)
            if group[0] != region:
                self.fronts[region] = self.fronts[group[0]]
            elif region in self._given:
                choices = (*self._given[region], EAGER)
                self.fronts[region] = not_beaten(self._point(region, choice) for choice in choices)
            else:
                points = front(self.simulator, numbers[0])
                self.fronts[region] = [self._point(region, point.choice) for point in points]

    def estimate(self, chosen: Chosen) -> Estimate:
        """Peak and time of a step with these choices."""
        choices = tuple(self.of_calls(chosen))
        if choices not in self._estimates:
            self._estimates[choices] = self.simulator.estimate(choices)
        return self._estimates[choices]

    def of_calls(self, chosen: Chosen) -> list[Choice | None]:
        """The choice for each call of a region."""
        step = self.simulator.step
        choices: list[Choice | None] = [EAGER] * len(step.calls)
        for region, numbers in self.calls.items():
            for number in numbers:
                choices[number] = _translated(step, chosen[region].choice, numbers[0], number)
        return choices

    def plain(self) -> Chosen:
        """The choice without any region."""
        return {region: self._point(region, EAGER) for region in self.fronts}

    def recomputed(self) -> Chosen:
        """The choice that recomputes everything."""
        return {region: self._point(region, Choice()) for region in self.fronts}

    def _costs(self, chosen: Chosen, simulator: Simulator | None = None) -> tuple[int, float]:
        estimate = simulator.estimate(self.of_calls(chosen)) if simulator else self.estimate(chosen)
        return estimate.peak, estimate.duration

    def _point(
        self, region: str, choice: Choice | None, simulator: Simulator | None = None
    ) -> Point:
        numbers, simulator = self.calls[region], simulator or self.simulator
        points = [
            point_of(simulator, number, _translated(simulator.step, choice, numbers[0], number))
            for number in numbers
        ]
        return Point(choice, points[0].resident, sum(point.added for point in points))

    def least(self) -> Chosen:
        """The choice with the lowest peak."""
        return min([self.plain(), self.least_made_once, *self._tight], key=self._costs)

    @cached_property
    def least_made_once(self) -> Chosen:
        """The choice with the lowest peak if no operator is recomputed twice. Saving a result
        from which others are recomputed may lower the peak in backward, so single saved results are
        tried too."""
        simulator = self._after_fronts
        best = self.recomputed()
        costs = self._costs(best, simulator)
        most = simulator.work + _MOST_WORK
        for candidate in itertools.islice(self._candidates(simulator), _MOST_TRIED):
            if simulator.work > most:
                break
            tried = {**best, **candidate}
            if (tried_costs := self._costs(tried, simulator)) < costs:
                best, costs = tried, tried_costs
        return best

    @cached_property
    def _tight(self) -> list[Chosen]:
        """Choices with lower peaks than `least_made_once`: the groups of like regions, one after
        the other, recompute some of their results each time. The peak then lies in another group,
        so the groups take turns until none lowers it. If several groups have the same peak, none
        alone lowers it; so in one more round each group lowers its own."""
        tight: list[Chosen] = []
        best, costs = self.least_made_once, self._costs(self.least_made_once)
        most = self.simulator.work + _MOST_TIGHT_WORK
        groups = list(self._groups.values())
        unchanged = 0  # turns in a row that did not lower the peak
        for regions in itertools.chain.from_iterable([groups] * _MOST_PASSES):
            tried = list(self._turn(regions, best, most))
            tight += [chosen for its_costs, chosen in tried if its_costs < costs]
            lowest = min([costs, *(its_costs for its_costs, _ in tried)])[0]
            unchanged = 0 if lowest < costs[0] else unchanged + 1
            if unchanged <= len(groups):
                costs, best = min([(costs, best), *tried], key=lambda pair: pair[0])
            elif unchanged <= 2 * len(groups):
                equal = [pair for pair in [(costs, best), *tried] if pair[0][0] == lowest]
                costs, best = min(equal, key=lambda pair: (self._own(pair[1], regions[0]), pair[0]))
            else:
                break
        return tight

    def _turn(
        self, regions: Sequence[str], best: Chosen, most: int
    ) -> Iterable[tuple[tuple[int, float], Chosen]]:
        """Costs and choices in which these like regions recompute some results each time."""
        given = self._given.get(regions[0])
        for choice in given or recomputed_each_time(self.simulator, self.calls[regions[0]][0]):
            if self.simulator.work > most:
                return
            chosen = {**best, **dict.fromkeys(regions, self._point(regions[0], choice))}
            yield self._costs(chosen), chosen

    def _own(self, chosen: Chosen, region: str) -> int:
        """The peak of a region's own memory."""
        estimate = self.simulator.of_call(self.calls[region][0], chosen[region].choice)
        return highest([estimate.own])[0]

    def made_once(self, budget: int) -> Chosen | None:
        """A choice within the budget that recomputes no operator twice; None if there is none."""
        # `least_made_once` takes long, so the choice with the fewest bytes is tried first.
        fewest = {region: points[0] for region, points in self.fronts.items()}
        if self.estimate(fewest).peak <= budget:
            return fewest
        least = self.least_made_once
        return least if self.estimate(least).peak <= budget else None

    def _candidates(self, simulator: Simulator) -> Iterable[Chosen]:
        """Choices that `least_made_once` tries, for groups of like regions."""
        longest = max(map(len, self.fronts.values()), default=0)
        for index in range(longest):
            yield {r: points[min(index, len(points) - 1)] for r, points in self.fronts.items()}
        for regions in self._groups.values():
            if regions[0] in self._given:
                continue
            operators = self.simulator.step.calls[self.calls[regions[0]][0]].operators
            for op in range(len(operators)):
                point = self._point(regions[0], Choice(frozenset([op])), simulator)
                yield dict.fromkeys(regions, point)

    def choose(self, budget: int) -> Chosen | None:
        """The fastest choice that was found; None if none stays within the budget. `budget`: bytes
        that the step may allocate."""
        plain = self.plain()
        if self.estimate(plain).peak <= budget:
            return plain
        start = self.made_once(budget)
        if start is None:
            fitting = [chosen for chosen in self._tight if self.estimate(chosen).peak <= budget]
            if not fitting:
                return None
            start = min(fitting, key=lambda chosen: self.estimate(chosen).duration)
        chosen = self._along_hulls(dict(start), budget)
        self._fill(chosen, self._groups.values(), budget)
        # Then region by region: one region may save more than the others of its group.
        self._fill(chosen, [[region] for region in self.fronts], budget, _MOST_IMPROVED)
        self._plans.append((self.estimate(chosen), chosen))
        # A plan found for a lower budget may be faster: more memory must never cost time.
        plans = [plan for plan in self._plans if plan[0].peak <= budget]
        return min(plans, key=lambda plan: plan[0].duration)[1]

    def curve(self, points: int) -> Iterable[tuple[int, Chosen, Estimate]]:
        """Budgets from the lowest possible to one that recomputes nothing; choices; estimates."""
        least = self.estimate(self.least()).peak
        most = self.estimate(self.plain()).peak
        budgets = (least + (most - least) * index // (points - 1) for index in range(points))
        for budget in dict.fromkeys(budgets):
            chosen = self.choose(budget) or self.least()
            yield budget, chosen, self.estimate(chosen)

    def _along_hulls(self, chosen: dict[str, Point], budget: int) -> dict[str, Point]:
        hulls = {number: hull(self.fronts[group[0]]) for number, group in self._groups.items()}
        steps = []
        for number, regions in self._groups.items():
            for low, high in itertools.pairwise(hulls[number]):
                gain = (low.added - high.added) / max(1, high.resident - low.resident)
                steps.append((gain, regions, low, high))
        on_hull = {}
        for region, point in chosen.items():
            corners = hulls[self.alike[region]]
            on_hull[region] = point if point in corners else corners[0]
        if self.estimate(on_hull).peak <= budget:
            chosen = on_hull
        for _, regions, low, high in sorted(steps, key=lambda step: -step[0]):
            ready = [region for region in regions if chosen[region] == low]
            self._upgrade(chosen, ready, high, budget)
        return chosen

    def _fill(
        self,
        chosen: dict[str, Point],
        groups: Iterable[Sequence[str]],
        budget: int,
        most: int | None = None,
    ) -> None:
        """Let regions save more where the budget allows it, group by group. `most`: choices to
        try; None: all."""
        tries = (
            (regions, target) for regions in groups for target in reversed(self.fronts[regions[0]])
        )
        for regions, target in itertools.islice(tries, most):
            left = budget - self.estimate(chosen).peak
            ready = [
                region
                for region in regions
                if chosen[region].added > target.added
                and (target.resident - chosen[region].resident <= left or region == regions[-1])
            ]
            self._upgrade(chosen, ready, target, budget)

    def _upgrade(
        self, chosen: dict[str, Point], regions: Sequence[str], to: Point, budget: int
    ) -> None:
        """Give a choice to as many regions as the budget allows, from the end of forward on."""
        order = sorted(regions, key=lambda region: -self.calls[region][0])

        def fits(count: int) -> bool:
            tried = {**chosen, **dict.fromkeys(order[:count], to)}
            return self.estimate(tried).peak <= budget

        count = len(order)
        if count > 0 and not fits(count):  # fewer regions need less
            count = bisect.bisect(range(1, count), False, key=lambda number: not fits(number))
        tried = {**chosen, **dict.fromkeys(order[:count], to)}
        if not to.sends or self.estimate(tried).duration <= self.estimate(chosen).duration:
            chosen.update(tried)


def _translated(step: Step, choice: Choice | None, origin: int, call: int) -> Choice | None:
    """Translate a choice to another call of the region, by operator names and counts."""
    if choice is EAGER or origin == call:
        return choice
    names_there = step.names_of(origin)
    names = step.names_of(call)

    def those_here(operators: Operators) -> Operators:
        wanted = {names_there[op] for op in operators}
        return frozenset(op for op, name in enumerate(names) if name in wanted)

    return choice.mapped(those_here)


# Note [Equal blocks]
# Blocks of the same code run the same operators on rows of the same size, but the router of a
# mixture of experts gives each block's experts another number of rows, in each step. So a plan that
# treats such blocks as different fits the routing of the profiled step only, and has a table for
# each block. The first dimension of a result therefore does not make blocks different. The
# front is that of the first of them; the estimates simulate each with its own sizes.
def _signature(step: Step, call: Call) -> Hashable:
    """Equal for calls with the same operators, rows of the same sizes, and the same dependencies.
    See Note [Equal blocks]."""
    numbers: dict[int, int] = {}

    def number(value: int) -> int:
        return numbers.setdefault(value, len(numbers))

    return tuple(
        (
            operator.func_name,
            tuple(map(number, operator.inputs)),
            tuple(
                (number(v), step.values[v].shape[1:], step.values[v].dtype, step.values[v].saved)
                for v in operator.outputs
            ),
            op in step.always_kept,
        )
        for op in call.operators
        for operator in [step.operators[op]]
    )
