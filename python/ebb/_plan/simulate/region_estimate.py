"""One region under a choice. In: a `Step`, a call, a `Choice`. Out: when memory is needed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from ebb._plan.profile.copies import has_rows
from ebb._plan.simulate.changes import Changes, Span, during, highest
from ebb._plan.simulate.choice import Choice
from ebb._plan.simulate.dataflow import EPSILON, Call
from ebb._plan.simulate.lifetimes import Lifetimes
from ebb._plan.simulate.step import Step, changes_of
from ebb._plan.simulate.transfers import Paged, Sent


@dataclass(frozen=True)
class Need:
    """A time in which a memory (an index in ``Step.memories``) is needed."""

    memory: int
    begin: float
    end: float


class RegionEstimate:
    """Estimate for one call of a region.

    Attributes:
        needs: when memories are needed.
        copies: times and changes in bytes of copies and workspaces, beside `needs`.
        sent: storages that are offloaded.
        paged: storages whose rows go to pools.

    Args:
        least: smaller storages are not offloaded.
        begins: as for `Lifetimes`.
    """

    def __init__(self, step: Step, call: Call, choice: Choice, least: float, begins: float) -> None:
        self._step, self._call, self._least = step, call, least
        self._lives = lives = Lifetimes(step, call, choice, begins)
        self.replays = lives.replays
        self.sent: list[Sent] = []
        self.paged: list[Paged] = []
        # By memory that the program still holds with later contents: the times in which replayed
        # contents need another allocation of the same size.
        self._beside: dict[int, list[Span]] = defaultdict(list)
        self.needs = [*self._of_results(), *self._of_inputs(choice), *self._of_lasting()]
        self.copies = [
            *_before_writes(lives),
            *_in_passing(lives),
            *_before_replayed_writes(lives),
            *_for_replays(lives),
            *changes_of(step, self._beside),
            *_workspaces(lives),
            *_in_passing_ahead(lives),
        ]

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
                if op not in self._lives.kept:
                    readers = step.readers[value]
                    until += [lasting[reader] for reader in readers if reader in lasting]
            if until:
                lasting[op] = max(until)
        return lasting

    def _of_lasting(self) -> Iterable[Need]:
        """The inputs of lasting operators, as far as they are in memory."""
        step = self._step
        for op, until in self._find_lasting().items():
            for value in step.operators[op].inputs:
                memory, maker = step.memory_of.get(value), step.maker.get(value)
                is_resident = maker is None or (
                    maker in self._lives.kept
                    and maker not in self._lives.offloaded | self._lives.paged
                    and value not in step.overwritten
                )
                if memory is not None and is_resident:
                    begin = step.values[value].made
                    yield Need(memory, begin, max(begin, until))

    def _of_results(self) -> Iterable[Need]:
        step, lives = self._step, self._lives
        for op in self._call.operators:
            for value in step.operators[op].outputs:
                memory = step.memory_of.get(value)
                if memory is None:
                    continue
                allocated = step.memories[memory].allocated
                program_until = step.held_until(memory)
                yield Need(memory, allocated, program_until)
                is_needed = lives.first_need(value) < math.inf
                if is_needed and op in lives.offloaded and lives.size(value) >= self._least:
                    self.sent.append(self._sent(value))
                elif is_needed and op in lives.paged and has_rows(step.values[value]):
                    self._page(self._sent(value), value)
                elif op in lives.kept:
                    yield Need(memory, allocated, lives.kept_until(value))
                for time in self.replays.runs.get(op, ()):
                    if (op, time) in self.replays.early and (op, time) in self.replays.passing:
                        continue  # see `_in_passing_ahead`
                    until = max(lives.replayed_until(value, op, time), time + EPSILON)
                    if program_until > time:  # the program holds the storage with later contents
                        self._beside[memory].append((time, until))
                    else:
                        yield Need(memory, time, until)

    def _page(self, sent: Sent, value: int) -> None:
        call = self._step.call_of[self._call.operators.start]
        self.paged.append(Paged(sent, self._step.values[value], call))

    def _sent(self, value: int, *, is_input: bool = False) -> Sent:
        step, lives = self._step, self._lives
        index, record = step.memory_of[value], step.values[value]
        memory, needed = step.memories[index], lives.first_need(value)
        # A value that only replays need leaves memory when the region ends.
        packed = record.made if record.saved or is_input else self._call.ends
        if not is_input:
            until = lives.last_need(value)
        else:
            until = max([*lives.read_by_replays(value), memory.freed])
            needed = self._call.backward_begins if needed == math.inf else needed
        return Sent(index, memory.size, memory.allocated, packed, needed, until)

    def _of_inputs(self, choice: Choice) -> Iterable[Need]:
        step = self._step
        for value in self._call.inputs:
            memory = step.memory_of.get(value)
            if memory is None:
                continue
            begin = step.values[value].made
            if not step.may_offload(value):
                end = max(begin, self._lives.last_need(value))
            elif choice.paged_inputs and has_rows(step.values[value]) and self._call.unpacked:
                self._page(self._sent(value, is_input=True), value)
                end = begin
            elif choice.inputs and self._lives.size(value) >= self._least and self._call.unpacked:
                self.sent.append(self._sent(value, is_input=True))
                end = begin
            else:
                end = step.memories[memory].freed
            yield Need(memory, begin, max(begin, end))


def eager_needs(step: Step, call: Call) -> Iterable[Need]:
    """Memory that a block needs in eager."""
    for op in call.operators:
        for value in step.operators[op].outputs:
            memory = step.memory_of.get(value)
            if memory is not None:
                begin = step.memories[memory].allocated
                end = max(step.needed_until.get(value, begin), step.released(value))
                yield Need(memory, begin, end)
    for value in call.inputs:
        memory = step.memory_of.get(value)
        if memory is not None:
            begin = step.values[value].made
            end = step.needed_until.get(value, begin)
            if step.may_offload(value):
                end = step.memories[memory].freed
            yield Need(memory, begin, end)


def _workspaces(lives: Lifetimes) -> Iterable[tuple[float, int]]:
    for op, time in lives.replays.all():
        if (size := lives.step.workspace[op]) and (op, time) not in lives.replays.early:
            yield from during(time, time + EPSILON / 2, size)


def _in_passing_ahead(lives: Lifetimes) -> Iterable[tuple[float, int]]:
    """Temporary memory of replays ahead. Their timing beside the backward of another region is
    unknown, so their peak counts for the whole time."""
    step, replays = lives.step, lives.replays
    changes = []
    for op, time in replays.early:
        changes += during(time, time + EPSILON / 2, step.workspace[op])
        for value in step.operators[op].outputs:
            if value in step.memory_of and (op, time) in replays.passing:
                end = max(lives.replayed_until(value, op, time), time + EPSILON)
                changes += during(time, end, lives.size(value))
    most, _ = highest([Changes(changes)])
    if most > 0:
        begins = min(time for _, time in replays.early)
        yield from during(begins, lives.call.backward_begins, most)


def _before_writes(lives: Lifetimes) -> Iterable[tuple[float, int]]:
    """Copies of saved values and inputs that the program overwrites while a replay still needs
    them."""
    step, runs = lives.step, lives.replays.runs
    for op in lives.call.operators:
        for value in step.operators[op].outputs:
            writer = step.overwritten.get(value)
            if writer is None or op not in lives.kept:
                continue
            readers = [reader for reader in step.readers[value] if reader in runs]
            if readers:
                unpacked = [time for time, _ in lives.call.unpacked]
                end = max([lives.replays.last(readers) + EPSILON / 2, *unpacked])
                yield from during(step.operators[writer].start, end, lives.size(value))

    for value, allocated, size in step.copied.get(step.call_of[lives.call.operators.start], ()):
        readers = [reader for reader in step.readers[value] if reader in runs]
        if readers:
            end = lives.replays.last(readers) + EPSILON / 2
            yield from during(allocated, end, size)


def _in_passing(lives: Lifetimes) -> Iterable[tuple[float, int]]:
    """Copies of recomputed values that an operator of ``each_time`` overwrites. If the slice
    frees the operator's results, the replay writes to a copy, since a later replay will read
    the values again. If the slice keeps the results, the replay copies only if the
    overwritten values are needed after the slice. See Note [Made each time]."""
    step, runs = lives.step, lives.replays.runs
    for op in lives.each_time & runs.keys():
        for value in step.operators[op].inputs:
            maker = step.maker.get(value)
            if step.overwritten.get(value) != op or maker not in runs:
                continue
            for time in runs[op]:
                made = max((run for run in runs[maker] if run <= time), default=math.inf)
                if made == math.inf or (maker, made) in lives.replays.passing:
                    continue
                until = lives.replayed_until(value, maker, made)
                is_needed = until > lives.replays.ends[op, time]
                if (op, time) in lives.replays.passing or is_needed:
                    end = lives.memory_needed_until(op, time)
                    end = min(end, until) if is_needed else end
                    yield from during(time, max(end, time + EPSILON), lives.size(value))


def _before_replayed_writes(lives: Lifetimes) -> Iterable[tuple[float, int]]:
    """Copies of recomputed values that are still needed when another replay overwrites them.
    That replay writes through a tensor with its own version counter (a chunk of the same
    storage): autograd raises an error for any other write to a saved tensor."""
    step, runs = lives.step, lives.replays.runs
    for op in runs.keys() - lives.each_time:
        for value in step.operators[op].outputs:
            writer = step.overwritten.get(value)
            if writer not in runs or writer in lives.each_time:
                continue
            made, written = runs[op][0], runs[writer][0]
            until = lives.replayed_until(value, op, made)
            if until > lives.replays.ends[writer, written] and written > made:
                # From `both` on, only one of the two storages is needed.
                both = min(until, lives.memory_needed_until(writer, written))
                yield from during(written, max(written, both), lives.size(value))


def _for_replays(lives: Lifetimes) -> Iterable[tuple[float, int]]:
    """Copies of values that backward unpacks while operators that read them may still be
    recomputed. See Note [Unpacked bytes may be written]."""
    step = lives.step
    parameters = [  # computed inputs are not copied
        (step.values[value].asked, value)
        for value in lives.call.inputs
        if value not in step.memory_of
    ]
    for time, value in [*lives.call.unpacked, *parameters]:
        readers = step.readers[value]
        last = lives.replays.last(readers)
        could_run = last > lives.slice_end(value, time) or any(
            lives.could_run(reader, time) for reader in readers if reader in lives.kept
        )
        if time >= 0 and could_run:
            is_replayed = step.maker.get(value) in lives.replays.runs
            end = max(step.replayed_until[value], last if is_replayed else 0.0)
            yield from during(time, end, step.values[value].memory)
