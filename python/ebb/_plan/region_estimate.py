"""Estimates what one region holds, recomputes and offloads under a choice."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from ebb._plan.changes import Changes, highest, union
from ebb._plan.choice import Choice
from ebb._plan.pages import Paged, has_rows
from ebb._plan.replays import Replays
from ebb._plan.step import JUST, Call, Step
from ebb._plan.transfers import Sent


@dataclass(frozen=True)
class Stretch:
    """A time in which a memory (an index in ``Step.memories``) is needed."""

    memory: int
    begin: float
    end: float


class RegionEstimate:
    """Estimate for one call of a region. The methods model how ebb records and replays.

    Attributes:
        stretches: when the call needs which memory.
        sent: storages that are offloaded.
        paged: storages whose rows go to pools.
        copies: times, and bytes that copies and replays allocate or free in addition.
        replays: operators that are recomputed.

    Args:
        step: the step of the call.
        call: the call.
        choice: decisions for its operators' results.
        least: smaller storages are not offloaded.
        begins: when its replays begin at the latest; infinity: when backward unpacks a value.
    """

    def __init__(
        self, step: Step, call: Call, choice: Choice, least: float, begins: float = math.inf
    ) -> None:
        self._step, self._call, self._least = step, call, least
        first = call.operators.start
        self._rows = Rows(step, call, choice)
        self._stays = step.stays | self._rows.stays
        self._kept = kept_in_the_end(step, {first + one for one in choice.kept}, self._stays)
        self._leaving = {first + one for one in choice.offloaded} & self._kept
        self._paging = {first + one for one in choice.paged} & self._kept
        self._each_time = {first + one for one in choice.each_time}
        self._needed = self._find_needed()
        self.replays = Replays(step, call, self._kept, self._each_time, begins)
        self.sent: list[Sent] = []
        self.paged: list[Paged] = []
        # By memory that the program still holds: when replays hold another block of its size.
        self._beside: dict[int, list[tuple[float, float]]] = defaultdict(list)
        self.stretches = [
            *self._of_results(),
            *self._of_inputs(choice),
            *self._of_lasting(self._find_lasting()),
        ]
        self.copies = [
            *self._copies_before_writes(),
            *self._copies_in_passing(),
            *self._copies_before_replayed_writes(),
            *self._copies_for_replays(),
            *self._made_beside(),
            *self._workspaces(),
            *self._in_passing_ahead(),
        ]

    def _find_needed(self) -> set[int]:
        """Operators that may have to be recomputed."""
        needed: set[int] = set()
        for number in reversed(self._call.operators):
            if number in self._kept:
                continue
            for value in self._step.operators[number].outputs:
                read = any(reader in needed for reader in self._step.readers[value])
                if self._step.values[value].saved or read:
                    needed.add(number)
                    break
        return needed

    def _find_lasting(self) -> dict[int, float]:
        """Operators that are not recomputed but whose recipes outlive the region, since the program
        holds a value that depends on their results and may write to it; with the time until which
        they last."""
        step = self._step
        found: dict[int, float] = {}
        for number in reversed(self._call.operators):
            if number in self.replays:
                continue
            until = []
            for value in step.operators[number].outputs:
                if step.values[value].saved and step.let_go(value) > self._call.left:
                    until.append(step.needed_until[value])
                if number not in self._kept:
                    until += [found[one] for one in step.readers[value] if one in found]
            if until:
                found[number] = max(until)
        return found

    def _of_lasting(self, lasting: dict[int, float]) -> Iterable[Stretch]:
        """The inputs of lasting operators, as far as they are in memory."""
        step = self._step
        for number, until in lasting.items():
            for value in step.operators[number].inputs:
                place, maker = step.memory_of.get(value), step.maker.get(value)
                is_there = maker is None or (
                    maker in self._kept
                    and maker not in self._leaving | self._paging
                    and value not in step.overwritten
                )
                if place is not None and is_there:
                    begin = step.values[value].made
                    yield Stretch(place, begin, max(begin, until))

    def _of_results(self) -> Iterable[Stretch]:
        step = self._step
        for number in self._call.operators:
            for value in step.operators[number].outputs:
                place = step.memory_of.get(value)
                if place is None:
                    continue
                taken = step.memories[place].taken
                yield Stretch(place, taken, step.program_has(value))
                if number in self._leaving and self._leaves(value, place):
                    self.sent.append(self._sent(value, place))
                elif number in self._paging and self._pages(value):
                    self._page(self._sent(value, place), value)
                elif number in self._kept:
                    yield Stretch(place, taken, self._kept_until(value))
                for time in self.replays.runs.get(number, ()):
                    if self._passes_ahead(number, time):
                        continue
                    until = max(self._replayed_until(value, number, time), time + JUST)
                    if step.program_has(value) > time:  # the program holds a later state of it
                        self._beside[place].append((time, until))
                    else:
                        yield Stretch(place, time, until)

    def _needed_until(self, value: int) -> float:
        """When autograd no longer needs a value."""
        about = self._step.values[value]
        return self._step.needed_until[value] if about.saved else about.made

    def _kept_until(self, value: int) -> float:
        step = self._step
        until = max([*self._read_by_replays(value), self._needed_until(value)])
        if step.readers[value]:  # the recipes of readers exist until the region ends
            until = max(until, self._call.ends)
        writer = step.overwritten.get(value)
        return until if writer is None else min(until, step.operators[writer].start)

    def _replayed_until(self, value: int, operator: int, time: float) -> float:
        """Until when a recomputed value is in memory."""
        replays = self.replays
        read = self._read_by_replays(value, (operator, time))
        if not replays.is_passing(operator, time):
            return max([*read, self._needed_until(value)])
        end = replays.end(operator, time)
        return max((one for one in read if time <= one <= end), default=time)

    def _leaves(self, value: int, place: int) -> bool:
        """True if the value is large enough to be offloaded, and backward needs it."""
        return self._step.memories[place].size >= self._least and self._asked(value) < math.inf

    def _pages(self, value: int) -> bool:
        """True if the value has rows, and backward needs it."""
        return has_rows(self._step.values[value]) and self._asked(value) < math.inf

    def _page(self, sent: Sent, value: int) -> None:
        call = self._step.call_of[self._call.operators.start]
        self.paged.append(Paged(sent, self._step.values[value], call))

    def _asked(self, value: int) -> float:
        """When backward or a replay first needs a value; infinity: never."""
        about = self._step.values[value]
        first = [about.asked] if about.saved and about.asked >= 0 else []
        runs = self.replays.runs
        first += [runs[one][0] for one in self._step.readers[value] if one in runs]
        return min(first, default=math.inf)

    def _sent(self, value: int, place: int) -> Sent:
        step = self._step
        memory, about = step.memories[place], step.values[value]
        # A value that only replays need leaves memory when the region ends.
        packed = about.made if about.saved else self._call.ends
        until = max([*self._read_by_replays(value), self._needed_until(value)])
        asked = self._asked(value)
        return Sent(place, memory.size, memory.taken, packed, asked, until)

    def _sent_input(self, value: int, place: int) -> Sent:
        memory, about = self._step.memories[place], self._step.values[value]
        asked = self._asked(value)
        if asked == math.inf:
            asked = self._call.asked[0][0]
        until = max([*self._read_by_replays(value), memory.freed])
        return Sent(place, memory.size, memory.taken, about.made, asked, until)

    def _read_by_replays(self, value: int, made: tuple[int, float] | None = None) -> list[float]:
        """When each replay that reads a value has ended. `made`: as for `Replays.read`."""
        readers = [one for one in self._step.readers[value] if one in self._needed]
        return self.replays.read(made, readers)

    def _of_inputs(self, choice: Choice) -> Iterable[Stretch]:
        step = self._step
        for value in step.inputs_of(self._call):
            place = step.memory_of.get(value)
            if place is None:
                continue
            begin = step.values[value].made
            if not step.may_leave(value):
                end = max([begin, *self._read_by_replays(value), self._needed_until(value)])
            elif choice.paged_inputs and has_rows(step.values[value]) and self._call.asked:
                self._page(self._sent_input(value, place), value)
                end = begin
            elif choice.inputs and step.memories[place].size >= self._least and self._call.asked:
                self.sent.append(self._sent_input(value, place))
                end = begin
            else:
                end = step.memories[place].freed
            yield Stretch(place, begin, max(begin, end))

    def _made_beside(self) -> Iterable[tuple[float, int]]:
        for place, stretches in self._beside.items():
            size = self._step.memories[place].size
            for begin, end in union(stretches):
                yield from [(begin, size), (end, -size)]

    def _workspaces(self) -> Iterable[tuple[float, int]]:
        for number, time in self.replays.all():
            if (size := self._step.workspace[number]) and (number, time) not in self.replays.early:
                yield from [(time, size), (time + JUST / 2, -size)]

    def _passes_ahead(self, operator: int, time: float) -> bool:
        return (operator, time) in self.replays.early and self.replays.is_passing(operator, time)

    def _in_passing_ahead(self) -> Iterable[tuple[float, int]]:
        """Temporary memory of replays ahead. Their timing beside the backward of another region is
        unknown, so their peak counts for the whole time."""
        step, replays = self._step, self.replays
        changes = []
        for number, time in replays.early:
            size = step.workspace[number]
            changes += [(time, size), (time + JUST / 2, -size)]
            for value in step.operators[number].outputs:
                place = step.memory_of.get(value)
                if place is not None and replays.is_passing(number, time):
                    size = step.memories[place].size
                    end = max(self._replayed_until(value, number, time), time + JUST)
                    changes += [(time, size), (end, -size)]
        most, _ = highest([Changes(changes)])
        if most > 0:
            begins = min(time for _, time in replays.early)
            yield from [(begins, most), (self._call.asked[0][0], -most)]

    def _copies_before_writes(self) -> Iterable[tuple[float, int]]:
        """Copies of saved values and inputs that the program overwrites while a replay still needs
        them."""
        step = self._step
        for number in self._call.operators:
            for value in step.operators[number].outputs:
                writer = step.overwritten.get(value)
                if writer is None or number not in self._kept:
                    continue
                used = [one for one in step.readers[value] if one in self.replays]
                if used:
                    size = step.memories[step.memory_of[value]].size
                    asked = [asked for asked, _ in self._call.asked]
                    last = max([self.replays.last(used) + JUST / 2, *asked])
                    yield from [(step.operators[writer].start, size), (last, -size)]

        for copied in step.copied.get(step.call_of[self._call.operators.start], ()):
            used = [one for one in step.readers[copied.value] if one in self.replays]
            if used:
                last = self.replays.last(used) + JUST / 2
                yield from [(copied.taken, copied.size), (last, -copied.size)]

    def _copies_in_passing(self) -> Iterable[tuple[float, int]]:
        """Copies of recomputed values that an operator of ``each_time`` overwrites. A replay
        in passing copies them, since that operator will read them again. The last replay copies
        them only if something else still needs them. See Note [Made each time]."""
        step, runs = self._step, self.replays.runs
        for number in self._each_time & runs.keys():
            for value in step.operators[number].inputs:
                maker = step.maker.get(value)
                if step.overwritten.get(value) != number or maker not in runs:
                    continue
                size = step.memories[step.memory_of[value]].size
                for time in runs[number]:
                    made = max((one for one in runs[maker] if one <= time), default=math.inf)
                    if made == math.inf or self.replays.is_passing(maker, made):
                        continue
                    until = self._replayed_until(value, maker, made)
                    is_needed = until > self.replays.end(number, time)
                    if self.replays.is_passing(number, time) or is_needed:
                        ends = self._last_state_until(number, time)
                        ends = min(ends, until) if is_needed else ends
                        yield from [(time, size), (max(ends, time + JUST), -size)]

    def _copies_before_replayed_writes(self) -> Iterable[tuple[float, int]]:
        """Copies of recomputed values that are still needed when another replay overwrites them.
        That replay writes through a tensor with its own version counter (a chunk of the same
        storage): autograd raises an error for any other write to a saved tensor."""
        step, runs = self._step, self.replays.runs
        for number in runs.keys() - self._each_time:
            for value in step.operators[number].outputs:
                writer = step.overwritten.get(value)
                if writer not in runs or writer in self._each_time:
                    continue
                made, written = runs[number][0], runs[writer][0]
                until = self._replayed_until(value, number, made)
                if until > self.replays.end(writer, written) and written > made:
                    size = step.memories[step.memory_of[value]].size
                    # At `both`, one of the two copies is freed.
                    both = min(until, self._last_state_until(writer, written))
                    yield from [(written, size), (max(written, both), -size)]

    def _last_state_until(self, writer: int | None, time: float) -> float:
        """Until when replays need the result of an operator's run, or results that other
        operators write over it."""
        runs, until = self.replays.runs, 0.0
        while writer in runs:
            time = min((one for one in runs[writer] if one >= time), default=math.inf)
            if time == math.inf:
                break
            for value in self._step.operators[writer].outputs:
                until = max(until, self._replayed_until(value, writer, time))
            writer = self._step.written_over(writer)
        return until

    def _copies_for_replays(self) -> Iterable[tuple[float, int]]:
        """Copies of values that backward unpacks while operators that read them may still be
        recomputed. See Note [Unpacked bytes may be written]."""
        step = self._step
        inputs = [
            (step.values[one].asked, one)
            for one in step.inputs_of(self._call)
            if one not in step.memory_of  # a parameter; computed inputs are not copied
        ]
        for asked, value in [*self._call.asked, *inputs]:
            readers = step.readers[value]
            last = self.replays.last(readers)
            could = last > self._slice_end(value, asked) or any(
                self._could_run(one, asked) for one in readers if one in self._kept
            )
            if asked >= 0 and could:
                size = step.values[value].memory
                again = step.maker.get(value) in self.replays.runs
                ends = max(step.needed_until[value], last if again else 0.0)
                yield from [(asked, size), (ends, -size)]

    def _slice_end(self, value: int, asked: float) -> float:
        """When the replays end that backward waits for when it unpacks a value."""
        maker = self._step.maker.get(value)
        if maker not in self.replays.runs or maker in self._each_time:
            return asked
        return max(asked, self.replays.end(maker, self.replays.runs[maker][0]))

    def _could_run(self, operator: int, time: float) -> bool:
        """True if a saved operator's recipe still exists. The region's end drops the recipe, unless
        the program holds one of the operator's results."""
        step, call = self._step, self._call
        if operator in self._stays or operator not in call.operators:
            return False
        outputs = step.operators[operator].outputs
        if operator in self._paging and all(has_rows(step.values[value]) for value in outputs):
            return False  # a value in a pool needs no recipe
        saved = [value for value in outputs if step.needed_until.get(value, -1.0) > time]
        has_it = any(step.let_go(value) > call.ends for value in outputs)
        return bool(saved) and has_it


def kept_in_the_end(step: Step, kept: set[int], stays: set[int]) -> set[int]:
    """Operators whose results are saved in the end. If an operator overwrites a saved value, its
    result is saved instead; a value that can be recomputed is not copied. See
    Note [A write into a saved value] and Note [Copy on write]."""
    found = set(kept)
    for number in sorted(kept - stays):
        while (writer := step.written_over(number)) is not None:
            if len(step.operators[number].outputs) == 1:  # else other outputs are still saved
                found.discard(number)
            found.add(writer)
            number = writer
    return found | stays


class Rows:
    """Effects of paging: padding rows come back with other contents. See Note [Rows].

    Attributes:
        stays: operators whose results must stay in memory because of that.
    """

    def __init__(self, step: Step, call: Call, choice: Choice) -> None:
        self.stays: set[int] = set()
        self._lossy: set[int] = set()
        if not choice.pages:
            return
        if choice.paged_inputs:
            inputs = (value for value in step.inputs_of(call) if value in step.memory_of)
            self._lossy.update(value for value in inputs if has_rows(step.values[value]))
        for number in call.operators:
            operator = step.operators[number]
            looks = operator.reads_rows or operator.inplace  # an in-place write may be partial
            reads = looks and not self._lossy.isdisjoint(operator.inputs)
            if reads or number - call.operators.start in choice.paged:
                self._made(step, number, reads)

    def _made(self, step: Step, number: int, reads: bool) -> None:
        for value in step.operators[number].outputs:
            about = step.values[value]
            if about.live_rows > 0:
                self._lossy.add(value)
            if about.rows_mixed or (reads and about.live_rows == 0):
                self.stays.add(number)


def plain_stretches(step: Step, call: Call) -> Iterable[Stretch]:
    """Memory that a block needs in eager."""
    for number in call.operators:
        for value in step.operators[number].outputs:
            place = step.memory_of.get(value)
            if place is not None:
                memory, about = step.memories[place], step.values[value]
                end = step.needed_until[value] if about.saved else memory.taken
                yield Stretch(place, memory.taken, max(end, step.let_go(value)))
    for value in step.inputs_of(call):
        place = step.memory_of.get(value)
        if place is not None:
            about = step.values[value]
            end = step.needed_until[value] if about.saved else about.made
            if step.may_leave(value):
                end = step.memories[place].freed
            yield Stretch(place, about.made, end)
