"""Simulates a step. In: a measured step, and a choice for each region. Out: an `Estimate`."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ebb._plan.profile.copies import NO_LINK, NO_PAGER
from ebb._plan.profile.device_times import on_device
from ebb._plan.profile.measuring import Measured
from ebb._plan.simulate.changes import Changes, Span, curve, during, highest
from ebb._plan.simulate.choice import EAGER, Choice
from ebb._plan.simulate.dataflow import Call
from ebb._plan.simulate.lifetimes import Lifetimes
from ebb._plan.simulate.region_estimate import Need, RegionEstimate, eager_needs
from ebb._plan.simulate.step import Step, changes_of
from ebb._plan.simulate.transfers import Paged, Pools, Sent, Transfers

_RECORDING = 0.001  # milliseconds that a region adds to each operator
_SLOWEST = 0.1  # maximum milliseconds that a replay takes in addition to its kernel


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a step, and of replays."""

    eager: float  # duration of the step without regions
    replay_scale: float  # ratio of a replay's time to its kernel's time in forward
    replay_overhead: float  # time that a replay takes in addition

    def of_replays(self, kernels: float, replays: int = 1) -> float:
        """Time of replays whose kernels took this long in forward."""
        return kernels * self.replay_scale + replays * self.replay_overhead


def _fitted(step: Step, duration: float) -> Timing:
    """Fit to the step that recomputed everything: the overhead of a replay, or the ratio of its
    time to the kernel's time in forward. `duration`: without recording."""
    regions = [Lifetimes(step, call, Choice()).replays for call in step.calls]
    kernels, replays = sum(r.kernels for r in regions), sum(r.count for r in regions)
    took = step.replaying
    eager = duration - took - _RECORDING * len(step.operators)
    if eager < kernels:  # the machine was slower during the recording
        eager = duration * (1 - took / step.duration)
    scale, overhead = 1.0, 0.0
    if replays and took >= kernels:
        overhead = min((took - kernels) / replays, _SLOWEST)
    elif replays and kernels > 0:
        scale = max(took / kernels, 0.25)
    return Timing(eager, scale, overhead)


@dataclass(frozen=True)
class CallEstimate:
    """Simulated time and memory of one region."""

    own: Changes  # allocations and frees of memory that no other region uses
    shared: tuple[Need, ...]  # needs of memory that other regions use too, or that is offloaded
    resident: int  # bytes that the region allocated and that are in memory when forward ends
    sent: tuple[Sent, ...] = ()  # storages that are offloaded
    paged: tuple[Paged, ...] = ()  # storages whose rows go to pools
    replays: int = 0  # how many operators are recomputed
    replaying: float = 0.0  # milliseconds of all replays
    early: float = 0.0  # milliseconds of replays ahead of backward
    hidden: float = 0.0  # milliseconds of these that the backward beside them hides
    added: float = 0.0  # milliseconds that the region adds to the eager step if nothing is hidden


@dataclass(frozen=True)
class Estimate:
    """Simulated time and memory of a step."""

    peak: int  # bytes that the step allocates
    duration: float
    replays: int  # how many operators are recomputed
    peak_time: float  # in milliseconds of the recorded step


class Simulator:
    """Simulates a measured step under other choices.

    Args:
        ahead: True if the next region is replayed ahead during a region's backward.
    """

    def __init__(self, measured: Measured, ahead: bool = False) -> None:
        profile = measured.profile
        self.step = Step(on_device(profile) if measured.on_accelerator else profile)
        self.link = measured.link or NO_LINK
        self.window = self._find_window()  # bytes in flight at a time, in each direction
        self.pager = measured.pager
        self.ahead = ahead
        self.work = 0  # how many operators and replays have been simulated
        self._known: dict[tuple[int, Choice | None, int | None], CallEstimate] = {}
        self._timing = _fitted(self.step, measured.duration)
        # Milliseconds by which each offloaded byte slows the work, out and back together.
        self._copy_slowdown = 0.0
        # The step without regions.
        self.plain = self.estimate([EAGER] * len(self.step.calls))
        self._copy_slowdown = self._fit_copies(measured.offload_all_ms)

    def _find_window(self) -> int:
        """Bytes for two copies of the largest storage that may be offloaded: one is made while ebb
        waits for the other."""
        sizes = [
            self.step.memories[memory].size
            for value, memory in self.step.memory_of.items()
            if self.step.values[value].saved or self.step.may_offload(value)
        ]
        return 2 * max((size for size in sizes if size >= self.link.least), default=0)

    def copy(self, step: Step | None = None) -> Simulator:
        """A copy with all that has been simulated so far, or for a step with other regions and the
        same measured times."""
        simulator = copy.copy(self)
        simulator.step = step or self.step
        simulator._known = {} if step else dict(self._known)
        return simulator

    def estimate(self, choices: Sequence[Choice | None]) -> Estimate:
        """Simulate the step with a choice, or ``EAGER``, for each of ``step.calls``."""
        calls = self._of_calls(choices)
        transfers, pools = self._transfers(calls), self._pools(calls)
        peak, peak_time = highest(self._changes(calls, transfers, pools))
        if pools.are_too_large:  # the real pools would be too small for the rows
            peak = sys.maxsize
        added = sum(call.added - call.hidden for call in calls)
        added += transfers.waited + self._copy_slowdown * transfers.moved + pools.took
        replays = sum(call.replays for call in calls)
        return Estimate(peak, self._timing.eager + added, replays, peak_time)

    def timeline(self, choices: Sequence[Choice | None]) -> list[tuple[float, int]]:
        """Bytes that the step has allocated from each time on, in milliseconds of the profile."""
        calls = self._of_calls(choices)
        times, sizes = curve(self._changes(calls, self._transfers(calls), self._pools(calls)))
        return list(zip(times.tolist(), sizes.tolist(), strict=True))

    def of_call(self, call: int, choice: Choice | None) -> CallEstimate:
        """Simulate one region, if all blocks are regions."""
        calls = range(call + 1, len(self.step.calls)) if self.ahead else ()
        later = (number for number in calls if self.step.calls[number].unpacked)
        return self._of_call(call, choice, next(later, None))

    def _of_call(self, call: int, choice: Choice | None, later: int | None) -> CallEstimate:
        key = call, choice, later
        if key not in self._known:  # functools.cache would keep the memory until garbage collection
            self._known[key] = self._estimate_call(*key)
        return self._known[key]

    def _of_calls(self, choices: Sequence[Choice | None]) -> list[CallEstimate]:
        estimates = []
        later = None  # the region that backward reaches before this one
        for call in reversed(range(len(choices))):
            estimates.append(self._of_call(call, choices[call], later if self.ahead else None))
            if choices[call] is not EAGER and self.step.calls[call].unpacked:
                later = call
        return estimates[::-1]

    def replayed(self, call: int, choice: Choice) -> dict[int, int]:
        """How often each operator of a region is recomputed."""
        replays = Lifetimes(self.step, self.step.calls[call], choice).replays
        return {op: len(times) for op, times in replays.runs.items()}

    def needed_at(self, call: int, choice: Choice | None, time: float) -> int:
        """Bytes that a region needs at a time, without offloaded storages that are in flight."""
        estimate = self.of_call(call, choice)
        memories = {need.memory for need in estimate.shared if need.begin <= time < need.end}
        all_sent = (*estimate.sent, *(paged.sent for paged in estimate.paged))
        memories |= {sent.memory for sent in all_sent if sent.needed <= time < sent.ended}
        sizes = (self.step.memories[memory].size for memory in memories)
        return estimate.own.at(time) + sum(sizes)

    def pool_bytes(self, choices: Sequence[Choice | None]) -> int:
        return self._pools(self._of_calls(choices)).nbytes

    @property
    def all_offloaded(self) -> list[Choice | None]:
        """Choices that offload all saved tensors."""
        counts = (len(call.operators) for call in self.step.calls)
        return [Choice(offloaded=frozenset(range(count))) for count in counts]

    def copy_time(self, index: int, all_sent: Iterable[Sent]) -> float:
        """Milliseconds that a region's copies add: they slow its work, and may take longer than its
        work, in forward and in backward."""
        call, step = self.step.calls[index], self.step
        nbytes = sum(sent.size for sent in all_sent)
        if nbytes == 0:
            return 0.0
        forward, backward = step.working(call.begins, call.ends), 0.0
        if call.unpacked:
            backward = step.working(call.backward_begins, call.unpacked[-1][0])
        out, back = nbytes / self.link.out - forward, nbytes / self.link.back - backward
        return self._copy_slowdown * nbytes + max(0.0, out) + max(0.0, back)

    def replay_time(self, op: int) -> float:
        """Milliseconds that recomputing an operator takes."""
        return self._timing.of_replays(self.step.operators[op].runtime)

    def _fit_copies(self, away: float | None) -> float:
        """Fit the slowdown by copies to the step that offloaded everything."""
        if away is None:
            return 0.0
        nbytes = self._transfers(self._of_calls(self.all_offloaded)).moved
        if nbytes == 0:
            return 0.0
        return max(0.0, away - self.estimate(self.all_offloaded).duration) / nbytes

    def _transfers(self, calls: Sequence[CallEstimate]) -> Transfers:
        sent = (sent for call in calls for sent in call.sent)
        ends = (call.ends for call in self.step.calls)
        return Transfers(sent, self.link, self.window, ends)

    def _changes(
        self, calls: Sequence[CallEstimate], transfers: Transfers, pools: Pools
    ) -> list[Changes]:
        step = self.step
        absences = (*transfers.absences, *pools.absences)
        needed = {memory: step.program_spans(memory) for memory in step.shared}
        for absence in absences:
            sent, left = absence.sent, min(absence.left, step.duration)
            spans = needed.setdefault(sent.memory, step.program_spans(sent.memory))
            spans.append((sent.allocated, left))
        for need in (need for call in calls for need in call.shared):
            needed.setdefault(need.memory, []).append((need.begin, need.end))
        second = []  # what comes back takes other memory if something still holds the storage
        for absence in absences:
            sent, back = absence.sent, absence.fetched
            spans = needed[sent.memory]
            if absence.left < math.inf and any(begin < back < end for begin, end in spans):
                second += during(back, max(back, sent.ended), sent.size)
            else:
                spans.append((back, sent.ended))
        return [
            step.rest,
            Changes(changes_of(step, needed)),
            Changes(second),
            Changes([(0.0, pools.nbytes)]),
            pools.tickets,
            *(call.own for call in calls),
        ]

    def _pools(self, calls: Sequence[CallEstimate]) -> Pools:
        return Pools((paged for call in calls for paged in call.paged), self.pager or NO_PAGER)

    def _estimate_call(self, index: int, choice: Choice | None, later: int | None) -> CallEstimate:
        call = self.step.calls[index]
        if choice is EAGER:
            needs = list(eager_needs(self.step, call))
            return CallEstimate(*_split(self.step, needs), _resident(self.step, call, needs))
        begins, meanwhile = math.inf, 0.0
        if self.ahead and later is None:  # backward reaches this region first: nothing is freed
            choice = Choice(frozenset(range(len(call.operators))))
        elif later is not None:
            begins = self.step.calls[later].backward_begins
            if call.unpacked:
                meanwhile = max(0.0, self.step.working(begins, call.backward_begins))
        region = RegionEstimate(self.step, call, choice, self.link.least, begins)
        all_sent = (*region.sent, *(paged.sent for paged in region.paged))
        replays = region.replays.count
        replaying = self._timing.of_replays(region.replays.kernels, replays)
        early = sum(self.replay_time(op) for op, _ in region.replays.early)
        self.work += len(call.operators) + replays
        return CallEstimate(
            *_split(self.step, region.needs, region.copies, all_sent),
            _resident(self.step, call, region.needs),
            tuple(region.sent),
            tuple(region.paged),
            replays,
            replaying,
            early,
            min(early, meanwhile),
            replaying + _RECORDING * len(call.operators),
        )


def _split(
    step: Step,
    needs: Sequence[Need],
    copies: Iterable[tuple[float, int]] = (),
    offloaded: Iterable[Sent] = (),
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
            own[need.memory] = step.program_spans(need.memory)
        own[need.memory].append((need.begin, need.end))
    return Changes([*changes_of(step, own), *copies]), tuple(shared)


def _resident(step: Step, call: Call, needs: Iterable[Need]) -> int:
    end = call.forward_ends
    memories = {need.memory for need in needs if need.begin <= end < need.end}
    own = (step.memories[memory] for memory in memories)
    return sum(memory.size for memory in own if memory.in_region)
