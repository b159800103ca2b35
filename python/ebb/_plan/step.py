"""A step as the simulator needs it, from a profile in which everything was recomputed.

The profile shows which memory the program itself holds. It also shows what autograd would hold: a
saved value is needed until autograd frees its recomputed memory. So ebb never has to run a step
that saves more, which may not fit into memory.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ebb._plan.allocations import Allocations
from ebb._plan.profile import Profile

JUST = 1e-9  # the shortest time, in milliseconds


@dataclass
class Memory:
    """A block of memory allocated in forward that a region made, wrote or read.

    Attributes:
        size: in bytes.
        taken: when it was allocated.
        freed: when the program freed it, or autograd if no region made it.
        is_ours: True if an operator of a region allocated it.
    """

    size: int
    taken: float
    freed: float
    is_ours: bool


@dataclass(frozen=True)
class Copied:
    """A copy of an input that ebb made before the program overwrote the input.

    Attributes:
        value: the input.
        taken: when the copy was allocated.
        size: in bytes.
    """

    value: int
    taken: float
    size: int


@dataclass
class Call:
    """A call of an outermost region.

    Attributes:
        region: its name.
        operators: range of its operators' indices.
        begins: when it began.
        ends: when it ended.
        left: the program's first allocation after its end. Only the region held what was freed
            before that.
        asked: when backward unpacked a value of the region, and which value; in order.
        forward_ends: just before backward next unpacks a value of any region.
    """

    region: str
    operators: range
    begins: float
    ends: float
    left: float = math.inf
    asked: list[tuple[float, int]] = field(default_factory=list)
    forward_ends: float = 0.0


class Step:
    """A recorded step. Each member is one fact about operators or values.

    Attributes:
        profile: the source of all data.
        operators, values, duration: from the profile.
        maker: the operator that made a value; no entry for values from outside of regions.
        readers: operators that read a value.
        calls: calls of outermost regions, in order.
        call_of: for each operator, the index of its call in ``calls``.
        memories: see :class:`Memory`.
        memory_of: index in ``memories`` of a value's memory; no entry if the memory is older than
            the step.
        needed_until: when autograd no longer needs a saved value.
        stays: operators whose results no policy frees.
        workspace: bytes that an operator needs while it runs, beside its results.
        overwritten: the operator of the same region that overwrites a value.
        rest: times and bytes of all other memory, allocated or freed.
        forward_ends: just before backward first unpacks a value.
        copied: by index in ``calls``, see :class:`Copied`.
        replaying: milliseconds of all replays.

    Args:
        profile: of a step whose regions are under ``ebb.policies.recompute_all``.
        around: names of regions around other regions, by ``Operator.call``.
        recorded: the step with a region for each block, from which this one is derived.
    """

    def __init__(
        self,
        profile: Profile,
        around: Mapping[int, str] | None = None,
        recorded: Step | None = None,
    ) -> None:
        self.profile = profile
        self._around = around or {}
        self._copies: set[float] | None = recorded._copies if recorded else None
        self.operators, self.values = profile.operators, profile.values
        self.duration = profile.duration
        self.maker = {
            value: number for number, one in enumerate(self.operators) for value in one.outputs
        }
        self.readers: dict[int, list[int]] = defaultdict(list)
        for number, one in enumerate(self.operators):
            for value in dict.fromkeys(one.inputs):
                self.readers[value].append(number)
        asked = [one.asked for one in self.values if one.asked >= 0]
        self.forward_ends = min(asked, default=self.duration) - JUST
        self._replays = sorted((start, took) for _, start, took in profile.replays)
        self.replaying = sum(took for _, took in self._replays)
        self.calls, self.call_of = self._find_calls()
        self.stays = {
            number
            for number, one in enumerate(self.operators)
            if not one.replayable or any(self.values[value].fate == "kept" for value in one.outputs)
        }
        allocations = Allocations(profile)
        taken = sorted(time for time, _, size in profile.allocations if size > 0)
        for call in self.calls:
            after = bisect.bisect_right(taken, call.ends)
            call.left = taken[after] if after < len(taken) else self.duration
        self.memories: list[Memory] = []
        self.memory_of: dict[int, int] = {}
        self.rest = self._find_memories(allocations)
        self.needed_until = self._find_needs(allocations)
        self.workspace = self._find_workspaces(allocations)
        self.overwritten = self._find_overwritten()
        self._inputs = self._find_inputs()
        self._shared = self._find_shared()
        self._held = {
            place
            for value, place in self.memory_of.items()
            if value not in self.maker and self.values[value].saved
        }
        self._leaving = self._find_leaving()

    def inputs_of(self, call: Call) -> Sequence[int]:
        """Values that a region reads and did not make."""
        return self._inputs[self.call_of[call.operators.start]]

    def names_of(self, call: int) -> Sequence[tuple[str, int]]:
        """For each operator of a region: its name, and which call of that name it is, from 1."""
        counts: Counter[str] = Counter()
        found = []
        for number in self.calls[call].operators:
            name = self.operators[number].func_name
            counts[name] += 1
            found.append((name, counts[name]))
        return found

    def is_shared(self, memory: int) -> bool:
        """True if several regions use the memory."""
        return memory in self._shared

    def is_held(self, memory: int) -> bool:
        """True if autograd needs the memory as an input of a region, so no policy frees it."""
        return memory in self._held

    def let_go(self, value: int) -> float:
        """When the program itself releases a value."""
        place = self.memory_of.get(value)
        return math.inf if place is None else self.memories[place].freed

    def may_leave(self, value: int) -> bool:
        """True if a policy may offload the value as a region's input, and that frees memory."""
        place = self.memory_of.get(value)
        return place in self._leaving and value not in self.maker

    def program_has(self, value: int) -> float:
        """Until when the program itself holds a value, as far as that is known."""
        place = self.memory_of.get(value, -1)
        return self._leaving.get(place, self.let_go(value))

    def inner_region(self, operator: int) -> str | None:
        """Name of the operator's inner region; None: there is none."""
        name = self.operators[operator].region
        return None if name == self.calls[self.call_of[operator]].region else name

    def gave_up(self, value: int) -> float:
        """When the program released an input of a region. ebb notices that only when the next
        region begins or backward unpacks a value; in the latter case the release was earlier."""
        let_go = self.values[value].let_go
        made = self.values[value].made
        since = [call for call in self.calls if made < call.ends <= let_go]
        return min([let_go, *(call.forward_ends for call in since)])

    def give_up(self, value: int, time: float) -> None:
        """Shorten the life of a value: the program releases it at this time at the latest."""
        memory = self.memories[self.memory_of[value]]
        memory.freed = max(memory.taken, min(memory.freed, time))

    def outside(self, place: int) -> tuple[float, float]:
        """When the program itself holds a memory that no region made."""
        memory = self.memories[place]
        return memory.taken, max(memory.taken, self._leaving.get(place, memory.freed))

    def written_over(self, operator: int) -> int | None:
        """The operator of the same region that overwrites a result of this one, or None."""
        found = (self.overwritten.get(value) for value in self.operators[operator].outputs)
        return next((writer for writer in found if writer is not None), None)

    def working(self, begin: float, end: float) -> float:
        """Milliseconds between two times without those of replays."""
        first = bisect.bisect_left(self._replays, (begin, 0.0))
        last = bisect.bisect_left(self._replays, (end, 0.0))
        return end - begin - sum(took for _, took in self._replays[first:last])

    def end_of(self, operator: int) -> float:
        """When an operator has ended."""
        one = self.operators[operator]
        return max([one.start, *(self.values[value].made for value in one.outputs)])

    def _find_calls(self) -> tuple[list[Call], list[int]]:
        calls: list[Call] = []
        call_of = []
        known: dict[int, int] = {}
        for number, one in enumerate(self.operators):
            if one.call not in known:
                known[one.call] = len(calls)
                name = self._around.get(one.call, one.region)
                calls.append(Call(name, range(number, number), one.start, 0.0))
            call = calls[known[one.call]]
            call.operators = range(call.operators.start, number + 1)
            call.ends = self.end_of(number) + JUST
            call_of.append(known[one.call])
        for value, about in enumerate(self.values):
            if about.asked >= 0 and value in self.maker:
                calls[call_of[self.maker[value]]].asked.append((about.asked, value))
        times = sorted(one.asked for one in self.values if one.asked >= 0)
        for call in calls:
            call.asked.sort()
            later = bisect.bisect_right(times, call.ends)
            call.forward_ends = (times[later] if later < len(times) else self.duration) - JUST
        return calls, call_of

    def _find_memories(self, allocations: Allocations) -> list[tuple[float, int]]:
        places: dict[tuple[int, float], int] = {}
        self.copied: dict[int, list[Copied]] = defaultdict(list)
        for value, about in enumerate(self.values):
            stretch = allocations.stretch(about.address, about.made)
            if about.memory == 0 or stretch is None or allocations.is_replay(stretch[0]):
                continue
            taken, freed, size = stretch
            if (about.address, taken) not in places:
                places[about.address, taken] = len(self.memories)
                self.memories.append(Memory(size, taken, freed, value in self.maker))
            self.memory_of[value] = places[about.address, taken]
        self._shorten_by_regions()
        rest = []
        if self._copies is None:
            self._copies = self._find_copies(allocations)
        copies = self._copies | self._find_copies_before_writes(allocations)
        for address, stretches in allocations.all():
            for taken, freed, size in stretches:
                ours = (address, taken) in places or taken in copies
                if not ours and not allocations.is_replay(taken):
                    rest += [(taken, size), (freed, -size)]
        return rest + allocations.of_older

    def _find_copies(self, allocations: Allocations) -> set[float]:
        """When ebb copied a value that later replays read. See Note [Unpacked bytes may be
        written]."""
        times = allocations.taken
        found = set()
        for value, about in enumerate(self.values):
            later = (
                self.values[made].again
                for reader in self.readers[value]
                for made in self.operators[reader].outputs
            )
            is_computed_input = value not in self.maker and value in self.memory_of
            if is_computed_input or about.asked < 0 or max(later, default=-1.0) <= about.asked:
                continue  # autograd itself holds an input that an operator computed: no copy
            place = bisect.bisect_left(times, (max(about.asked, about.again), 0))
            if place < len(times) and times[place][1] == about.memory:
                found.add(times[place][0])
        return found

    def _find_copies_before_writes(self, allocations: Allocations) -> set[float]:
        """When ebb copied an input that the program overwrote, for replays of operators that ran
        before the write."""
        times = allocations.taken
        states: dict[int, list[int]] = defaultdict(list)
        for value, about in enumerate(self.values):
            if self.readers[value]:
                states[about.address].append(value)
        found = set()
        for about in self.values:
            if about.fate != "copied":
                continue
            before = [v for v in states[about.address] if self.values[v].made < about.made]
            place = bisect.bisect_left(times, (about.made, 0)) - 1
            if not before or place < 0 or times[place][1] < about.memory:
                continue
            original = max(before, key=lambda value: self.values[value].made)
            taken, size = times[place]
            call = self.call_of[self.readers[original][0]]
            self.copied[call].append(Copied(original, taken, size))
            found.add(taken)
        return found

    def _shorten_by_regions(self) -> None:
        """Shorten memories that only regions held at last, since they recompute: the program had
        released them earlier."""
        outside: dict[int, list[int]] = defaultdict(list)
        for value, place in self.memory_of.items():
            # In a region, torch.rand(3) fills a storage made outside of it. The value before that
            # write is unneeded, but has the same memory.
            about = self.values[value]
            is_before = about.fate == "unneeded" and about.let_go < 0
            if (value not in self.maker and not is_before) or about.fate == "outside":
                outside[place].append(value)
        for place, values in outside.items():
            let_go = max(self.values[value].let_go for value in values)
            is_known = min(self.values[value].let_go for value in values) >= 0
            if is_known and not any(self.values[value].saved for value in values):
                if all(value in self.maker for value in values):  # the region's own memory
                    let_go = min(let_go, self.calls[self.call_of[self.maker[values[-1]]]].left)
                memory = self.memories[place]
                memory.freed = min(memory.freed, let_go - JUST)

    def _find_needs(self, allocations: Allocations) -> dict[int, float]:
        found = {}
        for value, about in enumerate(self.values):
            if not about.saved:
                continue
            again = None
            if about.again >= 0:
                again = allocations.stretch(about.again_address, about.again)
            if again is not None:
                found[value] = again[1]
            elif about.asked >= 0:
                found[value] = self.let_go(value)
            else:  # autograd released the value before anything unpacked it
                found[value] = about.ended if about.ended >= 0 else self.duration
        return found

    def _find_workspaces(self, allocations: Allocations) -> list[int]:
        ours = {(memory.taken, memory.freed) for memory in self.memories}
        passing = sorted(
            stretch
            for _, stretches in allocations.all()
            for stretch in stretches
            if stretch[:2] not in ours
        )
        found = []
        for number, one in enumerate(self.operators):
            ends = self.end_of(number)
            changes = []
            first = bisect.bisect_left(passing, (one.start, 0.0, 0))
            for taken, freed, size in passing[first:]:
                if taken > ends:
                    break
                if freed <= ends:
                    changes += [(taken, size), (freed, -size)]
            now = most = 0
            for _, change in sorted(changes):
                now += change
                most = max(most, now)
            found.append(most)
        return found

    def _find_overwritten(self) -> dict[int, int]:
        found = {}
        last: dict[tuple[int, int], int] = {}  # by memory and region
        for number, one in enumerate(self.operators):
            for value in one.outputs:
                if value not in self.memory_of:
                    continue
                place = self.memory_of[value], self.call_of[number]
                before = last.get(place)
                if before is not None and self.maker[before] != number:
                    found[before] = number
                last[place] = value
        return found

    def _find_shared(self) -> set[int]:
        known: dict[int, int] = {}
        shared = set()
        for number, one in enumerate(self.operators):
            for value in (*one.inputs, *one.outputs):
                if value in self.memory_of:
                    place = self.memory_of[value]
                    if known.setdefault(place, self.call_of[number]) != self.call_of[number]:
                        shared.add(place)
        return shared

    def _find_leaving(self) -> dict[int, float]:
        """Memories that only one region reads, apart from the region that made them, and that the
        program released before backward; with the time of the release."""
        users: dict[int, set[int]] = defaultdict(set)
        for number, one in enumerate(self.operators):
            for value in (*one.inputs, *one.outputs):
                if value in self.memory_of:
                    users[self.memory_of[value]].add(self.call_of[number])
        found = {}
        for value, place in self.memory_of.items():
            about = self.values[value]
            if value in self.maker or not about.saved or about.let_go < 0:
                continue
            if len(users[place]) == 1 + self.memories[place].is_ours:
                found[place] = self.gave_up(value)
        return found

    def _find_inputs(self) -> list[list[int]]:
        inputs: list[dict[int, None]] = [{} for _ in self.calls]
        for number, one in enumerate(self.operators):
            for value in one.inputs:
                if value not in self.maker:
                    inputs[self.call_of[number]][value] = None
        return [list(found) for found in inputs]
