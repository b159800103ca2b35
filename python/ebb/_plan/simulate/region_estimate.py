"""One region under a choice. In: a `Step`, a call, a `Choice`. Out: when memory is needed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from ebb._plan.profile.pager import has_rows
from ebb._plan.simulate.changes import Span
from ebb._plan.simulate.choice import Choice
from ebb._plan.simulate.dataflow import EPSILON, Call
from ebb._plan.simulate.lifetimes import Lifetimes
from ebb._plan.simulate.page_pools import Paged
from ebb._plan.simulate.region_copies import copies_of
from ebb._plan.simulate.step import Step
from ebb._plan.simulate.transfers import Sent


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
        copies: as `copies_of` gives them.
        sent: storages that are offloaded.
        paged: storages whose rows go to pools.

    Args:
        step, call, choice, begins: as for `Lifetimes`.
        least: smaller storages are not offloaded.
    """

    def __init__(
        self, step: Step, call: Call, choice: Choice, least: float, begins: float = math.inf
    ) -> None:
        self._step, self._call, self._least = step, call, least
        self._lives = Lifetimes(step, call, choice, begins)
        self.replays = self._lives.replays
        self.sent: list[Sent] = []
        self.paged: list[Paged] = []
        self._beside: dict[int, list[Span]] = defaultdict(list)  # see `copies_of`
        self.needs = [
            *self._of_results(),
            *self._of_inputs(choice),
            *self._of_lasting(self._find_lasting()),
        ]
        self.copies = list(copies_of(self._lives, self._beside))

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

    def _of_lasting(self, lasting: dict[int, float]) -> Iterable[Need]:
        """The inputs of lasting operators, as far as they are in memory."""
        step = self._step
        for op, until in lasting.items():
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
        step = self._step
        for op in self._call.operators:
            for value in step.operators[op].outputs:
                memory = step.memory_of.get(value)
                if memory is None:
                    continue
                allocated = step.memories[memory].allocated
                program_until = step.program_holds_until[value]
                yield Need(memory, allocated, program_until)
                if op in self._lives.offloaded and self._may_offload(value):
                    self.sent.append(self._sent(value))
                elif op in self._lives.paged and self._may_page(value):
                    self._page(self._sent(value), value)
                elif op in self._lives.kept:
                    yield Need(memory, allocated, self._lives.kept_until(value))
                for time in self.replays.runs.get(op, ()):
                    if (op, time) in self.replays.early and (op, time) in self.replays.passing:
                        continue  # see `_in_passing_ahead`
                    until = max(self._lives.replayed_until(value, op, time), time + EPSILON)
                    if program_until > time:  # the program holds the storage with later contents
                        self._beside[memory].append((time, until))
                    else:
                        yield Need(memory, time, until)

    def _may_offload(self, value: int) -> bool:
        """True if the value is large enough to be offloaded, and backward needs it."""
        return self._lives.size(value) >= self._least and self._lives.first_need(value) < math.inf

    def _may_page(self, value: int) -> bool:
        """True if the value has rows, and backward needs it."""
        return has_rows(self._step.values[value]) and self._lives.first_need(value) < math.inf

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
        for value in step.inputs_of(self._call):
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
