"""Finds sets of results that are worth saving in one region.

Saving a result costs its bytes. A result that is needed but not saved is recomputed, with all that
it reads, down to saved results. So the cheapest choice at a price for bytes is a minimum cut, as
Jain et al. ("Checkmate", 2020) state the problem and torch's partitioner solves it for two graphs.
Each operator has two nodes: "result is available" and "operator is recomputed". The cut between
them costs the bytes; the cut below the second node costs the time. Prices from zero to infinity
give the lower hull of bytes and time. A greedy search fills the space between its corners.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ebb._plan.choice import PLAIN, Choice, Operators
from ebb._plan.min_cut import Network
from ebb._plan.pages import Pager, has_rows
from ebb._plan.rules import can_be_said
from ebb._plan.simulate import Simulator
from ebb._plan.step import Step

_MOST_POINTS = 40
_MOST_OPERATORS = 12_000  # of all points together: large regions get fewer points
_MOST_TRIED = 24  # operators tried between two corners


@dataclass(frozen=True)
class Point:
    """One choice for a region.

    Attributes:
        choice: for its operators' results; ``PLAIN``: the block is no region.
        held: bytes in memory from forward to backward.
        added: milliseconds that the choice adds.
    """

    choice: Choice | None
    held: int
    added: float

    @property
    def sends(self) -> bool:
        """True if anything is offloaded."""
        return self.choice is not PLAIN and self.choice.sends


class Choices:
    """The operators of a region, and the cost of saving and recomputing each, without regard to
    the rest of the step. All lists have one entry for each operator.

    Attributes:
        size: bytes that saving its results takes.
        time: milliseconds that recomputing it takes.
        needed: True if autograd needs its results.
        free: True if its results stay in memory under any policy.
        lasting: True if its results can be saved: no other operator overwrites them.
        reads: operators whose results it reads.
        paged: True if saving its results pages those that have rows.
        keeping: milliseconds that saving its results takes.

    Args:
        simulator: of the step.
        call: index in ``simulator.step.calls``.
        pager: how rows go to pools; None: no paging.
    """

    def __init__(self, simulator: Simulator, call: int, pager: Pager | None = None) -> None:
        step = simulator.step
        operators = step.calls[call].operators
        first = operators.start
        self.size: list[int] = []
        self.time: list[float] = []
        self.needed: list[bool] = []
        self.free: list[bool] = []
        self.lasting: list[bool] = []
        self.reads: list[list[int]] = []
        self.paged: list[bool] = []
        self.keeping: list[float] = []
        for number in operators:
            one = step.operators[number]
            sizes = {value: _size(simulator, call, value) for value in one.outputs}
            rows = {} if pager is None else _in_pools(step, pager, sizes)
            self.size.append(sum((sizes | rows).values()))
            self.paged.append(bool(rows))
            self.keeping.append(
                sum(pager.time_of(step.values[value]) for value in rows) if pager else 0.0
            )
            self.time.append(simulator.replay_time(number))
            self.needed.append(any(step.values[value].saved for value in one.outputs))
            self.free.append(number in step.stays)
            self.lasting.append(step.written_over(number) is None)
            makers = {step.maker[value] - first for value in one.inputs if value in step.maker}
            self.reads.append(sorted(maker for maker in makers if 0 <= maker < number - first))

    def cost(self, saved: Iterable[int]) -> tuple[int, float]:
        """Bytes and milliseconds of a choice."""
        kept = set(saved)
        time, wanted = 0.0, set()
        for one in reversed(range(len(self.size))):
            if self.free[one] or one in kept:
                continue
            if self.needed[one] or one in wanted:
                time += self.time[one]
                wanted.update(self.reads[one])
        time += sum(self.keeping[one] for one in kept)
        return sum(self.size[one] for one in kept), time

    @property
    def most_points(self) -> int:
        return min(_MOST_POINTS, max(8, _MOST_OPERATORS // max(1, len(self.size))))

    @cached_property
    def everything(self) -> Operators:
        """All operators whose results autograd needs."""
        both = zip(self.needed, self.free, strict=True)
        return frozenset(i for i, (needed, free) in enumerate(both) if needed and not free)

    def cheapest(self, price: float) -> Operators:
        """The cheapest choice, at a price in milliseconds per byte."""
        count = len(self.size)
        source, sink = 2 * count, 2 * count + 1
        network = Network(2 * count + 2)
        for one in range(count):
            if self.free[one]:
                continue
            had, runs = 2 * one, 2 * one + 1
            if self.needed[one]:
                network.add(source, had, math.inf)
            keeping = price * self.size[one] + self.keeping[one]
            network.add(had, runs, keeping if self.lasting[one] else math.inf)
            network.add(runs, sink, self.time[one])
            for maker in self.reads[one]:
                if not self.free[maker]:
                    network.add(runs, 2 * maker, math.inf)
        ours = network.cut(source, sink)
        return frozenset(one for one in range(count) if 2 * one in ours and 2 * one + 1 not in ours)

    def corners(self) -> list[Operators]:
        """Choices that are cheapest at some price, from the fewest bytes to the most."""
        fewest, most = self._pruned(frozenset()), self._pruned(self.cheapest(0.0))
        found = {fewest, most}
        self._corners_between(fewest, most, found)
        return sorted(found, key=self.cost)

    def _corners_between(self, low: Operators, high: Operators, found: set[Operators]) -> None:
        (held_low, time_low), (held_high, time_high) = self.cost(low), self.cost(high)
        if held_high <= held_low or len(found) >= self.most_points:
            return
        price = (time_low - time_high) / (held_high - held_low)
        middle = self._pruned(self.cheapest(price))
        held, time = self.cost(middle)
        gain = price * held_low + time_low - (price * held + time)
        if middle in found or gain <= 1e-9 * max(1.0, time_low):
            return
        found.add(middle)
        self._corners_between(low, middle, found)
        self._corners_between(middle, high, found)

    def between(self, low: Operators, high: Operators) -> list[Operators]:
        """Choices between two others: each adds the operator with the largest gain per byte."""
        found = []
        now = set(low)
        left = sorted(set(high) - now, key=lambda one: -self.size[one])[:_MOST_TRIED]
        while left:
            _held, time = self.cost(now)

            def gain(one: int, time: float = time) -> float:
                return (time - self.cost(now | {one})[1]) / max(1, self.size[one])

            best = max(left, key=gain)
            left.remove(best)
            now.add(best)
            found.append(self._pruned(frozenset(now)))
        return found

    def without_one(self, kept: Operators) -> Iterable[Operators]:
        """Choices that save one operator less."""
        return (self._pruned(kept - {one}) for one in sorted(kept))

    def _pruned(self, saved: Operators) -> Operators:
        """Remove operators that nothing needs; add needed operators that take no bytes."""
        chosen = set(saved) | {
            one
            for one in range(len(self.size))
            if self.size[one] == 0 and self.lasting[one] and not self.free[one]
        }
        wanted: set[int] = set()
        used = set()
        for one in reversed(range(len(self.size))):
            if self.free[one] or not (self.needed[one] or one in wanted):
                continue
            if one in chosen:
                used.add(one)
            else:
                wanted.update(self.reads[one])
        return frozenset(used)


def _in_pools(step: Step, pager: Pager, sizes: Mapping[int, int]) -> dict[int, int]:
    """Bytes in a pool, for values with rows that are smaller in a pool."""
    values = {value: step.values[value] for value in sizes if has_rows(step.values[value])}
    found = {value: pager.size_of(about) for value, about in values.items()}
    return {value: size for value, size in found.items() if size < sizes[value]}


def _size(simulator: Simulator, call: int, value: int) -> int:
    """Bytes that saving a value takes, 0 if it stays in memory in any case."""
    step = simulator.step
    place = step.memory_of.get(value)
    forward_ends = step.calls[call].forward_ends
    if place is None or step.is_held(place) or step.let_go(value) > forward_ends:
        return 0
    return step.memories[place].size


def front(simulator: Simulator, call: int) -> list[Point]:
    """Choices for a region that no other choice beats in both bytes and time, in ascending order of
    bytes.

    Args:
        simulator: of the step.
        call: index in ``simulator.step.calls``.
    """
    choices = Choices(simulator, call)
    corners = choices.corners()
    sets = dict.fromkeys(_with_those_between(choices, corners))
    wanted = [Choice(saved) for saved in sets]
    wanted += with_transfers(simulator, call, [frozenset(), *corners])
    wanted += with_pages(simulator, call)
    names = simulator.step.names_of(call)
    sayable = {can_be_said(choice, names) for choice in wanted}
    points = [point_of(simulator, call, one) for one in (*sorted(sayable, key=_in_order), PLAIN)]
    return not_beaten(points)


def point_of(simulator: Simulator, call: int, choice: Choice | None) -> Point:
    """Bytes and time of a choice for one call, if all copies share the link evenly."""
    found, pager = simulator.of_call(call, choice), simulator.pager
    held, added = found.held, found.added + simulator.not_hidden(call, found.sent)
    if pager is not None:
        held += sum(pager.size_of(one.value) for one in found.paged)
        added += sum(pager.time_of(one.value) for one in found.paged)
    return Point(choice, held, added)


def _in_order(choice: Choice) -> tuple[object, ...]:
    sent = sorted(choice.offloaded), choice.inputs
    return sorted(choice.saved), *sent, sorted(choice.paged), choice.paged_inputs


def with_transfers(simulator: Simulator, call: int, sets: Sequence[Operators]) -> Iterable[Choice]:
    """Choices that offload saved results: as much as the region's own forward can hide, half of
    that, or all.

    Args:
        simulator: of the step.
        call: index in ``simulator.step.calls``.
        sets: operators whose results may be saved.
    """
    link, one = simulator.link, simulator.step.calls[call]
    if link.room == 0:
        return
    may_leave = any(map(simulator.step.may_leave, simulator.step.inputs_of(one)))
    hidden = simulator.step.working(one.begins, one.ends) * link.out
    for kept in sets:
        for room in (0.0, hidden / 2, hidden, math.inf):
            sent = _first(simulator, call, kept, room)
            for inputs in (False, True) if may_leave else (False,):
                yield Choice(kept - sent, sent, inputs=inputs)


def with_pages(simulator: Simulator, call: int) -> Iterable[Choice]:
    """Choices that page the valid rows of saved results that have rows.

    Args:
        simulator: of the step.
        call: index in ``simulator.step.calls``.
    """
    if simulator.pager is None:
        return
    step = simulator.step
    choices = Choices(simulator, call, simulator.pager)
    inputs = (value for value in step.inputs_of(step.calls[call]) if step.may_leave(value))
    may_page = any(has_rows(step.values[value]) for value in inputs)
    for kept in dict.fromkeys(_with_those_between(choices, choices.corners())):
        paged = frozenset(place for place in kept if choices.paged[place])
        for paged_inputs in (False, True) if may_page else (False,):
            if paged or paged_inputs:
                yield Choice(kept - paged, paged=paged, paged_inputs=paged_inputs)


def _with_those_between(choices: Choices, corners: Sequence[Operators]) -> Iterable[Operators]:
    found = dict.fromkeys([frozenset(), *corners])
    for low, high in itertools.pairwise(corners):
        if len(found) < choices.most_points:
            found.update(dict.fromkeys(choices.between(low, high)))
    for kept in (*found,):
        if len(found) < choices.most_points:
            found.update(dict.fromkeys(choices.without_one(kept)))
    return found


def _first(simulator: Simulator, call: int, kept: Operators, room: float) -> Operators:
    """The saved operators to offload within `room` bytes: made first, needed last."""
    first = simulator.step.calls[call].operators.start
    found = set()
    for place in sorted(kept):
        size = sum(
            _size(simulator, call, value)
            for value in simulator.step.operators[first + place].outputs
        )
        if simulator.link.least <= size <= room:
            found.add(place)
            room -= size
    return frozenset(found)


def not_beaten(points: Iterable[Point]) -> list[Point]:
    """Points that no other point beats in both bytes and time."""
    found: list[Point] = []
    for point in sorted(points, key=lambda one: (one.held, one.added)):
        if not found or point.added < found[-1].added:
            found.append(point)
    return found


def hull(points: list[Point]) -> list[Point]:
    """The corners of the lower convex hull of points from `front`."""
    found: list[Point] = []
    for point in points:
        while len(found) > 1 and _is_above(found[-2], found[-1], point):
            found.pop()
        found.append(point)
    return found


def _is_above(low: Point, middle: Point, high: Point) -> bool:
    left = (low.added - middle.added) * (high.held - low.held)
    return left <= (low.added - high.added) * (middle.held - low.held)
