"""Replays and lifetimes in one region. In: a `Step`, a call, a `Choice`. Out: their times."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

from ebb._plan.profile.copies import has_rows
from ebb._plan.simulate.choice import Choice, Operators
from ebb._plan.simulate.dataflow import EPSILON, Call
from ebb._plan.simulate.step import Step


class Replays:
    """Replays of a region's operators, except those `kept`. The replays that one unpack causes are
    a slice; its end frees results of `each_time` that backward does not need. See Note [Replay].
    """

    def __init__(
        self, step: Step, call: Call, kept: set[int], each_time: Operators, begins: float
    ) -> None:
        self._step, self._kept = step, kept
        self.runs: dict[int, list[float]] = {}  # the times of each operator's replays
        self.early: set[tuple[int, float]] = set()  # replays ahead of backward
        self.passing: set[tuple[int, float]] = set()  # replays whose results their slice frees
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
        self.end_at = {time: end for (_, time), end in self.ends.items()}  # by a slice's begin

    def _in_order(
        self, call: Call, each_time: Operators, begins: float
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

    def _ends_of_slices(self) -> dict[tuple[int, float], float]:
        """For each replay, the end of its slice. A slice consists of replays without gaps."""
        ends: dict[tuple[int, float], float] = {}
        later = end = math.inf
        for op, time in sorted(self.all(), key=lambda replay: -replay[1]):
            if later - time > 1.5 * EPSILON:
                end = time + EPSILON / 2
            ends[op, time], later = end, time
        return ends


class Lifetimes:
    """How long one call of a region needs values under a choice. The methods model how ebb records
    and replays.

    Attributes:
        kept: operators that are never recomputed.
        offloaded, paged, each_time: operators whose results have these decisions.

    Args:
        begins: when replays ahead begin; infinity: there are none, so each replay begins when
            backward unpacks a value.
    """

    def __init__(self, step: Step, call: Call, choice: Choice, begins: float = math.inf) -> None:
        self.step, self.call = step, call
        first = call.operators.start
        self._always_kept = step.always_kept | _kept_for_rows(step, call, choice)
        here = choice.mapped(lambda operators: frozenset(first + index for index in operators))
        self.kept = kept_in_the_end(step, here.kept, self._always_kept)
        writers = map(step.later_writers, here.offloaded)
        self.offloaded = here.offloaded.union(*writers) & self.kept
        self.paged, self.each_time = here.paged & self.kept, here.each_time
        self.replays = Replays(step, call, self.kept, self.each_time, begins)

    def size(self, value: int) -> int:
        """Bytes of the value's memory."""
        return self.step.memories[self.step.memory_of[value]].size

    def last_need(self, value: int) -> float:
        """When autograd and replays no longer need a value."""
        needed_until = self.step.needed_until.get(value, self.step.values[value].made)
        return max([*self.read_by_replays(value), needed_until])

    def kept_until(self, value: int) -> float:
        """Until when a value that is not recomputed is in memory, unless it leaves."""
        step = self.step
        until = self.last_need(value)
        if step.readers[value]:  # the recipes of readers exist until the region ends
            until = max(until, self.call.ends)
        writer = step.overwritten.get(value)
        return until if writer is None else min(until, step.operators[writer].start)

    def replayed_until(self, value: int, op: int, time: float) -> float:
        """Until when a recomputed value is in memory."""
        replays = self.replays
        read = self.read_by_replays(value, (op, time))
        if (op, time) not in replays.passing:
            return max([*read, self.step.replayed_until.get(value, self.step.values[value].made)])
        end = replays.ends[op, time]
        return max((until for until in read if time <= until <= end), default=time)

    def first_need(self, value: int) -> float:
        """When backward or a replay first needs a value; infinity: never."""
        record = self.step.values[value]
        first = [record.asked] if record.saved and record.asked >= 0 else []
        runs = self.replays.runs
        first += [runs[reader][0] for reader in self.step.readers[value] if reader in runs]
        return min(first, default=math.inf)

    def read_by_replays(self, value: int, maker: tuple[int, float] | None = None) -> list[float]:
        """When each replay that reads a value no longer needs it. `maker`: the replay that made the
        value; None: the value was resident."""
        runs, ends = self.replays.runs, self.replays.ends
        own = None if maker is None else ends[maker]
        return [
            ends[reader, time]  # a slice holds all values that existed when it began
            if ends[reader, time] != own
            else time + EPSILON / 2  # a value made in the slice is freed once it is read
            for reader in self.step.readers[value]
            for time in runs.get(reader, ())
        ]

    def memory_needed_until(self, writer: int | None, time: float) -> float:
        """Until when the memory is needed that the first replay of `writer` from `time` on has
        written: for its result, or for those of later replays that overwrite it. 0: no replay."""
        runs, until = self.replays.runs, 0.0
        while writer in runs:
            time = min((run for run in runs[writer] if run >= time), default=math.inf)
            if time == math.inf:
                break
            for value in self.step.operators[writer].outputs:
                until = max(until, self.replayed_until(value, writer, time))
            writer = self.step.overwriter_of(writer)
        return until

    def slice_end(self, value: int, time: float) -> float:
        """The end of the replays that run before backward gets a value that it unpacks: those that
        the value needs, and those of Note [Saved by one node]."""
        runs, step = self.replays.runs, self.step
        of_node = self.call.of_node.get(step.values[value].node, ())
        makers = [step.maker.get(value)]
        makers += [step.maker[other] for at, other in of_node if at >= time]
        once = (maker for maker in makers if maker in runs and maker not in self.each_time)
        ends = [self.replays.ends[maker, runs[maker][0]] for maker in once]
        return max([self.replays.end_at.get(time, time), *ends])

    def could_run(self, op: int, time: float) -> bool:
        """True if a saved operator's recipe still exists. The region's end drops the recipe, unless
        the program holds one of the operator's results."""
        step, call = self.step, self.call
        if op in self._always_kept or op not in call.operators:
            return False
        outputs = step.operators[op].outputs
        if op in self.paged and all(has_rows(step.values[value]) for value in outputs):
            return False  # a value in a pool needs no recipe
        is_saved = any(step.needed_until.get(value, -1.0) > time for value in outputs)
        # The profile does not show when the program released a result that ebb kept.
        computed = (value for value in outputs if step.values[value].fate != "kept")
        return is_saved and any(step.released(value) > call.next_allocation for value in computed)


def kept_in_the_end(step: Step, kept: Operators, always_kept: set[int]) -> set[int]:
    """Operators whose results are saved in the end. If an operator overwrites a saved value, its
    result is saved instead; a value that can be recomputed is not copied. See
    Note [A write into a saved value] and Note [Copy on write]."""
    in_the_end = set(kept)
    for op in sorted(kept - always_kept):
        for overwritten, writer in pairwise((op, *step.later_writers(op))):
            if len(step.operators[overwritten].outputs) == 1:  # else other outputs are still saved
                in_the_end.discard(overwritten)
            in_the_end.add(writer)
    return in_the_end | always_kept


def _kept_for_rows(step: Step, call: Call, choice: Choice) -> set[int]:
    """Operators whose results must stay in memory because padding rows come back from page pools
    with other contents. See Note [Rows]."""
    kept: set[int] = set()
    if not (choice.paged or choice.paged_inputs):
        return kept
    lossy: set[int] = set()
    if choice.paged_inputs:
        inputs = (value for value in call.inputs if value in step.memory_of)
        lossy.update(value for value in inputs if has_rows(step.values[value]))
    for op in call.operators:
        operator = step.operators[op]
        looks = operator.reads_rows or operator.inplace  # an in-place write may be partial
        reads = looks and not lossy.isdisjoint(operator.inputs)
        if reads or op - call.operators.start in choice.paged:
            records = [(value, step.values[value]) for value in operator.outputs]
            lossy.update(value for value, record in records if record.live_rows > 0)
            if any(r.rows_mixed or (reads and r.live_rows == 0) for _, r in records):
                kept.add(op)
    return kept
