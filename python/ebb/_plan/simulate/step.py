"""Facts about a step. In: a profile in which everything was recomputed. Out: a `Step`.

The profile shows which memory the program itself holds. It also shows what autograd would hold: a
saved value is needed until autograd frees its recomputed memory. So ebb never has to run a step
that saves more, which may not fit into memory.
"""

from __future__ import annotations

import bisect
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from ebb._plan.profile.profile import Profile
from ebb._plan.simulate.changes import Changes, Span, during, union
from ebb._plan.simulate.dataflow import EPSILON, Dataflow

Allocation = tuple[float, float, int]
"""When memory was allocated and freed, and its bytes."""


def _matched(events: Sequence[tuple[float, int]]) -> Iterable[Allocation]:
    """Match the allocations at one address with their frees."""
    begin, size = None, 0
    for time, change in events:
        if change > 0:
            begin, size = time, change
        elif begin is not None:
            yield begin, time, size
            begin = None
    if begin is not None:
        yield begin, math.inf, size


class Allocations:
    """The allocations of a step."""

    def __init__(self, profile: Profile) -> None:
        events: dict[int, list[tuple[float, int]]] = defaultdict(list)
        for time, address, size in profile.allocations:
            events[address].append((time, size))
        self.by_address = {address: list(_matched(of_one)) for address, of_one in events.items()}
        self.begins = sorted(  # time and bytes of each allocation
            (begin, size) for of_one in self.by_address.values() for begin, _, size in of_one
        )
        # frees of memory that was allocated before the step
        self.of_older = [of_one[0] for of_one in events.values() if of_one[0][1] < 0]

    def find(self, address: int, time: float) -> Allocation | None:
        """The allocation of an address at a time."""
        of_one = self.by_address.get(address, [])
        index = bisect.bisect_right(of_one, (time, math.inf, 0)) - 1
        return of_one[index] if index >= 0 and of_one[index][1] >= time else None


@dataclass
class Memory:
    """A block of memory allocated in forward that a region made, wrote or read."""

    size: int
    allocated: float
    freed: float  # by the program, or by autograd if no region allocated it
    in_region: bool  # True if an operator of a region allocated it


def changes_of(step: Step, needed: Mapping[int, list[Span]]) -> Iterable[tuple[float, int]]:
    """Allocations and frees of memories that are needed for these times."""
    for memory, spans in needed.items():
        for begin, end in union(spans):
            yield from during(begin, end, step.memories[memory].size)


class Step(Dataflow):
    """A recorded step, with its memory. Memories are numbered, too.

    Args:
        recorded: the step with a region for each block, from which this one is derived.
        released: values, and when the program releases them at the latest.
    """

    def __init__(
        self,
        profile: Profile,
        around: Mapping[int, str] | None = None,
        recorded: Step | None = None,
        released: Iterable[tuple[int, float]] = (),
    ) -> None:
        super().__init__(profile, around or {})
        allocations = Allocations(profile)
        self.memories: list[Memory] = []
        self.memory_of: dict[int, int] = {}  # of a value; no entry if it is older than the step
        # By call: copies of inputs that ebb made before the program overwrote the inputs. Each is
        # the input, when memory for its copy was allocated, and the bytes.
        self.copied: dict[int, list[tuple[int, float, int]]] = defaultdict(list)
        # When memory that is not in `memories` is allocated and freed.
        self.rest = Changes(self._find_memories(allocations, recorded))
        # When autograd frees a saved value: resident bytes, and recomputed bytes. See Note [Given
        # up when unpacked].
        self.needed_until, self.replayed_until = self._find_needs(allocations)
        # Bytes that an operator needs while it runs, beside its results.
        self.workspace = self._find_workspaces(allocations)
        for value, time in released:
            memory = self.memories[self.memory_of[value]]
            memory.freed = max(memory.allocated, min(memory.freed, time))

    @cached_property
    def _users(self) -> dict[int, set[int]]:
        """Calls that use a memory."""
        users: dict[int, set[int]] = defaultdict(set)
        for op, operator in enumerate(self.operators):
            for value in (*operator.inputs, *operator.outputs):
                if value in self.memory_of:
                    users[self.memory_of[value]].add(self.call_of[op])
        return users

    @cached_property
    def shared(self) -> set[int]:
        """Memories that several regions use."""
        return {memory for memory, calls in self._users.items() if len(calls) > 1}

    @cached_property
    def saved_inputs(self) -> set[int]:
        """Memories that autograd needs as inputs of regions, so no policy frees them."""
        return {
            memory
            for value, memory in self.memory_of.items()
            if value not in self.maker and self.values[value].saved
        }

    @cached_property
    def _offloadable(self) -> dict[int, float]:
        """Memories that only one region reads, apart from the region that made them, and that the
        program released before backward; with the time of the release."""
        offloadable = {}
        for value, memory in self.memory_of.items():
            record = self.values[value]
            if value in self.maker or not record.saved or record.let_go < 0:
                continue
            if len(self._users[memory]) == 1 + self.memories[memory].in_region:
                offloadable[memory] = self.input_released(value)
        return offloadable

    def released(self, value: int) -> float:
        """When the program itself releases a value."""
        memory = self.memory_of.get(value)
        return math.inf if memory is None else self.memories[memory].freed

    def may_offload(self, value: int) -> bool:
        """True if a policy may offload the value as a region's input, and that frees memory."""
        return self.memory_of.get(value) in self._offloadable and value not in self.maker

    def held_until(self, memory: int) -> float:
        """Until when the program itself holds a memory, as far as that is known."""
        return self._offloadable.get(memory, self.memories[memory].freed)

    @cached_property
    def resident_until(self) -> list[float]:
        """Until when the program still holds all results of an operator, and nothing has
        overwritten them."""
        return [
            -math.inf
            if self.overwriter_of(op) is not None
            else min(map(self.released, operator.outputs), default=math.inf)
            for op, operator in enumerate(self.operators)
        ]

    def program_spans(self, index: int) -> list[Span]:
        """When the program itself holds a memory that no region made; empty for other memories."""
        memory = self.memories[index]
        if memory.in_region:
            return []
        return [(memory.allocated, max(memory.allocated, self.held_until(index)))]

    def overwriter_of(self, op: int) -> int | None:
        """The operator of the same region that overwrites a result of this one, or None."""
        writers = (self.overwritten.get(value) for value in self.operators[op].outputs)
        return next((writer for writer in writers if writer is not None), None)

    def later_writers(self, op: int) -> list[int]:
        """The operators of the same region that overwrite the result of this one, in order."""
        writers = []
        while (writer := self.overwriter_of(op)) is not None:
            writers.append(writer)
            op = writer
        return writers

    def _find_memories(
        self, allocations: Allocations, recorded: Step | None
    ) -> list[tuple[float, int]]:
        known: dict[tuple[int, float], int] = {}  # memory, by its address and begin
        for value, record in enumerate(self.values):
            allocation = allocations.find(record.address, record.made)
            if record.memory == 0 or allocation is None or self.is_replay(allocation[0]):
                continue
            begin, end, size = allocation
            if (record.address, begin) not in known:
                known[record.address, begin] = len(self.memories)
                self.memories.append(Memory(size, begin, end, value in self.maker))
            self.memory_of[value] = known[record.address, begin]
        self._shorten_by_regions()
        rest = []
        self._copies: set[float] = recorded._copies if recorded else self._find_copies(allocations)
        copies = self._copies | self._find_copies_before_writes(allocations)
        for address, of_one in allocations.by_address.items():
            for begin, end, size in of_one:
                is_known = (address, begin) in known or begin in copies
                if not is_known and not self.is_replay(begin):
                    rest += during(begin, end, size)
        return rest + allocations.of_older

    def _find_copies(self, allocations: Allocations) -> set[float]:
        """When ebb copied a value that later replays read. See Note [Unpacked bytes may be
        written]."""
        begins = allocations.begins
        copies = set()
        # When backward gets the values that it unpacks at a time: see Note [Saved by one node].
        given: dict[float, float] = defaultdict(float)
        for value, record in enumerate(self.values):
            made = self.operators[self.maker[value]].outputs if value in self.maker else [value]
            again = max(self.values[output].again for output in made)
            given[record.asked] = max(given[record.asked], record.asked, again)
        for value, record in enumerate(self.values):
            replayed = (
                self.values[output].again
                for reader in self.readers[value]
                for output in self.operators[reader].outputs
            )
            is_computed_input = value not in self.maker and value in self.memory_of
            if is_computed_input or record.asked < 0:
                continue  # ebb does not copy an input that an operator computed: autograd holds it
            if max(replayed, default=-1.0) <= given[record.asked]:
                continue
            index = bisect.bisect_left(begins, (max(record.asked, record.again), 0))
            while index < len(begins) and self.is_replay(begins[index][0]):
                index += 1
            if index < len(begins) and begins[index][1] == record.memory:
                copies.add(begins[index][0])
        return copies

    def _find_copies_before_writes(self, allocations: Allocations) -> set[float]:
        """When ebb copied an input that the program overwrote, for replays of operators that ran
        before the write."""
        begins = allocations.begins
        states: dict[int, list[int]] = defaultdict(list)  # values by address
        for value, record in enumerate(self.values):
            if self.readers[value]:
                states[record.address].append(value)
        copies = set()
        for record in self.values:
            if record.fate != "copied":
                continue
            before = [v for v in states[record.address] if self.values[v].made < record.made]
            index = bisect.bisect_left(begins, (record.made, 0)) - 1
            if not before or index < 0 or begins[index][1] < record.memory:
                continue
            original = max(before, key=lambda value: self.values[value].made)
            call = self.call_of[self.readers[original][0]]
            self.copied[call].append((original, *begins[index]))
            copies.add(begins[index][0])
        return copies

    def _shorten_by_regions(self) -> None:
        """Shorten the lives of memories that only regions still held, for recomputation, after the
        program had released them."""
        outside: dict[int, list[int]] = defaultdict(list)
        for value, memory in self.memory_of.items():
            # torch dispatches torch.rand(3) past ebb, because it has no tensor argument. ebb sees
            # only the uniform_ that fills the storage, so the storage counts as made outside of the
            # region. The value before that write is unneeded, but has the same memory.
            record = self.values[value]
            is_before = record.fate == "unneeded" and record.let_go < 0
            if (value not in self.maker and not is_before) or record.fate == "outside":
                outside[memory].append(value)
        for index, values in outside.items():
            releases = [self.values[value].let_go for value in values]
            if min(releases) >= 0 and not any(self.values[value].saved for value in values):
                last = max(releases)
                if all(value in self.maker for value in values):  # the region's own memory
                    call = self.calls[self.call_of[self.maker[values[-1]]]]
                    last = min(last, call.next_allocation)
                shortened = self.memories[index]
                shortened.freed = min(shortened.freed, last - EPSILON)

    def _find_needs(self, allocations: Allocations) -> tuple[dict[int, float], dict[int, float]]:
        needed_until, replayed_until = {}, {}
        for value, record in enumerate(self.values):
            if not record.saved:
                continue
            again = allocations.find(record.again_address, record.again)  # None at time -1
            if again is not None:
                until = again[1]
            elif record.asked >= 0:
                until = self.released(value)
            else:  # autograd released the value before anything unpacked it
                until = record.ended if record.ended >= 0 else self.duration
            replayed_until[value] = until
            needed_until[value] = until if again is None else max(until, record.ended)
        return needed_until, replayed_until

    def _find_workspaces(self, allocations: Allocations) -> list[int]:
        known = {(memory.allocated, memory.freed) for memory in self.memories}
        others = sorted(
            allocation
            for of_one in allocations.by_address.values()
            for allocation in of_one
            if allocation[:2] not in known
        )
        workspaces = []
        for op, operator in enumerate(self.operators):
            ends = self.end_of(op)
            changes = []
            first = bisect.bisect_left(others, (operator.start, 0.0, 0))
            last = bisect.bisect_right(others, (ends, ends, sys.maxsize), first)
            for begin, end, size in others[first:last]:
                if end <= ends:
                    changes += during(begin, end, size)
            workspaces.append(max(accumulate((size for _, size in sorted(changes)), initial=0)))
        return workspaces

    @cached_property
    def overwritten(self) -> dict[int, int]:
        """The operator of the same region that overwrites a value."""
        overwritten = {}
        last: dict[tuple[int, int], int] = {}  # the latest value, by memory and region
        for op, operator in enumerate(self.operators):
            for value in operator.outputs:
                if value not in self.memory_of:
                    continue
                key = self.memory_of[value], self.call_of[op]
                before = last.get(key)
                if before is not None and self.maker[before] != op:
                    overwritten[before] = op
                last[key] = value
        return overwritten
