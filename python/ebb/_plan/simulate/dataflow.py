"""Operators of a step. In: a profile. Out: who makes and reads values, and calls of regions."""

from __future__ import annotations

import bisect
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from ebb._plan.profile.profile import Profile

EPSILON = 1e-9  # the shortest time, in milliseconds


@dataclass
class Call:
    """A call of an outermost region, with its name and the indices of its operators."""

    region: str
    operators: range
    begins: float
    ends: float = 0.0
    # Values that the operators read and no region made. Only the keys count.
    inputs: dict[int, None] = field(default_factory=dict)
    # Time of the program's first allocation after `ends`. Memory freed between `ends` and that time
    # was held only by the region.
    next_allocation: float = math.inf
    unpacked: list[tuple[float, int]] = field(default_factory=list)  # times and values, in order
    # The same for each autograd node, by its number.
    of_node: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    forward_ends: float = 0.0  # just before backward next unpacks a value of any region

    @property
    def backward_begins(self) -> float:
        """When backward first unpacks a value of the region."""
        return self.unpacked[0][0]


class Dataflow:
    """The operators and values of a step that recomputes everything, and the calls of its regions;
    all are numbered. `around`: names of regions around other regions, by ``Operator.call``."""

    def __init__(self, profile: Profile, around: Mapping[int, str]) -> None:
        self.profile = profile
        self.operators, self.values = profile.operators, profile.values
        self.duration = profile.duration
        # The operator that made a value; no entry for values from outside of regions.
        self.maker = {
            value: op for op, operator in enumerate(self.operators) for value in operator.outputs
        }
        self.readers: dict[int, list[int]] = defaultdict(list)  # operators that read a value
        for op, operator in enumerate(self.operators):
            for value in dict.fromkeys(operator.inputs):
                self.readers[value].append(op)
        self._unpacks = sorted(record.asked for record in self.values if record.asked >= 0)
        # Just before backward first unpacks a value.
        self.forward_ends = (self._unpacks[0] if self._unpacks else self.duration) - EPSILON
        self._replays = sorted((start, took) for _, start, took in profile.replays)
        self.replaying = sum(took for _, took in self._replays)  # milliseconds of all replays
        self.call_of: list[int] = []  # of each operator
        self.calls = self._find_calls(around)

    @cached_property
    def always_kept(self) -> set[int]:
        """Operators whose results no policy frees. The seeds beside the result of an attention are
        always kept, and the result is not."""
        kept = set()
        for op, operator in enumerate(self.operators):
            fates = {self.values[value].fate for value in operator.outputs}
            if not operator.replayable or ("kept" in fates and "recomputed" not in fates):
                kept.add(op)
        return kept

    def names_of(self, call: int) -> Sequence[tuple[str, int]]:
        """For each operator of a region: its name, and which call of that name it is, from 1."""
        counts: Counter[str] = Counter()
        names = []
        for op in self.calls[call].operators:
            name = self.operators[op].func_name
            counts[name] += 1
            names.append((name, counts[name]))
        return names

    def inner_region(self, op: int) -> str | None:
        """Name of the operator's inner region; None: there is none."""
        name = self.operators[op].region
        return None if name == self.calls[self.call_of[op]].region else name

    def input_released(self, value: int) -> float:
        """When the program released an input of a region. ebb notices a release only when the
        next region begins or backward unpacks a value; in backward, the end of the call's forward
        counts instead."""
        record = self.values[value]
        calls = [call for call in self.calls if record.made < call.ends <= record.let_go]
        return min([record.let_go, *(call.forward_ends for call in calls)])

    def working(self, begin: float, end: float) -> float:
        """Milliseconds between two times without those of replays."""
        first = bisect.bisect_left(self._replays, (begin, 0.0))
        last = bisect.bisect_left(self._replays, (end, 0.0))
        return end - begin - sum(took for _, took in self._replays[first:last])

    def is_replay(self, time: float) -> bool:
        """True if a replay runs at a time."""
        index = bisect.bisect_right(self._replays, (time, math.inf)) - 1
        return index >= 0 and time <= sum(self._replays[index])

    def end_of(self, op: int) -> float:
        operator = self.operators[op]
        return max([operator.start, *(self.values[value].made for value in operator.outputs)])

    @property
    def passes(self) -> int:
        """How often the step runs forward and backward; more than once if it accumulates
        gradients."""
        unpacked = [bisect.bisect(self._unpacks, call.begins) for call in self.calls]
        return 1 + sum(before < now for before, now in pairwise(unpacked))

    def _find_calls(self, around: Mapping[int, str]) -> list[Call]:
        calls: list[Call] = []
        numbers: dict[int, int] = {}  # by Operator.call
        for op, operator in enumerate(self.operators):
            if operator.call not in numbers:
                numbers[operator.call] = len(calls)
                name = around.get(operator.call, operator.region)
                calls.append(Call(name, range(op, op), operator.start))
            call = calls[numbers[operator.call]]
            call.operators = range(call.operators.start, op + 1)
            call.ends = self.end_of(op) + EPSILON
            call.inputs |= {value: None for value in operator.inputs if value not in self.maker}
            self.call_of.append(numbers[operator.call])
        for value, record in enumerate(self.values):
            if record.asked >= 0 and value in self.maker:
                calls[self.call_of[self.maker[value]]].unpacked.append((record.asked, value))
        begins = sorted(time for time, _, size in self.profile.allocations if size > 0)
        for call in calls:
            index = bisect.bisect_right(begins, call.ends)
            call.next_allocation = begins[index] if index < len(begins) else self.duration
            call.unpacked.sort()
            for time, value in call.unpacked:
                call.of_node.setdefault(self.values[value].node, []).append((time, value))
            index = bisect.bisect_right(self._unpacks, call.ends)
            ends = self._unpacks[index] if index < len(self._unpacks) else self.duration
            call.forward_ends = ends - EPSILON
        return calls
