"""One step as a simulator needs it: two profiles of it, joined.

What autograd holds, and until when, is told by the step in which all is kept; what the program
holds itself by the step in which all is recomputed.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ebb._plan.profile import Operator, Profile

JUST = 1e-9  # the shortest time


@dataclass
class Memory:
    """One block of memory that a region made, wrote or read, and that the step allocated.

    Attributes:
        size: in bytes.
        taken: when.
        freed: when, in the step in which all is kept.
        is_ours: whether an operator of a region took it.
    """

    size: int
    taken: float
    freed: float
    is_ours: bool


@dataclass
class Call:
    """One outermost region that was entered.

    Attributes:
        region: its name.
        operators: the places of its first operator, and of the one after its last.
        ends: when it had run.
        asked: when backward asked for a value, and which; in order.
    """

    region: str
    operators: range
    ends: float
    asked: list[tuple[float, int]] = field(default_factory=list)


class Step:
    """What a step did. Values, operators and times are those of ``kept``.

    Attributes:
        operators, values, duration: of ``kept``.
        maker: which operator made a value; not of what came from outside.
        readers: which operators read a value.
        calls: the regions, in order.
        call_of: of each operator, its place in ``calls``.
        memories: see :class:`Memory`.
        memory_of: where a value is in ``memories``; not of what was there before the step.
        let_go: when the program itself gives up a value; what it holds until backward: when eager
            frees it.
        stays: operators whose results no policy gives up.
        overwritten: when an operator of the same region writes over a value.
        rest: times and bytes of all other memory, taken or given back.
        forward_ends: when backward begins to ask.

    Raises:
        ValueError: the profiles are of different steps.
    """

    def __init__(self, kept: Profile, dropped: Profile) -> None:
        check_same_step(kept.operators, dropped.operators)
        self.operators, self.values = kept.operators, kept.values
        self.duration = kept.duration
        self.maker = {
            value: number for number, one in enumerate(kept.operators) for value in one.outputs
        }
        self.readers: dict[int, list[int]] = defaultdict(list)
        for number, one in enumerate(kept.operators):
            for value in dict.fromkeys(one.inputs):
                self.readers[value].append(number)
        asked = [one.asked for one in kept.values if one.asked >= 0]
        self.forward_ends = min(asked, default=kept.duration) - JUST
        self.calls, self.call_of = self._find_calls()
        self.stays = {
            number
            for number, one in enumerate(dropped.operators)
            if not one.replayable
            or any(dropped.values[value].fate == "kept" for value in one.outputs)
        }
        ours = _Allocations(kept)
        self.let_go = self._times_let_go(ours, dropped)
        self.memories: list[Memory] = []
        self.memory_of: dict[int, int] = {}
        self.rest = self._find_memories(ours)
        self.overwritten = self._find_overwritten()
        self._inputs = self._find_inputs()
        self._shared = self._find_shared()

    def names_of(self, call: int) -> Sequence[tuple[str, int]]:
        """Of each operator of a region its name, and the how-manieth call of it this is, from 1."""
        counts: Counter[str] = Counter()
        found = []
        for number in self.calls[call].operators:
            name = self.operators[number].func_name
            counts[name] += 1
            found.append((name, counts[name]))
        return found

    def is_shared(self, memory: int) -> bool:
        """Whether several regions know it."""
        return memory in self._shared

    def before(self, operator: int) -> float:
        """Just before this operator runs, or forward ends."""
        if operator < len(self.operators):
            return self.operators[operator].start - JUST
        return self.forward_ends

    def inputs_of(self, call: Call) -> Sequence[int]:
        """The values that a region reads and did not make."""
        return self._inputs[self.call_of[call.operators.start]]

    def _find_overwritten(self) -> dict[int, float]:
        found = {}
        last: dict[tuple[int, int], int] = {}  # by memory and region
        for number, one in enumerate(self.operators):
            for value in one.outputs:
                if value not in self.memory_of:
                    continue
                place = self.memory_of[value], self.call_of[number]
                before = last.get(place)
                if before is not None and self.maker[before] != number:
                    found[before] = one.start
                last[place] = value
        return found

    def _find_shared(self) -> set[int]:
        known: dict[int, int] = {}
        shared = set()
        for number, one in enumerate(self.operators):
            for value in (*one.inputs, *one.outputs):
                if value in self.memory_of:
                    place = self.memory_of[value]
                    if known.setdefault(place, self.call_of[number]) != self.call_of[number]:
                        shared.add(place)
        return shared

    def _find_inputs(self) -> list[list[int]]:
        inputs: list[dict[int, None]] = [{} for _ in self.calls]
        for number, one in enumerate(self.operators):
            for value in one.inputs:
                if value not in self.maker:
                    inputs[self.call_of[number]][value] = None
        return [list(found) for found in inputs]

    def _find_calls(self) -> tuple[list[Call], list[int]]:
        calls: list[Call] = []
        call_of = []
        known: dict[int, int] = {}
        for number, one in enumerate(self.operators):
            if one.call not in known:
                known[one.call] = len(calls)
                calls.append(Call(one.region, range(number, number), 0.0))
            call = calls[known[one.call]]
            call.operators = range(call.operators.start, number + 1)
            call_of.append(known[one.call])
        for call in calls:
            made = [
                self.values[value].made
                for number in call.operators
                for value in self.operators[number].outputs
            ]
            call.ends = max([self.operators[call.operators.stop - 1].start, *made]) + JUST
        for value, about in enumerate(self.values):
            if about.asked >= 0 and value in self.maker:
                calls[call_of[self.maker[value]]].asked.append((about.asked, value))
        for call in calls:
            call.asked.sort()
        return calls, call_of

    def _times_let_go(self, ours: _Allocations, dropped: Profile) -> dict[int, float]:
        theirs = _Allocations(dropped)
        asked = [value.asked for value in dropped.values if value.asked >= 0]
        forward_ends = min(asked, default=dropped.duration) - JUST
        clock = _Clock([*_moments(dropped), forward_ends], [*_moments(self), self.forward_ends])
        found = {}
        for one, other in zip(self.operators, dropped.operators, strict=True):
            for value, twin in zip(one.outputs, other.outputs, strict=True):
                here, there = self.values[value], dropped.values[twin]
                time = theirs.freed_after(there.address, there.made)
                if time > forward_ends:
                    found[value] = ours.freed_after(here.address, here.made)
                else:
                    found[value] = clock.ours(time)
        return found

    def _find_memories(self, allocations: _Allocations) -> list[tuple[float, int]]:
        places: dict[tuple[int, float], int] = {}
        for value, about in enumerate(self.values):
            stretch = allocations.stretch(about.address, about.made)
            if about.memory == 0 or stretch is None:
                continue
            taken, freed, size = stretch
            if value not in self.maker and freed <= about.made:
                continue
            if (about.address, taken) not in places:
                places[about.address, taken] = len(self.memories)
                self.memories.append(Memory(size, taken, freed, value in self.maker))
            self.memory_of[value] = places[about.address, taken]
        rest = []
        for address, stretches in allocations.all():
            for taken, freed, size in stretches:
                if (address, taken) not in places:
                    rest += [(taken, size), (freed, -size)]
        return rest + allocations.of_older


def _spread(events: Sequence[tuple[float, int]]) -> Iterable[tuple[float, float, int]]:
    """Pairs of taking and giving back at one address."""
    taken, size = None, 0
    for time, change in events:
        if change > 0:
            taken, size = time, change
        elif taken is not None:
            yield taken, time, size
            taken = None
    if taken is not None:
        yield taken, math.inf, size


def _moments(step: Profile | Step) -> list[float]:
    """When each operator begins and has run."""
    found = []
    for one in step.operators:
        ends = max([one.start, *(step.values[value].made for value in one.outputs)])
        found += [one.start, ends]
    return found


class _Clock:
    """Turns times of one step into times of another in which the same happened."""

    def __init__(self, theirs: list[float], ours: list[float]) -> None:
        latest = itertools.accumulate
        self._theirs, self._ours = list(latest(theirs, max)), list(latest(ours, max))

    def ours(self, time: float) -> float:
        after = bisect.bisect_right(self._theirs, time)
        if after in (0, len(self._theirs)):
            return self._ours[0] if after == 0 else self._ours[-1]
        begin, end = self._theirs[after - 1], self._theirs[after]
        share = (time - begin) / (end - begin)
        return self._ours[after - 1] + share * (self._ours[after] - self._ours[after - 1])


class _Allocations:
    """When memory was taken and given back."""

    def __init__(self, profile: Profile) -> None:
        events: dict[int, list[tuple[float, int]]] = defaultdict(list)
        for time, address, taken in profile.allocations:
            events[address].append((time, taken))
        self._stretches = {address: list(_spread(found)) for address, found in events.items()}
        # given back, but taken before the step
        self.of_older = [found[0] for found in events.values() if found[0][1] < 0]

    def all(self) -> Iterable[tuple[int, list[tuple[float, float, int]]]]:
        return self._stretches.items()

    def stretch(self, address: int, time: float) -> tuple[float, float, int] | None:
        """The one in which an address was taken at a time."""
        stretches = self._stretches.get(address, [])
        place = bisect.bisect_right(stretches, (time, math.inf, 0)) - 1
        return stretches[place] if place >= 0 and stretches[place][1] >= time else None

    def freed_after(self, address: int, time: float) -> float:
        stretch = self.stretch(address, time)
        return stretch[1] if stretch else math.inf


def check_same_step(one: Sequence[Operator], other: Sequence[Operator]) -> None:
    """
    Raises:
        ValueError: they are not of the same step.
    """

    def calls(operators: Sequence[Operator]) -> list[tuple[str, str, int]]:
        return [(call.func_name, call.region, len(call.outputs)) for call in operators]

    if calls(one) != calls(other):
        raise ValueError("ebb: the profiles are of different steps")
