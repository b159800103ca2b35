"""Choices of all regions. In: a `Simulator`. Out: each region's front; estimates of choices."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence

from ebb._plan.choose.region_pareto import Point, front, not_beaten, point_of
from ebb._plan.simulate.choice import EAGER, Choice, Operators
from ebb._plan.simulate.dataflow import Call
from ebb._plan.simulate.simulator import Estimate, Simulator
from ebb._plan.simulate.step import Step

Chosen = Mapping[str, Point]
"""The point for each region, by the region's name."""

OUTSIDE = "outside of regions"  # in `users_of_peak`


class Fronts:
    """The front of each region, and estimates for a point from each front. `given`: all choices for
    a region, by its name; for other regions `front` finds them."""

    def __init__(
        self, simulator: Simulator, given: Mapping[str, Sequence[Choice]] | None = None
    ) -> None:
        self.simulator = simulator
        self._given = given or {}
        self._estimates: dict[tuple[Choice | None, ...], Estimate] = {}
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

    def estimate(self, chosen: Chosen) -> Estimate:
        """Peak and time of a step with these choices."""
        choices = tuple(self.of_calls(chosen))
        if choices not in self._estimates:
            self._estimates[choices] = self.simulator.estimate(choices)
        return self._estimates[choices]

    def of_calls(self, chosen: Chosen) -> list[Choice | None]:
        """The choice for each call of a region."""
        choices: list[Choice | None] = [EAGER] * len(self.simulator.step.calls)
        for region, numbers in self.calls.items():
            for number in numbers:
                choices[number] = self._translated(chosen[region].choice, numbers[0], number)
        return choices

    def users_of_peak(self, chosen: Chosen) -> list[tuple[str, int]]:
        """Bytes at the peak by their use, in descending order."""
        estimate = self.estimate(chosen)
        counts: Counter[str] = Counter()
        for number, choice in enumerate(self.of_calls(chosen)):
            call, time = self.simulator.step.calls[number], estimate.peak_time
            works = call.unpacked and call.backward_begins <= time <= call.unpacked[-1][0]
            use = (
                f"in {call.region} while its backward runs"
                if works
                else "saved by blocks for their backward"
            )
            counts[use] += self.simulator.needed_at(number, choice, time)
        counts["in page pools"] = self.simulator.pool_bytes(self.of_calls(chosen))
        counts[OUTSIDE] = max(0, estimate.peak - counts.total())
        return [(use, nbytes) for use, nbytes in counts.most_common() if nbytes > 0]

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
            point_of(simulator, number, self._translated(choice, numbers[0], number))
            for number in numbers
        ]
        return Point(choice, points[0].resident, sum(point.added for point in points))

    def _find_fronts(self) -> None:
        known: dict[Hashable, tuple[int, list[Point]]] = {}
        step = self.simulator.step
        for region, numbers in self.calls.items():
            signature = tuple(_signature(step, step.calls[number]) for number in numbers)
            if signature not in known:
                known[signature] = (len(known), self._front_of(region))
            number, self.fronts[region] = known[signature]
            self.alike[region] = number
            self._groups[number].append(region)

    def _front_of(self, region: str) -> list[Point]:
        if region in self._given:
            choices = (*self._given[region], EAGER)
            return not_beaten(self._point(region, choice) for choice in choices)
        points = front(self.simulator, self.calls[region][0])
        return [self._point(region, point.choice) for point in points]

    def _translated(self, choice: Choice | None, origin: int, call: int) -> Choice | None:
        """Translate a choice to another call of the region, by operator names and counts."""
        if choice is EAGER or origin == call:
            return choice
        names_there = self.simulator.step.names_of(origin)
        names = self.simulator.step.names_of(call)

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
