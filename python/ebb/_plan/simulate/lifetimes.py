"""Lifetimes in one region. In: a `Step`, a call, a `Choice`. Out: until when values are needed."""

from __future__ import annotations

import math
from itertools import pairwise

from ebb._plan.profile.pager import has_rows
from ebb._plan.simulate.choice import Choice
from ebb._plan.simulate.dataflow import Call
from ebb._plan.simulate.replays import Replays
from ebb._plan.simulate.step import Step


class Lifetimes:
    """How long one call of a region needs values under a choice. The methods model how ebb records
    and replays.

    Attributes:
        kept: operators that are never recomputed.
        offloaded, paged, each_time: operators whose results have these decisions.

    Args:
        step, call: the call of a recorded step.
        choice: decisions for its operators' results.
        begins: when replays ahead begin; infinity: there are none, so each replay begins when
            backward unpacks a value.
    """

    def __init__(self, step: Step, call: Call, choice: Choice, begins: float) -> None:
        self.step, self.call = step, call
        first = call.operators.start
        self._always_kept = step.always_kept | _kept_for_rows(step, call, choice)
        kept = {first + index for index in choice.kept}
        self.kept = kept_in_the_end(step, kept, self._always_kept)
        offloaded = {first + index for index in choice.offloaded}
        self.offloaded = offloaded.union(*(step.later_writers(op) for op in offloaded)) & self.kept
        self.paged = {first + index for index in choice.paged} & self.kept
        self.each_time = {first + index for index in choice.each_time}
        self._needed = self._find_needed()
        self.replays = Replays(step, call, self.kept, self.each_time, begins)

    def size(self, value: int) -> int:
        """Bytes of the value's memory."""
        return self.step.memories[self.step.memory_of[value]].size

    def _find_needed(self) -> set[int]:
        """Operators that may have to be recomputed."""
        needed: set[int] = set()
        for op in reversed(self.call.operators):
            if op in self.kept:
                continue
            for value in self.step.operators[op].outputs:
                read = any(reader in needed for reader in self.step.readers[value])
                if self.step.values[value].saved or read:
                    needed.add(op)
                    break
        return needed

    def needed_until(self, value: int) -> float:
        """When autograd no longer needs a value."""
        record = self.step.values[value]
        return self.step.needed_until[value] if record.saved else record.made

    def last_need(self, value: int) -> float:
        """When autograd and replays no longer need a value."""
        return max([*self.read_by_replays(value), self.needed_until(value)])

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
        """When each replay that reads a value has ended. `maker`: as for `Replays.read`."""
        readers = [reader for reader in self.step.readers[value] if reader in self._needed]
        return self.replays.read(maker, readers)

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
        return max([self.replays.end_at(time), *ends])

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


def kept_in_the_end(step: Step, kept: set[int], always_kept: set[int]) -> set[int]:
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
    lossy: set[int] = set()
    if choice.paged_inputs:
        inputs = (value for value in step.inputs_of(call) if value in step.memory_of)
        lossy.update(value for value in inputs if has_rows(step.values[value]))
    for op in call.operators if choice.pages else ():
        operator = step.operators[op]
        looks = operator.reads_rows or operator.inplace  # an in-place write may be partial
        reads = looks and not lossy.isdisjoint(operator.inputs)
        if reads or op - call.operators.start in choice.paged:
            records = [(value, step.values[value]) for value in operator.outputs]
            lossy.update(value for value, record in records if record.live_rows > 0)
            if any(r.rows_mixed or (reads and r.live_rows == 0) for _, r in records):
                kept.add(op)
    return kept
