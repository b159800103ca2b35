"""Replays of a region. In: the saved operators. Out: when the others are recomputed."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ebb._plan.simulate.dataflow import EPSILON, Call
from ebb._plan.simulate.step import Step


class Replays:
    """Replays of a region's operators. The replays that one unpack causes are a slice. See
    Note [Replay].

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
        self.runs: dict[int, list[float]] = {}  # the times of each operator's replays
        self.early: set[tuple[int, float]] = set()  # replays ahead of backward
        # replays whose results their slice frees
        self.passing: set[tuple[int, float]] = set()
        resident: set[int] = set()
        last = -1.0  # when the slice before begins
        behind = 0  # number of replays of the earlier slices that begin then
        for begin, wanted in self._in_order(call, each_time, begins):
            needed = self._needed_for(wanted, begin, resident)
            inner = step.inner_region(wanted)
            # The slices of one node run one after the other. See Note [Saved by one node].
            behind = behind if begin == last and begin != begins else 0
            for index, op in enumerate(sorted(needed), behind):  # in sequence
                time = begin + index * EPSILON
                if begin == begins:
                    self.early.add((op, time))
                self.runs.setdefault(op, []).append(time)
                backward_is_there = inner is not None and step.inner_region(op) == inner
                if op in each_time and op != wanted and not backward_is_there:
                    self.passing.add((op, time))
                else:
                    resident.add(op)
            last, behind = begin, behind + len(needed)
        self.ends = self._ends_of_slices()
        self._end_at = {time: end for (_, time), end in self.ends.items()}

    def _in_order(
        self, call: Call, each_time: set[int], begins: float
    ) -> Iterable[tuple[float, int]]:
        """Times at which replays for an operator begin. Operators of `each_time` are not replayed
        ahead."""
        times = []
        # Backward may unpack several values before the first of them is recomputed. One slice of
        # replays, which begins at `first`, then recomputes all of them, by the time `ready`.
        first = ready = -1.0
        for time, value in call.unpacked:
            if time >= ready:
                first, ready = time, self._step.values[value].again
            wanted = self._step.maker[value]
            times.append((first if wanted in each_time else min(first, begins), wanted))
        return sorted(times, key=lambda pair: pair[0])

    def _needed_for(self, wanted: int, time: float, resident: set[int]) -> set[int]:
        waiting, needed = [wanted], set()
        while waiting:
            op = waiting.pop()
            if op in resident or op in needed or op in self._kept:
                continue
            if self._step.resident_until[op] >= time:
                continue
            needed.add(op)
            inputs = self._step.operators[op].inputs
            waiting += [self._step.maker[value] for value in inputs if value in self._step.maker]
        return needed

    @property
    def count(self) -> int:
        """Number of replays."""
        return sum(map(len, self.runs.values()))

    @property
    def kernels(self) -> float:
        """Milliseconds that the replayed kernels took in forward."""
        return sum(self._step.operators[op].runtime * len(times) for op, times in self.runs.items())

    def all(self) -> Iterable[tuple[int, float]]:
        """Operators and times of all replays."""
        return ((op, time) for op, times in self.runs.items() for time in times)

    def last(self, ops: Iterable[int]) -> float:
        """The last replay of any of these operators; 0 if there is none."""
        return max((self.runs[op][-1] for op in ops if op in self.runs), default=0.0)

    def end_at(self, time: float) -> float:
        """The end of the slice that begins at a time; the time itself if there is none."""
        return self._end_at.get(time, time)

    def read(self, maker: tuple[int, float] | None, readers: Iterable[int]) -> list[float]:
        """When each replay of the readers no longer needs a value.

        Args:
            maker: the replay that made the value; None: the value was resident.
            readers: operators that read the value.
        """
        own = None if maker is None else self.ends[maker]
        return [
            self.ends[reader, time]  # a slice holds all values that existed when it began
            if self.ends[reader, time] != own
            else time + EPSILON / 2  # a value made in the slice is freed once it is read
            for reader in readers
            for time in self.runs.get(reader, ())
        ]

    def _ends_of_slices(self) -> dict[tuple[int, float], float]:
        """For each replay, the end of its slice. A slice consists of replays without gaps."""
        ends: dict[tuple[int, float], float] = {}
        later = end = math.inf
        for op, time in sorted(self.all(), key=lambda replay: -replay[1]):
            if later - time > 1.5 * EPSILON:
                end = time + EPSILON / 2
            ends[op, time], later = end, time
        return ends
