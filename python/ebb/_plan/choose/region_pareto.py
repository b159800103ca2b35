"""Chooses what one region saves. In: a simulated region. Out: its front, the best choices.

Saving a result costs its bytes. A result that is needed but not saved is recomputed, with all that
it reads, down to saved results. So the cheapest choice at a price for bytes is a minimum cut. Jain
et al. ("Checkmate", 2020) state this problem; torch's partitioner solves it by a minimum cut, too.
Each operator has two nodes: "result is available" and "operator is recomputed". The cut between
them costs the bytes; the cut below the second node costs the time. Prices from zero to infinity
give the lower hull of bytes and time. A greedy search fills the space between its corners.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ebb._plan.choose.min_cut import Network
from ebb._plan.profile.copies import Pager, has_rows
from ebb._plan.simulate.choice import EAGER, Choice, Operators, can_be_said
from ebb._plan.simulate.simulator import Simulator

_MOST_POINTS = 40
_MOST_OPERATORS = 12_000  # of all points together: large regions get fewer points
_MOST_TRIED = 24  # operators tried between two corners
_MOST_CUTS, _MOST_PAIRED = 16, 6  # cuts of a region's operators: tried alone, and in pairs


@dataclass(frozen=True)
class Point:
    """One choice for a region; ``EAGER``: the block is no region."""

    choice: Choice | None
    resident: int  # bytes in memory from forward to backward
    added: float  # milliseconds that the choice adds

    @property
    def sends(self) -> bool:
        """True if anything is offloaded."""
        return self.choice is not EAGER and (self.choice.inputs or bool(self.choice.offloaded))


@dataclass(frozen=True)
class Costs:
    """The cost of saving and recomputing an operator, without regard to the rest of the step."""

    size: int  # bytes that saving its results takes
    time: float  # milliseconds that recomputing it takes
    needed: bool  # True if autograd needs its results
    free: bool  # True if its results stay in memory under any policy
    lasting: bool  # True if its results can be saved: no other operator overwrites them
    reads: Sequence[int]  # operators whose results it reads
    keeping: float = 0.0  # milliseconds that saving its results takes
    paged: bool = False  # True if saving its results pages those that have rows


class Choices:
    """Finds choices for a region that are cheap, from the costs of its operators."""

    def __init__(self, costs: Sequence[Costs]) -> None:
        self.costs = costs
        self._count = len(costs)
        self.most_points = min(_MOST_POINTS, max(8, _MOST_OPERATORS // max(1, self._count)))

    def cost(self, saved: Iterable[int]) -> tuple[int, float]:
        """Bytes and milliseconds of a choice."""
        kept = set(saved)
        time = 0.0
        wanted: set[int] = set()
        for op in reversed(range(self._count)):
            cost = self.costs[op]
            if not cost.free and op not in kept and (cost.needed or op in wanted):
                time += cost.time
                wanted.update(cost.reads)
        time += sum(self.costs[op].keeping for op in kept)
        return sum(self.costs[op].size for op in kept), time

    def cheapest(self, price: float) -> Operators:
        """The cheapest choice, at a price in milliseconds per byte."""
        count = self._count
        source, sink = 2 * count, 2 * count + 1
        network = Network(2 * count + 2)
        for op, cost in enumerate(self.costs):
            if cost.free:
                continue
            available, recomputed = 2 * op, 2 * op + 1
            if cost.needed:
                network.add(source, available, math.inf)
            keeping = price * cost.size + cost.keeping
            network.add(available, recomputed, keeping if cost.lasting else math.inf)
            network.add(recomputed, sink, cost.time)
            for maker in cost.reads:
                if not self.costs[maker].free:
                    network.add(recomputed, 2 * maker, math.inf)
        nodes = network.cut(source, sink)
        return frozenset(op for op in range(count) if 2 * op in nodes and 2 * op + 1 not in nodes)

    @cached_property
    def corners(self) -> list[Operators]:
        """Choices that are cheapest at some price, from the fewest bytes to the most."""
        fewest, most = self._pruned(frozenset()), self._pruned(self.cheapest(0.0))
        corners = {fewest, most}
        self._add_corners(fewest, most, corners)
        return sorted(corners, key=self.cost)

    def _add_corners(self, low: Operators, high: Operators, corners: set[Operators]) -> None:
        (bytes_low, time_low), (bytes_high, time_high) = self.cost(low), self.cost(high)
        if bytes_high <= bytes_low or len(corners) >= self.most_points:
            return
        price = (time_low - time_high) / (bytes_high - bytes_low)
        middle = self._pruned(self.cheapest(price))
        nbytes, time = self.cost(middle)
        gain = price * bytes_low + time_low - (price * nbytes + time)
        if middle in corners or gain <= 1e-9 * max(1.0, time_low):
            return
        corners.add(middle)
        self._add_corners(low, middle, corners)
        self._add_corners(middle, high, corners)

    def between(self, low: Operators, high: Operators) -> list[Operators]:
        """Choices between two others: each adds the operator with the largest gain per byte."""
        choices = []
        now = set(low)
        left = sorted(set(high) - now, key=lambda op: -self.costs[op].size)[:_MOST_TRIED]
        while left:
            _, time = self.cost(now)

            def gain(op: int, time: float = time) -> float:
                return (time - self.cost(now | {op})[1]) / max(1, self.costs[op].size)

            best = max(left, key=gain)
            left.remove(best)
            now.add(best)
            choices.append(self._pruned(frozenset(now)))
        return choices

    def all(self) -> Iterable[Operators]:
        """Corners, choices between them, and each of these without one of its saved operators."""
        choices = dict.fromkeys([frozenset(), *self.corners])
        for low, high in itertools.pairwise(self.corners):
            if len(choices) < self.most_points:
                choices.update(dict.fromkeys(self.between(low, high)))
        for kept in (*choices,):
            if len(choices) < self.most_points:
                choices.update(dict.fromkeys(self._pruned(kept - {op}) for op in sorted(kept)))
        return choices

    def _pruned(self, saved: Operators) -> Operators:
        """Remove operators that nothing needs; add needed operators that take no bytes."""
        kept: set[int] = set()
        wanted: set[int] = set()
        for op in reversed(range(self._count)):
            cost = self.costs[op]
            if cost.free or not (cost.needed or op in wanted):
                continue
            if op in saved or (cost.size == 0 and cost.lasting):
                kept.add(op)
            else:
                wanted.update(cost.reads)
        return frozenset(kept)


def choices_of(simulator: Simulator, call: int, pager: Pager | None = None) -> Choices:
    """The choices for a region, given as an index in ``simulator.step.calls``."""
    step = simulator.step
    operators = step.calls[call].operators
    costs = []
    for op in operators:
        operator = step.operators[op]
        sizes = {value: _size(simulator, call, value) for value in operator.outputs}
        keeping, is_paged = 0.0, False
        for value, size in sizes.items():
            record = step.values[value]
            if pager and has_rows(record) and (in_pool := pager.size_of(record)) < size:
                sizes[value], is_paged = in_pool, True
                keeping += pager.time_of(record)
        makers = {
            step.maker[value] - operators.start for value in operator.inputs if value in step.maker
        }
        costs.append(
            Costs(
                sum(sizes.values()),
                simulator.replay_time(op),
                needed=any(step.values[value].saved for value in operator.outputs),
                free=op in step.always_kept,
                lasting=step.overwriter_of(op) is None,
                reads=sorted(maker for maker in makers if 0 <= maker < op - operators.start),
                keeping=keeping,
                paged=is_paged,
            )
        )
    return Choices(costs)


def _size(simulator: Simulator, call: int, value: int) -> int:
    """Bytes that saving a value takes, 0 if it stays in memory in any case."""
    step = simulator.step
    memory = step.memory_of.get(value)
    if (
        memory is None
        or memory in step.saved_inputs
        or step.released(value) > step.calls[call].forward_ends
    ):
        return 0
    return step.memories[memory].size


def front(simulator: Simulator, call: int) -> list[Point]:
    """Choices for a region that no other choice beats in both bytes and time, in ascending order of
    bytes. `call`: index in ``simulator.step.calls``."""
    choices = choices_of(simulator, call)
    wanted = [Choice(saved) for saved in choices.all()]
    wanted += _with_transfers(simulator, call, [frozenset(), *choices.corners])
    wanted += _with_pages(simulator, call)
    names = simulator.step.names_of(call)
    sayable = {can_be_said(choice, names) for choice in wanted}
    return not_beaten(
        point_of(simulator, call, choice) for choice in (*sorted(sayable, key=_in_order), EAGER)
    )


def point_of(simulator: Simulator, call: int, choice: Choice | None) -> Point:
    """Bytes and time of a choice for one call, if all copies share the link evenly."""
    estimate, pager = simulator.of_call(call, choice), simulator.pager
    resident = estimate.resident
    added = estimate.added + simulator.copy_time(call, estimate.sent)
    if pager is not None:
        resident += sum(pager.size_of(paged.value) for paged in estimate.paged)
        added += sum(pager.time_of(paged.value) for paged in estimate.paged)
    return Point(choice, resident, added)


def _in_order(choice: Choice) -> tuple[object, ...]:
    sent = sorted(choice.offloaded), choice.inputs
    return sorted(choice.saved), *sent, sorted(choice.paged), choice.paged_inputs


def _with_transfers(simulator: Simulator, call: int, sets: Sequence[Operators]) -> Iterable[Choice]:
    """Choices that save the results of the operators of one of `sets`, and offload the region's
    inputs or some of these results: none, those whose copies take as long as the region's forward,
    or half of that time, or all."""
    link, region = simulator.link, simulator.step.calls[call]
    if link.room == 0:
        return
    may_offload = any(map(simulator.step.may_offload, region.inputs))
    hidden = simulator.step.working(region.begins, region.ends) * link.out
    for kept in sets:
        for room in (0.0, hidden / 2, hidden, math.inf):
            sent = _first(simulator, call, kept, room)
            for inputs in (False, True) if may_offload else (False,):
                yield Choice(kept - sent, sent, inputs=inputs)


def _with_pages(simulator: Simulator, call: int) -> Iterable[Choice]:
    """Choices that page the valid rows of saved results that have rows."""
    if simulator.pager is None:
        return
    step = simulator.step
    choices = choices_of(simulator, call, simulator.pager)
    inputs = (value for value in step.calls[call].inputs if step.may_offload(value))
    may_page = any(has_rows(step.values[value]) for value in inputs)
    for kept in choices.all():
        paged = frozenset(op for op in kept if choices.costs[op].paged)
        for paged_inputs in (False, True) if may_page else (False,):
            if paged or paged_inputs:
                yield Choice(kept - paged, paged=paged, paged_inputs=paged_inputs)


def _first(simulator: Simulator, call: int, kept: Operators, room: float) -> Operators:
    """The saved operators to offload, in at most `room` bytes. The earliest operators come first,
    since backward needs their results last."""
    step, first = simulator.step, set()
    start = step.calls[call].operators.start
    for op in sorted(kept):
        outputs = step.operators[start + op].outputs
        size = sum(_size(simulator, call, value) for value in outputs)
        if simulator.link.least <= size <= room:
            first.add(op)
            room -= size
    return frozenset(first)


def recomputed_each_time(simulator: Simulator, call: int) -> Iterable[Choice]:
    """Choices that cut the sequence of a region's operators once or twice. A value made before a
    cut stays resident only if an operator after the cut reads it; the others are recomputed each
    time. So backward of the operators after a cut needs no results made before the cut except the
    resident ones. If there are two cuts, the values between them are recomputed from those that are
    resident at the first cut. See Note [Made each time].
    """
    count = len(simulator.step.calls[call].operators)
    cuts = _spread(range(1, count + 1), _MOST_CUTS)
    few = _spread(cuts, _MOST_PAIRED)
    for chosen in (*((cut,) for cut in cuts), *itertools.combinations(few, 2)):
        yield Choice(each_time=frozenset(_between(simulator, call, chosen)))


def _spread(cuts: Sequence[int], most: int) -> list[int]:
    """At most `most` of the cuts, evenly spread, with the first and the last."""
    count = min(most, len(cuts))
    if count < 2:
        return list(cuts)
    return [cuts[number * (len(cuts) - 1) // (count - 1)] for number in range(count)]


def _between(simulator: Simulator, call: int, cuts: Sequence[int]) -> Iterable[int]:
    """Operators before the last cut whose results are not read across a cut."""
    step = simulator.step
    operators = step.calls[call].operators
    for index, op in enumerate(operators[: cuts[-1]]):
        if op in step.always_kept:
            continue
        outputs = step.operators[op].outputs
        readers = [reader - operators.start for value in outputs for reader in step.readers[value]]
        last = max(readers, default=index)
        if not any(index < cut <= last for cut in cuts):
            yield index


def not_beaten(points: Iterable[Point]) -> list[Point]:
    """Points that no other point beats in both bytes and time."""
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.resident, point.added)):
        if not best or point.added < best[-1].added:
            best.append(point)
    return best


def hull(points: list[Point]) -> list[Point]:
    """The corners of the lower convex hull of points from `front`."""
    corners: list[Point] = []
    for point in points:
        while len(corners) > 1 and _is_above(corners[-2], corners[-1], point):
            corners.pop()
        corners.append(point)
    return corners


def _is_above(low: Point, middle: Point, high: Point) -> bool:
    left = (low.added - middle.added) * (high.resident - low.resident)
    return left <= (low.added - high.added) * (middle.resident - low.resident)
