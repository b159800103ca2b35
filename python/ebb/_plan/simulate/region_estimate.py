"""One region under a choice. In: a `Step`, a call, a `Choice`. Out: when memory is needed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from ebb._plan.profile.pager import has_rows
from ebb._plan.simulate.changes import Changes, Span, during, highest, union
from ebb._plan.simulate.choice import Choice
from ebb._plan.simulate.page_pools import Paged
from ebb._plan.simulate.replays import Replays
from ebb._plan.simulate.step import EPSILON, Call, Step
from ebb._plan.simulate.transfers import Sent


@dataclass(frozen=True)
class Need:
    """A time in which a memory (an index in ``Step.memories``) is needed."""

    memory: int
    begin: float
    end: float


class RegionEstimate:
    """Estimate for one call of a region. The methods model how ebb records and replays.

    Args:
        step, call: the call of a recorded step.
        choice: decisions for its operators' results.
        least: smaller storages are not offloaded.
        begins: when replays ahead begin; infinity: there are none, so each replay begins when
            backward unpacks a value.
    """

    def __init__(
        self, step: Step, call: Call, choice: Choice, least: float, begins: float = math.inf
    ) -> None:
        self._step, self._call, self._least = step, call, least
        first = call.operators.start
        self._rows = Rows(step, call, choice)
        self._always_kept = step.always_kept | self._rows.kept
        kept = {first + index for index in choice.kept}
        self._kept = kept_in_the_end(step, kept, self._always_kept)
        offloaded = {first + index for index in choice.offloaded}
        self._offloaded = (
            offloaded.union(*(step.later_writers(op) for op in offloaded)) & self._kept
        )
        self._paged = {first + index for index in choice.paged} & self._kept
        self._each_time = {first + index for index in choice.each_time}
        self._needed = self._find_needed()
        self.replays = Replays(step, call, self._kept, self._each_time, begins)
        self.sent: list[Sent] = []  # storages that are offloaded
        self.paged: list[Paged] = []  # storages whose rows go to pools
        # Key: a memory that the program still holds, with later contents. Value: the times in which
        # replayed contents need another allocation of the same size.
        self._beside: dict[int, list[Span]] = defaultdict(list)
        self.needs = [
            *self._of_results(),
            *self._of_inputs(choice),
            *self._of_lasting(self._find_lasting()),
        ]
        # (time, change in bytes) of copies, and of other memory that replays need in addition.
        self.copies = [
            *self._copies_before_writes(),
            *self._copies_in_passing(),
            *self._copies_before_replayed_writes(),
            *self._copies_for_replays(),
            *self._second_blocks(),
            *self._workspaces(),
            *self._in_passing_ahead(),
        ]

    def _size(self, value: int) -> int:
        return self._step.memories[self._step.memory_of[value]].size

    def _find_needed(self) -> set[int]:
        """Operators that may have to be recomputed."""
        needed: set[int] = set()
        for op in reversed(self._call.operators):
            if op in self._kept:
                continue
            for value in self._step.operators[op].outputs:
                read = any(reader in needed for reader in self._step.readers[value])
                if self._step.values[value].saved or read:
                    needed.add(op)
                    break
        return needed

    def _find_lasting(self) -> dict[int, float]:
        """Operators that are not recomputed but whose recipes outlive the region, and until when.
        Such a recipe stays because the program holds a value that depends on the operator's
        results, and may write to that value."""
        step = self._step
        lasting: dict[int, float] = {}
        for op in reversed(self._call.operators):
            if op in self.replays.runs:
                continue
            until = []
            for value in step.operators[op].outputs:
                if step.values[value].saved and step.released(value) > self._call.next_allocation:
                    until.append(step.needed_until[value])
                if op not in self._kept:
                    readers = step.readers[value]
                    until += [lasting[reader] for reader in readers if reader in lasting]
            if until:
                lasting[op] = max(until)
        return lasting

    def _of_lasting(self, lasting: dict[int, float]) -> Iterable[Need]:
        """The inputs of lasting operators, as far as they are in memory."""
        step = self._step
        for op, until in lasting.items():
            for value in step.operators[op].inputs:
                memory, maker = step.memory_of.get(value), step.maker.get(value)
                is_resident = maker is None or (
                    maker in self._kept
                    and maker not in self._offloaded | self._paged
                    and value not in step.overwritten
                )
                if memory is not None and is_resident:
                    begin = step.values[value].made
                    yield Need(memory, begin, max(begin, until))

    def _of_results(self) -> Iterable[Need]:
        step = self._step
        for op in self._call.operators:
            for value in step.operators[op].outputs:
                memory = step.memory_of.get(value)
                if memory is None:
                    continue
                allocated = step.memories[memory].allocated
                program_until = step.program_holds_until[value]
                yield Need(memory, allocated, program_until)
                if op in self._offloaded and self._may_offload(value):
                    self.sent.append(self._sent(value))
                elif op in self._paged and self._may_page(value):
                    self._page(self._sent(value), value)
                elif op in self._kept:
                    yield Need(memory, allocated, self._kept_until(value))
                for time in self.replays.runs.get(op, ()):
                    if (op, time) in self.replays.early and (op, time) in self.replays.passing:
                        continue  # see `_in_passing_ahead`
                    until = max(self._replayed_until(value, op, time), time + EPSILON)
                    if program_until > time:  # the program holds the storage with later contents
                        self._beside[memory].append((time, until))
                    else:
                        yield Need(memory, time, until)

    def _needed_until(self, value: int) -> float:
        """When autograd no longer needs a value."""
        record = self._step.values[value]
        return self._step.needed_until[value] if record.saved else record.made

    def _last_need(self, value: int) -> float:
        """When autograd and replays no longer need a value."""
        return max([*self._read_by_replays(value), self._needed_until(value)])

    def _kept_until(self, value: int) -> float:
        step = self._step
        until = self._last_need(value)
        if step.readers[value]:  # the recipes of readers exist until the region ends
            until = max(until, self._call.ends)
        writer = step.overwritten.get(value)
        return until if writer is None else min(until, step.operators[writer].start)

    def _replayed_until(self, value: int, op: int, time: float) -> float:
        """Until when a recomputed value is in memory."""
        replays = self.replays
        read = self._read_by_replays(value, (op, time))
        if (op, time) not in replays.passing:
            return max([*read, self._step.replayed_until.get(value, self._step.values[value].made)])
        end = replays.ends[op, time]
        return max((until for until in read if time <= until <= end), default=time)

    def _may_offload(self, value: int) -> bool:
        """True if the value is large enough to be offloaded, and backward needs it."""
        return self._size(value) >= self._least and self._first_need(value) < math.inf

    def _may_page(self, value: int) -> bool:
        """True if the value has rows, and backward needs it."""
        return has_rows(self._step.values[value]) and self._first_need(value) < math.inf

    def _page(self, sent: Sent, value: int) -> None:
        call = self._step.call_of[self._call.operators.start]
        self.paged.append(Paged(sent, self._step.values[value], call))

    def _first_need(self, value: int) -> float:
        """When backward or a replay first needs a value; infinity: never."""
        record = self._step.values[value]
        first = [record.asked] if record.saved and record.asked >= 0 else []
        runs = self.replays.runs
        first += [runs[reader][0] for reader in self._step.readers[value] if reader in runs]
        return min(first, default=math.inf)

    def _sent(self, value: int) -> Sent:
        step, record = self._step, self._step.values[value]
        memory = step.memory_of[value]
        # A value that only replays need leaves memory when the region ends.
        packed = record.made if record.saved else self._call.ends
        return Sent(
            memory,
            self._size(value),
            step.memories[memory].allocated,
            packed,
            self._first_need(value),
            self._last_need(value),
        )

    def _sent_input(self, value: int) -> Sent:
        step = self._step
        index = step.memory_of[value]
        memory, needed = step.memories[index], self._first_need(value)
        if needed == math.inf:
            needed = self._call.backward_begins
        until = max([*self._read_by_replays(value), memory.freed])
        made = step.values[value].made
        return Sent(index, memory.size, memory.allocated, made, needed, until)

    def _read_by_replays(self, value: int, maker: tuple[int, float] | None = None) -> list[float]:
        """When each replay that reads a value has ended. `maker`: as for `Replays.read`."""
        readers = [reader for reader in self._step.readers[value] if reader in self._needed]
        return self.replays.read(maker, readers)

    def _of_inputs(self, choice: Choice) -> Iterable[Need]:
        step = self._step
        for value in step.inputs_of(self._call):
            memory = step.memory_of.get(value)
            if memory is None:
                continue
            begin = step.values[value].made
            if not step.may_offload(value):
                end = max(begin, self._last_need(value))
            elif choice.paged_inputs and has_rows(step.values[value]) and self._call.unpacked:
                self._page(self._sent_input(value), value)
                end = begin
            elif choice.inputs and self._size(value) >= self._least and self._call.unpacked:
                self.sent.append(self._sent_input(value))
                end = begin
            else:
                end = step.memories[memory].freed
            yield Need(memory, begin, max(begin, end))

    def _second_blocks(self) -> Iterable[tuple[float, int]]:
        for memory, spans in self._beside.items():
            for begin, end in union(spans):
                yield from during(begin, end, self._step.memories[memory].size)

    def _workspaces(self) -> Iterable[tuple[float, int]]:
        for op, time in self.replays.all():
            if (size := self._step.workspace[op]) and (op, time) not in self.replays.early:
                yield from during(time, time + EPSILON / 2, size)

    def _in_passing_ahead(self) -> Iterable[tuple[float, int]]:
        """Temporary memory of replays ahead. Their timing beside the backward of another region is
        unknown, so their peak counts for the whole time."""
        step, replays = self._step, self.replays
        changes = []
        for op, time in replays.early:
            changes += during(time, time + EPSILON / 2, step.workspace[op])
            for value in step.operators[op].outputs:
                if value in step.memory_of and (op, time) in replays.passing:
                    end = max(self._replayed_until(value, op, time), time + EPSILON)
                    changes += during(time, end, self._size(value))
        most, _ = highest([Changes(changes)])
        if most > 0:
            begins = min(time for _, time in replays.early)
            yield from during(begins, self._call.backward_begins, most)

    def _copies_before_writes(self) -> Iterable[tuple[float, int]]:
        """Copies of saved values and inputs that the program overwrites while a replay still needs
        them."""
        step, runs = self._step, self.replays.runs
        for op in self._call.operators:
            for value in step.operators[op].outputs:
                writer = step.overwritten.get(value)
                if writer is None or op not in self._kept:
                    continue
                readers = [reader for reader in step.readers[value] if reader in runs]
                if readers:
                    unpacked = [time for time, _ in self._call.unpacked]
                    end = max([self.replays.last(readers) + EPSILON / 2, *unpacked])
                    yield from during(step.operators[writer].start, end, self._size(value))

        for copied in step.copied.get(step.call_of[self._call.operators.start], ()):
            readers = [reader for reader in step.readers[copied.value] if reader in runs]
            if readers:
                end = self.replays.last(readers) + EPSILON / 2
                yield from during(copied.allocated, end, copied.size)

    def _copies_in_passing(self) -> Iterable[tuple[float, int]]:
        """Copies of recomputed values that an operator of ``each_time`` overwrites. If the slice
        frees the operator's results, the replay writes to a copy, since a later replay will read
        the values again. If the slice keeps the results, the replay copies only if the
        overwritten values are needed after the slice. See Note [Made each time]."""
        step, runs = self._step, self.replays.runs
        for op in self._each_time & runs.keys():
            for value in step.operators[op].inputs:
                maker = step.maker.get(value)
                if step.overwritten.get(value) != op or maker not in runs:
                    continue
                for time in runs[op]:
                    made = max((run for run in runs[maker] if run <= time), default=math.inf)
                    if made == math.inf or (maker, made) in self.replays.passing:
                        continue
                    until = self._replayed_until(value, maker, made)
                    is_needed = until > self.replays.ends[op, time]
                    if (op, time) in self.replays.passing or is_needed:
                        end = self._last_state_until(op, time)
                        end = min(end, until) if is_needed else end
                        yield from during(time, max(end, time + EPSILON), self._size(value))

    def _copies_before_replayed_writes(self) -> Iterable[tuple[float, int]]:
        """Copies of recomputed values that are still needed when another replay overwrites them.
        That replay writes through a tensor with its own version counter (a chunk of the same
        storage): autograd raises an error for any other write to a saved tensor."""
        step, runs = self._step, self.replays.runs
        for op in runs.keys() - self._each_time:
            for value in step.operators[op].outputs:
                writer = step.overwritten.get(value)
                if writer not in runs or writer in self._each_time:
                    continue
                made, written = runs[op][0], runs[writer][0]
                until = self._replayed_until(value, op, made)
                if until > self.replays.ends[writer, written] and written > made:
                    # From `both` on, only one of the two storages is needed.
                    both = min(until, self._last_state_until(writer, written))
                    yield from during(written, max(written, both), self._size(value))

    def _last_state_until(self, writer: int | None, time: float) -> float:
        """When the result of an operator's run is no longer needed, nor are the results of later
        operators that overwrite the same memory."""
        runs, until = self.replays.runs, 0.0
        while writer in runs:
            time = min((run for run in runs[writer] if run >= time), default=math.inf)
            if time == math.inf:
                break
            for value in self._step.operators[writer].outputs:
                until = max(until, self._replayed_until(value, writer, time))
            writer = self._step.overwriter_of(writer)
        return until

    def _copies_for_replays(self) -> Iterable[tuple[float, int]]:
        """Copies of values that backward unpacks while operators that read them may still be
        recomputed. See Note [Unpacked bytes may be written]."""
        step = self._step
        parameters = [  # computed inputs are not copied
            (step.values[value].asked, value)
            for value in step.inputs_of(self._call)
            if value not in step.memory_of
        ]
        for time, value in [*self._call.unpacked, *parameters]:
            readers = step.readers[value]
            last = self.replays.last(readers)
            could_run = last > self._slice_end(value, time) or any(
                self._could_run(reader, time) for reader in readers if reader in self._kept
            )
            if time >= 0 and could_run:
                is_replayed = step.maker.get(value) in self.replays.runs
                end = max(step.replayed_until[value], last if is_replayed else 0.0)
                yield from during(time, end, step.values[value].memory)

    def _slice_end(self, value: int, time: float) -> float:
        """The end of the replays that run before backward gets a value that it unpacks: those that
        the value needs, and those of Note [Saved by one node]."""
        runs, step = self.replays.runs, self._step
        of_node = self._call.of_node.get(step.values[value].node, ())
        makers = [step.maker.get(value)]
        makers += [step.maker[other] for at, other in of_node if at >= time]
        once = (maker for maker in makers if maker in runs and maker not in self._each_time)
        ends = [self.replays.ends[maker, runs[maker][0]] for maker in once]
        return max([self.replays.end_at(time), *ends])

    def _could_run(self, op: int, time: float) -> bool:
        """True if a saved operator's recipe still exists. The region's end drops the recipe, unless
        the program holds one of the operator's results."""
        step, call = self._step, self._call
        if op in self._always_kept or op not in call.operators:
            return False
        outputs = step.operators[op].outputs
        if op in self._paged and all(has_rows(step.values[value]) for value in outputs):
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


class Rows:
    """Effects of paging: padding rows come back with other contents. See Note [Rows]."""

    def __init__(self, step: Step, call: Call, choice: Choice) -> None:
        self.kept: set[int] = set()  # operators whose results must stay in memory for that reason
        self._lossy: set[int] = set()
        if not choice.pages:
            return
        if choice.paged_inputs:
            inputs = (value for value in step.inputs_of(call) if value in step.memory_of)
            self._lossy.update(value for value in inputs if has_rows(step.values[value]))
        for op in call.operators:
            operator = step.operators[op]
            looks = operator.reads_rows or operator.inplace  # an in-place write may be partial
            reads = looks and not self._lossy.isdisjoint(operator.inputs)
            if reads or op - call.operators.start in choice.paged:
                self._made(step, op, reads)

    def _made(self, step: Step, op: int, reads: bool) -> None:
        for value in step.operators[op].outputs:
            record = step.values[value]
            if record.live_rows > 0:
                self._lossy.add(value)
            if record.rows_mixed or (reads and record.live_rows == 0):
                self.kept.add(op)


def eager_needs(step: Step, call: Call) -> Iterable[Need]:
    """Memory that a block needs in eager."""
    for op in call.operators:
        for value in step.operators[op].outputs:
            memory = step.memory_of.get(value)
            if memory is not None:
                begin = step.memories[memory].allocated
                end = step.needed_until[value] if step.values[value].saved else begin
                yield Need(memory, begin, max(end, step.released(value)))
    for value in step.inputs_of(call):
        memory = step.memory_of.get(value)
        if memory is not None:
            record = step.values[value]
            end = step.needed_until[value] if record.saved else record.made
            if step.may_offload(value):
                end = step.memories[memory].freed
            yield Need(memory, record.made, end)
