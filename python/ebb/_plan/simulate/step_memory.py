"""Memory of a step. In: estimates of its calls, and copies. Out: allocations and frees."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ebb._plan.simulate.changes import Changes, Span, during
from ebb._plan.simulate.dataflow import Call
from ebb._plan.simulate.page_pools import Paged, Pools
from ebb._plan.simulate.region_estimate import Need
from ebb._plan.simulate.step import Step, changes_of
from ebb._plan.simulate.transfers import Sent, Transfers


@dataclass(frozen=True)
class CallEstimate:
    """Simulated time and memory of one region."""

    own: Changes  # allocations and frees of memory that no other region uses
    shared: tuple[Need, ...]  # needs of memory that other regions use too, or that is offloaded
    sent: tuple[Sent, ...]  # storages that are offloaded
    paged: tuple[Paged, ...]  # storages whose rows go to pools
    resident: int  # bytes that the region allocated and that are in memory when forward ends
    replays: int = 0  # how many operators are recomputed
    kernels: float = 0.0  # time of their kernels in forward
    replaying: float = 0.0  # milliseconds of all replays
    early: float = 0.0  # milliseconds of replays ahead of backward
    meanwhile: float = 0.0  # milliseconds that the backward beside these replays takes
    recording: float = 0.0  # milliseconds that its operators take longer than outside of regions

    @property
    def added(self) -> float:
        """Milliseconds that the region adds to the eager step."""
        return self.replaying + self.recording


def changes_of_step(
    step: Step, calls: Sequence[CallEstimate], transfers: Transfers, pools: Pools
) -> list[Changes]:
    absences = (*transfers.absences, *pools.absences)
    needed = {memory: [span] for memory, span in step.shared_spans.items()}
    for sent in (absence.sent for absence in absences):
        if not step.memories[sent.memory].in_region:
            needed[sent.memory] = [step.program_span(sent.memory)]
    for call in calls:
        for need in call.shared:
            needed.setdefault(need.memory, []).append((need.begin, need.end))
    for absence in absences:
        sent = absence.sent
        spans = needed.setdefault(sent.memory, [])
        spans.append((sent.allocated, min(absence.left, step.duration)))
    second = []  # what comes back takes other memory if something still holds the storage
    for absence in absences:
        sent, back = absence.sent, absence.fetched
        spans = needed[sent.memory]
        if absence.left < math.inf and any(begin < back < end for begin, end in spans):
            second += during(back, max(back, sent.ended), sent.size)
        else:
            spans.append((back, sent.ended))
    return [
        Changes(changes_of(step, needed)),
        Changes(second),
        Changes([(0.0, pools.nbytes)]),
        pools.tickets,
        *(call.own for call in calls),
    ]


def split(
    step: Step,
    needs: Sequence[Need],
    copies: Iterable[tuple[float, int]],
    offloaded: Iterable[Sent],
) -> tuple[Changes, tuple[Need, ...]]:
    """The memory that only this region uses, and the needs of other memory."""
    own: dict[int, list[Span]] = {}
    shared = []
    not_own = {sent.memory for sent in offloaded} | step.shared
    for need in needs:
        if need.memory in not_own:
            shared.append(need)
            continue
        if need.memory not in own:
            in_region = step.memories[need.memory].in_region
            own[need.memory] = [] if in_region else [step.program_span(need.memory)]
        own[need.memory].append((need.begin, need.end))
    return Changes([*changes_of(step, own), *copies]), tuple(shared)


def resident(step: Step, call: Call, needs: Iterable[Need]) -> int:
    end = call.forward_ends
    memories = {need.memory for need in needs if need.begin <= end < need.end}
    own = (step.memories[memory] for memory in memories)
    return sum(memory.size for memory in own if memory.in_region)
