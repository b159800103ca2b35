"""When the operators of a region are recomputed."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ebb._plan.step import JUST, Call, Step


class Replays:
    """Replays of a region's operators, slice by slice. See Note [Replay].

    Attributes:
        runs: for each recomputed operator, the times of its replays.
        early: replays ahead of backward.

    Args:
        step, call: the recorded step, and the call of a region.
        kept: operators whose results are saved.
        each_time: operators whose results a slice frees at its end, unless backward needs them.
        begins: when replays ahead run; infinity: there are none.
    """

    def __init__(
        self, step: Step, call: Call, kept: set[int], each_time: set[int], begins: float
    ) -> None:
        self._step, self._kept = step, kept
        self.runs: dict[int, list[float]] = {}
        self.early: set[tuple[int, float]] = set()
        self._passing: set[tuple[int, float]] = set()
        held: set[int] = set()
        for asked, wanted in self._in_order(call, each_time, begins):
            found = self._needed_for(wanted, asked, held)
            inner = step.inner_region(wanted)
            for place, number in enumerate(sorted(found)):  # in sequence
                time = asked + place * JUST
                if asked == begins:
                    self.early.add((number, time))
                self.runs.setdefault(number, []).append(time)
                backward_is_there = inner is not None and step.inner_region(number) == inner
                if number in each_time and number != wanted and not backward_is_there:
                    self._passing.add((number, time))
                else:
                    held.add(number)
        self._ends = _ends_of_slices(self)

    def _in_order(
        self, call: Call, each_time: set[int], begins: float
    ) -> Iterable[tuple[float, int]]:
        """Times at which replays for an operator begin. Operators of `each_time` are not replayed
        ahead."""
        times = []
        # Backward may unpack several values before the first of them is recomputed. One slice of
        # replays, which begins at `first`, then recomputes all of them, by the time `made`.
        first = made = -1.0
        for asked, value in call.asked:
            if asked >= made:
                first, made = asked, self._step.values[value].again
            wanted = self._step.maker[value]
            times.append((first if wanted in each_time else min(first, begins), wanted))
        return sorted(times, key=lambda one: one[0])

    def _needed_for(self, wanted: int, asked: float, held: set[int]) -> set[int]:
        waiting, found = [wanted], set()
        while waiting:
            number = waiting.pop()
            if number in held or number in found or number in self._kept:
                continue
            if self._is_here(number, asked):
                continue
            found.add(number)
            waiting += [
                self._step.maker[one]
                for one in self._step.operators[number].inputs
                if one in self._step.maker
            ]
        return found

    def _is_here(self, operator: int, time: float) -> bool:
        """True if the program still holds all results of an operator, and nothing has overwritten
        them."""
        step = self._step
        return all(
            one not in step.overwritten and step.let_go(one) >= time
            for one in step.operators[operator].outputs
        )

    def __contains__(self, operator: int) -> bool:
        return operator in self.runs

    @property
    def count(self) -> int:
        """Number of replays."""
        return sum(map(len, self.runs.values()))

    @property
    def kernels(self) -> float:
        """Milliseconds that the replayed kernels took in forward."""
        return sum(
            self._step.operators[one].runtime * len(times) for one, times in self.runs.items()
        )

    def all(self) -> Iterable[tuple[int, float]]:
        """Operators and times of all replays."""
        return ((one, time) for one, times in self.runs.items() for time in times)

    def last(self, operators: Iterable[int]) -> float:
        """The last replay of any of these operators; 0 if there is none."""
        return max((self.runs[one][-1] for one in operators if one in self.runs), default=0.0)

    def end(self, operator: int, time: float) -> float:
        """When the slice of a replay ends."""
        return self._ends[operator, time]

    def is_passing(self, operator: int, time: float) -> bool:
        """True if the slice of a replay frees the replay's results."""
        return (operator, time) in self._passing

    def read(self, made: tuple[int, float] | None, readers: Iterable[int]) -> list[float]:
        """When each replay of the readers no longer needs a value.

        Args:
            made: the replay that made the value; None: the value was in memory.
            readers: operators that read the value.
        """
        own = None if made is None else self.end(*made)
        return [
            self.end(reader, time)  # a slice holds all values that existed when it began
            if self.end(reader, time) != own
            else time + JUST / 2  # a value made in the slice is freed once it is read
            for reader in readers
            for time in self.runs.get(reader, ())
        ]


def _ends_of_slices(replays: Replays) -> dict[tuple[int, float], float]:
    """For each replay, the end of its slice: of replays directly after one another."""
    found: dict[tuple[int, float], float] = {}
    later = end = math.inf
    for number, time in sorted(replays.all(), key=lambda one: -one[1]):
        if later - time > 1.5 * JUST:
            end = time + JUST / 2
        found[number, time], later = end, time
    return found
