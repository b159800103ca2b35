"""What a step would take and hold if other results were kept."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ebb._plan.changes import Changes, curve, highest, union
from ebb._plan.measured import Measured
from ebb._plan.step import JUST, Call, Step

Saved = frozenset[int]
"""Of a region: the operators whose results are kept, counted from its first one."""

PLAIN = None
"""In place of that: the block is no region at all."""

_RECORDING = 0.001  # milliseconds for an operator, where it was not measured
_SLOWEST = 0.1  # milliseconds that a replay may take beside its kernel


@dataclass(frozen=True)
class Stretch:
    """A time in which one memory (its place in ``Step.memories``) is needed."""

    memory: int
    begin: float
    end: float


@dataclass(frozen=True)
class CallEstimate:
    """What one region comes to.

    Attributes:
        own: when memory is taken and given back that no other region knows.
        shared: when it needs which memory that others know too.
        replays: how many operators run again.
        kernels: the time of their kernels in forward.
        replaying: milliseconds that they take.
        recording: milliseconds that its operators take more than outside of regions.
        held: bytes that it holds when forward ends, and plain eager would not hold for others.
    """

    own: Changes
    shared: tuple[Stretch, ...]
    replays: int
    kernels: float
    replaying: float
    recording: float
    held: int

    @property
    def added(self) -> float:
        """Milliseconds that it adds to the plain step."""
        return self.replaying + self.recording


@dataclass(frozen=True)
class Estimate:
    """What a step comes to.

    Attributes:
        peak: the most bytes at a time, of those that the step allocates.
        duration: in milliseconds.
        replays: how many operators run again.
        peaks_at: when the peak is, in milliseconds of the step in which all is kept.
    """

    peak: int
    duration: float
    replays: int
    peaks_at: float


class Simulator:
    """Tells what other choices of what to keep would cost.

    Attributes:
        step: what is simulated.
        recording: milliseconds that an operator costs because it is in a region.
        plain: the step without regions.

    Args:
        measured: of a step.
        ahead: whether the region that comes next is replayed meanwhile.

    """

    def __init__(self, measured: Measured, ahead: bool = False) -> None:
        self.step = Step(measured.profile)
        self._ahead = ahead
        self._factor, self._each = 1.0, 0.0
        self._rest = Changes(self.step.rest)
        self._of_call = functools.cache(self._estimate_call)
        self.recording, replaying = self._shares(measured)
        recording = self.recording * len(self.step.operators)
        predicted = max(measured.duration - replaying - recording, 0.0)
        self._plain = predicted if measured.plain is None else measured.plain
        everything = [self.of_call(call, frozenset()) for call in range(len(self.step.calls))]
        self._measure_replays(
            replaying,
            sum(one.kernels for one in everything),
            sum(one.replays for one in everything),
        )
        self._of_call.cache_clear()
        self.plain = self.estimate([PLAIN] * len(self.step.calls))

    def _shares(self, measured: Measured) -> tuple[float, float]:
        """What recording adds to each operator, and what replays take in all."""
        operators = max(1, len(self.step.operators))
        if measured.plain is None:
            return _RECORDING, self.step.replaying
        if measured.kept is None:
            replaying = min(self.step.replaying, max(0.0, measured.duration - measured.plain))
            return max(0.0, measured.duration - measured.plain - replaying) / operators, replaying
        recording = max(0.0, measured.kept - measured.plain)
        return recording / operators, max(0.0, measured.duration - measured.plain - recording)

    def estimate(self, saved: Sequence[Saved | None]) -> Estimate:
        """What the step takes.

        Args:
            saved: for each of ``step.calls``, what is kept, or ``PLAIN``.
        """
        calls = self._of_calls(saved)
        peak, when = highest(self._changes(calls))
        added = self._added(calls, saved)
        return Estimate(peak, self._plain + added, sum(one.replays for one in calls), when)

    def timeline(self, saved: Sequence[Saved | None]) -> list[tuple[float, int]]:
        """Bytes that the step has allocated, from each time on, in milliseconds of the profile.

        Args:
            saved: as for `estimate`.
        """
        times, now = curve(self._changes(self._of_calls(saved)))
        return list(zip(times.tolist(), now.tolist(), strict=True))

    def of_call(self, call: int, saved: Saved | None) -> CallEstimate:
        """What one region comes to, if all are regions."""
        later = range(call + 1, len(self.step.calls)) if self._ahead else ()
        return self._of_call(call, saved, next(filter(self._is_met, later), None))

    def _of_calls(self, saved: Sequence[Saved | None]) -> list[CallEstimate]:
        found = []
        later = None  # the region that backward comes to before
        for number in reversed(range(len(saved))):
            found.append(self._of_call(number, saved[number], later if self._ahead else None))
            if saved[number] is not PLAIN and self._is_met(number):
                later = number
        return found[::-1]

    def _is_met(self, call: int) -> bool:
        """Whether backward comes by."""
        return bool(self.step.calls[call].asked)

    def replayed(self, call: int, saved: Saved) -> set[int]:
        """The operators of a region that run again."""
        first = self.step.calls[call].operators.start
        return set(self._replays(call, self._kept({first + one for one in saved}), None))

    def held_at(self, call: int, saved: Saved | None, time: float) -> int:
        """Bytes that a region needs at a time."""
        found = self.of_call(call, saved)
        return found.own.at(time) + sum(
            self.step.memories[memory].size
            for memory in {one.memory for one in found.shared if one.begin <= time < one.end}
        )

    def replay_time(self, operator: int) -> float:
        """Milliseconds that running an operator again takes."""
        return self.step.operators[operator].runtime * self._factor + self._each

    def _measure_replays(self, took: float, kernels: float, replays: int) -> None:
        """From the step in which all was recomputed: what a replay costs beside its kernel, or
        which share of the time it takes that the kernel took in forward."""
        if replays == 0:
            return
        if took >= kernels:
            self._each = min((took - kernels) / replays, _SLOWEST)
        elif kernels > 0:
            self._factor = max(took / kernels, 0.25)

    def _added(self, calls: Sequence[CallEstimate], saved: Sequence[Saved | None]) -> float:
        if not self._ahead:
            return sum(one.added for one in calls)
        added = 0.0
        later = None  # the region that backward comes to before
        for number in reversed(range(len(calls))):
            one, call = calls[number], self.step.calls[number]
            meanwhile = 0.0
            if later is not None and call.asked:
                meanwhile = self.step.working(later.asked[0][0], call.asked[0][0])
            if call.asked and saved[number] is not PLAIN:
                later = call
            added += one.added - min(one.replaying, max(0.0, meanwhile))
        return added

    def _changes(self, calls: Sequence[CallEstimate]) -> list[Changes]:
        needed: dict[int, list[tuple[float, float]]] = {
            place: [(memory.taken, memory.freed)]
            for place, memory in enumerate(self.step.memories)
            if self.step.is_shared(place) and not memory.is_ours
        }
        for one in calls:
            for stretch in one.shared:
                needed.setdefault(stretch.memory, []).append((stretch.begin, stretch.end))
        shared = Changes(self._changes_of(needed))
        return [self._rest, shared, *(one.own for one in calls)]

    def _changes_of(
        self, needed: Mapping[int, list[tuple[float, float]]]
    ) -> Iterable[tuple[float, int]]:
        for place, stretches in needed.items():
            size = self.step.memories[place].size
            for begin, end in union(stretches):
                yield from [(begin, size), (end, -size)]

    def _split(
        self, stretches: list[Stretch], copies: Iterable[tuple[float, int]]
    ) -> tuple[Changes, tuple[Stretch, ...]]:
        own: dict[int, list[tuple[float, float]]] = {}
        shared = []
        for one in stretches:
            if self.step.is_shared(one.memory):
                shared.append(one)
                continue
            memory = self.step.memories[one.memory]
            if one.memory not in own:
                own[one.memory] = [] if memory.is_ours else [(memory.taken, memory.freed)]
            own[one.memory].append((one.begin, one.end))
        return Changes([*self._changes_of(own), *copies]), tuple(shared)

    def _estimate_call(self, number: int, saved: Saved | None, later: int | None) -> CallEstimate:
        call = self.step.calls[number]
        if saved is PLAIN:
            found = list(self._plain_stretches(call))
            return CallEstimate(*self._split(found, ()), 0, 0.0, 0.0, 0.0, self._held(call, found))
        if self._ahead and later is None:
            saved = frozenset(range(len(call.operators)))  # is not given up before backward comes
        kept = self._kept({call.operators.start + one for one in saved})
        needed = self._needed(call, kept)
        replayed_at = self._replays(number, kept, later)
        ends = _ends_of_slices(replayed_at)
        lasting = self._lasting(call, kept, replayed_at)
        stretches = list(self._stretches(call, kept, needed, replayed_at, ends))
        stretches += self._stretches_of_lasting(kept, lasting)
        kernels = sum(self.step.operators[one].runtime for one in replayed_at)
        replaying = kernels * self._factor + len(replayed_at) * self._each
        return CallEstimate(
            *self._split(
                stretches,
                [
                    *self._copies(call, kept, replayed_at),
                    *self._copies_for_replays(call, kept, replayed_at),
                    *self._workspaces(replayed_at),
                ],
            ),
            len(replayed_at),
            kernels,
            replaying,
            self.recording * len(call.operators),
            self._held(call, stretches),
        )

    def _kept(self, saved: set[int]) -> set[int]:
        """The operators whose results are there in the end. Of a kept value that another operator
        writes over, the new state is kept in its place; and what can be made again is not copied.
        See Note [A write into a saved value] and Note [Copy on write]."""
        kept = set(saved)
        for number in sorted(saved - self.step.stays):
            while (writer := self.step.written_over(number)) is not None:
                if len(self.step.operators[number].outputs) == 1:  # else others are there yet
                    kept.discard(number)
                kept.add(writer)
                number = writer
        return kept | self.step.stays

    def _held(self, call: Call, stretches: Iterable[Stretch]) -> int:
        end = call.forward_ends
        there = {one.memory for one in stretches if one.begin <= end < one.end}
        return sum(self.step.memories[one].size for one in there if self.step.memories[one].is_ours)

    def _needed(self, call: Call, kept: set[int]) -> set[int]:
        """The operators that something may have to run again."""
        needed: set[int] = set()
        for number in reversed(call.operators):
            if number in kept:
                continue
            for value in self.step.operators[number].outputs:
                read = any(reader in needed for reader in self.step.readers[value])
                if self.step.values[value].saved or read:
                    needed.add(number)
                    break
        return needed

    def _lasting(
        self, call: Call, kept: set[int], replayed_at: Mapping[int, float]
    ) -> dict[int, float]:
        """The operators that do not run again, and are not forgotten when the region ends, since
        the program has what came of them and may write to it; and until when."""
        found: dict[int, float] = {}
        for number in reversed(call.operators):
            if number in replayed_at:
                continue
            until = []
            for value in self.step.operators[number].outputs:
                if self.step.values[value].saved and self.step.let_go(value) > call.left:
                    until.append(self.step.needed_until[value])
                if number not in kept:
                    until += [found[one] for one in self.step.readers[value] if one in found]
            if until:
                found[number] = max(until)
        return found

    def _stretches_of_lasting(
        self, kept: set[int], lasting: Mapping[int, float]
    ) -> Iterable[Stretch]:
        """What those read, as far as it is there."""
        for number, until in lasting.items():
            for value in self.step.operators[number].inputs:
                place, maker = self.step.memory_of.get(value), self.step.maker.get(value)
                is_there = maker is None or (maker in kept and value not in self.step.overwritten)
                if place is not None and is_there:
                    begin = self.step.values[value].made
                    yield Stretch(place, begin, max(begin, until))

    def _replays(self, call_number: int, kept: set[int], later: int | None) -> dict[int, float]:
        """When each operator that runs again does so.

        Args:
            later: the region that backward comes to before; None: there is none.
        """
        replayed_at: dict[int, float] = {}
        for asked, value in self.step.calls[call_number].asked:
            time = asked
            if self._ahead and later is not None:
                time = min(asked, self.step.calls[later].asked[0][0])
            waiting, found = [self.step.maker[value]], set()
            while waiting:
                number = waiting.pop()
                known = number in replayed_at or number in found or number in kept
                if known or self._is_here(number, asked):
                    continue
                found.add(number)
                waiting += [
                    self.step.maker[one]
                    for one in self.step.operators[number].inputs
                    if one in self.step.maker
                ]
            for place, number in enumerate(sorted(found)):  # one after the other
                replayed_at[number] = time + place * JUST
        return replayed_at

    def _is_here(self, operator: int, time: float) -> bool:
        """Whether the program itself still holds all that it made."""
        return all(self.step.let_go(one) >= time for one in self.step.operators[operator].outputs)

    def _plain_stretches(self, call: Call) -> Iterable[Stretch]:
        for number in call.operators:
            for value in self.step.operators[number].outputs:
                place = self.step.memory_of.get(value)
                if place is not None:
                    memory, about = self.step.memories[place], self.step.values[value]
                    end = self.step.needed_until[value] if about.saved else memory.taken
                    yield Stretch(place, memory.taken, max(end, self.step.let_go(value)))
        yield from self._stretches_of_inputs(call, set(), {})

    def _stretches(
        self,
        call: Call,
        kept: set[int],
        needed: set[int],
        replayed_at: Mapping[int, float],
        ends: Mapping[int, float],
    ) -> Iterable[Stretch]:
        for number in call.operators:
            for value in self.step.operators[number].outputs:
                place = self.step.memory_of.get(value)
                if place is None:
                    continue
                memory, about = self.step.memories[place], self.step.values[value]
                yield Stretch(place, memory.taken, self.step.let_go(value))
                used = [
                    ends[reader]  # a slice of replays holds what was there when it began
                    if ends[reader] != ends.get(number)
                    else replayed_at[reader] + JUST / 2  # its result is there already
                    for reader in self.step.readers[value]
                    if reader in needed and reader in replayed_at
                ]
                until = max([*used, self.step.needed_until[value] if about.saved else about.made])
                if number in kept:
                    if self.step.readers[value]:  # their recipes are there until the region ends
                        until = max(until, call.ends)
                    writer = self.step.overwritten.get(value)
                    written = until if writer is None else self.step.operators[writer].start
                    yield Stretch(place, memory.taken, min(until, written))
                elif number in replayed_at:
                    begin = replayed_at[number]
                    yield Stretch(place, begin, max(until, begin + JUST))
        yield from self._stretches_of_inputs(call, needed, ends)

    def _workspaces(self, replayed_at: Mapping[int, float]) -> Iterable[tuple[float, int]]:
        for number, time in replayed_at.items():
            if size := self.step.workspace[number]:
                yield from [(time, size), (time + JUST / 2, -size)]

    def _copies(
        self, call: Call, kept: set[int], replayed_at: Mapping[int, float]
    ) -> Iterable[tuple[float, int]]:
        """Of kept values that an operator is about to write over, while a replay needs them."""
        for number in call.operators:
            for value in self.step.operators[number].outputs:
                writer = self.step.overwritten.get(value)
                if writer is None or number not in kept:
                    continue
                written = self.step.operators[writer].start
                used = [
                    replayed_at[one] + JUST / 2
                    for one in self.step.readers[value]
                    if one in replayed_at
                ]
                if used:
                    size = self.step.memories[self.step.memory_of[value]].size
                    last = max([*used, *(asked for asked, _ in call.asked)])
                    yield from [(written, size), (last, -size)]

    def _copies_for_replays(
        self, call: Call, kept: set[int], replayed_at: Mapping[int, float]
    ) -> Iterable[tuple[float, int]]:
        """Of what backward gets while operators that read it could yet run again. See
        Note [Unpacked bytes may be written]."""
        inputs = ((self.step.values[one].asked, one) for one in self.step.inputs_of(call))
        for asked, value in [*call.asked, *inputs]:
            readers = self.step.readers[value]
            used = [replayed_at[one] for one in readers if one in replayed_at]
            could = max(used, default=0.0) > asked or any(
                self._could_run(one, asked, call) for one in readers if one in kept
            )
            if asked >= 0 and could:
                size = self.step.values[value].memory
                again = self.step.maker.get(value) in replayed_at
                ends = max([self.step.needed_until[value], *(used if again else ())])
                yield from [(asked, size), (ends, -size)]

    def _could_run(self, operator: int, time: float, call: Call) -> bool:
        """Whether a kept operator is not forgotten: that with one result is when the region ends,
        unless the program has that."""
        if operator in self.step.stays or operator not in call.operators:
            return False
        outputs = self.step.operators[operator].outputs
        saved = [value for value in outputs if self.step.needed_until.get(value, -1.0) > time]
        has_it = any(self.step.let_go(value) > call.ends for value in outputs)
        return bool(saved) and (len(outputs) > 1 or has_it)

    def _stretches_of_inputs(
        self, call: Call, needed: set[int], ends: Mapping[int, float]
    ) -> Iterable[Stretch]:
        for value in self.step.inputs_of(call):
            place = self.step.memory_of.get(value)
            if place is None:
                continue
            about = self.step.values[value]
            used = [
                ends.get(reader, about.made)
                for reader in self.step.readers[value]
                if reader in needed
            ]
            until = max(
                [about.made, *used, self.step.needed_until[value] if about.saved else about.made]
            )
            yield Stretch(place, about.made, until)


def _ends_of_slices(replayed_at: Mapping[int, float]) -> dict[int, float]:
    """When what runs again with an operator, one right after the other, has run."""
    found: dict[int, float] = {}
    later = end = math.inf
    for number, time in sorted(replayed_at.items(), key=lambda one: -one[1]):
        if later - time > 1.5 * JUST:
            end = time + JUST / 2
        found[number], later = end, time
    return found
