"""Simulates a step. In: a measured step, and a choice for each region. Out: an `Estimate`."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ebb._plan.profile.device_times import on_device
from ebb._plan.profile.link import NO_LINK
from ebb._plan.profile.measuring import Measured
from ebb._plan.profile.pager import NO_PAGER
from ebb._plan.simulate.changes import Changes, Span, curve, during, highest, union
from ebb._plan.simulate.choice import EAGER, Choice
from ebb._plan.simulate.page_pools import Paged, Pools
from ebb._plan.simulate.region_estimate import Need, RegionEstimate, eager_needs
from ebb._plan.simulate.step import Call, Step
from ebb._plan.simulate.transfers import Sent, Transfers

_RECORDING = 0.001  # milliseconds that a region adds to each operator
_SLOWEST = 0.1  # maximum milliseconds that a replay takes in addition to its kernel


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
        measured: the measurements of the step.
        ahead: True if the next region is replayed ahead during a region's backward.
        offloads, pages: False if choices without OFFLOAD, or without PAGE, are to be found.
    """

    def __init__(
        self,
        measured: Measured,
        ahead: bool = False,
        *,
        offloads: bool = True,
        pages: bool = True,
    ) -> None:
        profile = measured.profile
        self.step = Step(on_device(profile) if measured.on_accelerator else profile)
        self.link = (measured.link if offloads else None) or NO_LINK
        self.window = self._find_window()  # bytes in flight at a time, in each direction
        self.pager = measured.pager if pages else None
        self.ahead = ahead
        self._factor, self._each = 1.0, 0.0
        self._slowing = 0.0
        self.work = 0  # how many operators and replays have been simulated
        self._rest = Changes(self.step.rest)
        self._known: dict[tuple[int, Choice | None, int | None], CallEstimate] = {}
        recomputed = [self.of_call(call, Choice()) for call in range(len(self.step.calls))]
        kernels = sum(estimate.kernels for estimate in recomputed)
        replaying = self.step.replaying
        self._fit_replays(replaying, kernels, sum(estimate.replays for estimate in recomputed))
        recording = _RECORDING * len(self.step.operators)
        self._eager_duration = measured.duration - replaying - recording
        if self._eager_duration < kernels:  # the machine was slower during the recording
            self._eager_duration = measured.duration * (1 - replaying / self.step.duration)
        self._known.clear()
        # The step without regions.
        self.plain = self.estimate([EAGER] * len(self.step.calls))
        self._slowing = self._fit_copies(measured.offload_all_ms)

    def _find_window(self) -> int:
        """Bytes for two copies of the largest storage that may be offloaded: one is made while ebb
        waits for the other."""
        sizes = [
            self.step.memories[memory].size
            for value, memory in self.step.memory_of.items()
            if self.step.values[value].saved or self.step.may_offload(value)
        ]
        return 2 * max((size for size in sizes if size >= self.link.least), default=0)

    def with_step(self, step: Step) -> Simulator:
        """A simulator for a step with other regions, with the same measured times."""
        simulator = copy.copy(self)
        simulator.step, simulator._known = step, {}
        return simulator

    def snapshot(self) -> Simulator:
        """A copy with all that has been simulated so far."""
        simulator = copy.copy(self)
        simulator._known = dict(self._known)
        return simulator

    def estimate(self, choices: Sequence[Choice | None]) -> Estimate:
        """Simulate the step with a choice, or ``EAGER``, for each of ``step.calls``."""
        calls = self._of_calls(choices)
        transfers, pools = self._transfers(calls), self._pools(calls)
        peak, peak_time = highest(self._changes(calls, transfers, pools))
        if pools.are_too_large:  # the real pools would be too small for the rows
            peak = sys.maxsize
        added = self._added(calls) + transfers.waited + self._slowing * transfers.moved
        added += pools.took
        replays = sum(call.replays for call in calls)
        return Estimate(peak, self._eager_duration + added, replays, peak_time)

    def timeline(self, choices: Sequence[Choice | None]) -> list[tuple[float, int]]:
        """Bytes that the step has allocated from each time on, in milliseconds of the profile."""
        calls = self._of_calls(choices)
        times, sizes = curve(self._changes(calls, self._transfers(calls), self._pools(calls)))
        return list(zip(times.tolist(), sizes.tolist(), strict=True))

    def of_call(self, call: int, choice: Choice | None) -> CallEstimate:
        """Simulate one region, if all blocks are regions."""
        later = range(call + 1, len(self.step.calls)) if self.ahead else ()
        return self._of_call(call, choice, next(filter(self._is_unpacked, later), None))

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
            if choices[call] is not EAGER and self._is_unpacked(call):
                later = call
        return estimates[::-1]

    def _is_unpacked(self, call: int) -> bool:
        """True if backward unpacks a value of the region."""
        return bool(self.step.calls[call].unpacked)

    def replayed(self, call: int, choice: Choice) -> dict[int, int]:
        """How often each operator of a region is recomputed."""
        region = RegionEstimate(self.step, self.step.calls[call], choice, self.link.least)
        return {op: len(times) for op, times in region.replays.runs.items()}

    def needed_at(self, call: int, choice: Choice | None, time: float) -> int:
        """Bytes that a region needs at a time, without offloaded storages that are in flight."""
        estimate = self.of_call(call, choice)
        memories = {need.memory for need in estimate.shared if need.begin <= time < need.end}
        all_sent = (*estimate.sent, *(paged.sent for paged in estimate.paged))
        memories |= {sent.memory for sent in all_sent if sent.needed <= time < sent.ended}
        sizes = (self.step.memories[memory].size for memory in memories)
        return estimate.own.at(time) + sum(sizes)

    def pool_bytes(self, choices: Sequence[Choice | None]) -> int:
        """Bytes of all page pools."""
        return self._pools(self._of_calls(choices)).nbytes

    @property
    def all_offloaded(self) -> list[Choice | None]:
        """Choices that offload all saved tensors."""
        calls = self.step.calls
        return [Choice(offloaded=frozenset(range(len(call.operators)))) for call in calls]

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
        return self._slowing * nbytes + max(0.0, out) + max(0.0, back)

    def replay_time(self, op: int) -> float:
        """Milliseconds that recomputing an operator takes."""
        return self.step.operators[op].runtime * self._factor + self._each

    def _fit_replays(self, took: float, kernels: float, replays: int) -> None:
        """Fit replay times to the step that recomputed everything: the overhead of a replay, or the
        ratio of its time to the kernel's time in forward."""
        if replays == 0:
            return
        if took >= kernels:
            self._each = min((took - kernels) / replays, _SLOWEST)
        elif kernels > 0:
            self._factor = max(took / kernels, 0.25)

    def _fit_copies(self, away: float | None) -> float:
        """Fit copies to the step that offloaded everything: milliseconds by which each byte slows
        the work, out and back together."""
        if away is None:
            return 0.0
        nbytes = self._transfers(self._of_calls(self.all_offloaded)).moved
        if nbytes == 0:
            return 0.0
        return max(0.0, away - self.estimate(self.all_offloaded).duration) / nbytes

    def _added(self, calls: Sequence[CallEstimate]) -> float:
        if not self.ahead:
            return sum(estimate.added for estimate in calls)
        added = 0.0
        for estimate in reversed(calls):
            added += estimate.added - min(estimate.early, estimate.meanwhile)
        return added

    def _transfers(self, calls: Sequence[CallEstimate]) -> Transfers:
        sent = (sent for call in calls for sent in call.sent)
        ends = (call.ends for call in self.step.calls)
        return Transfers(sent, self.link, self.window, ends)

    def _pools(self, calls: Sequence[CallEstimate]) -> Pools:
        return Pools((paged for call in calls for paged in call.paged), self.pager or NO_PAGER)

    def _changes(
        self, calls: Sequence[CallEstimate], transfers: Transfers, pools: Pools
    ) -> list[Changes]:
        absences = (*transfers.absences, *pools.absences)
        needed = {memory: [span] for memory, span in self.step.shared_spans.items()}
        for sent in (absence.sent for absence in absences):
            if not self.step.memories[sent.memory].in_region:
                needed[sent.memory] = [self.step.program_span(sent.memory)]
        for call in calls:
            for need in call.shared:
                needed.setdefault(need.memory, []).append((need.begin, need.end))
        for absence in absences:
            sent = absence.sent
            spans = needed.setdefault(sent.memory, [])
            spans.append((sent.allocated, min(absence.left, self.step.duration)))
        second = []  # what comes back takes other memory if something still holds the storage
        for absence in absences:
            sent, back = absence.sent, absence.fetched
            spans = needed[sent.memory]
            if absence.left < math.inf and any(begin < back < end for begin, end in spans):
                second += during(back, max(back, sent.ended), sent.size)
            else:
                spans.append((back, sent.ended))
        shared = Changes(self._changes_of(needed))
        of_pools = Changes([(0.0, pools.nbytes)])
        return [
            self._rest,
            shared,
            Changes(second),
            of_pools,
            pools.tickets,
            *(call.own for call in calls),
        ]

    def _changes_of(self, needed: Mapping[int, list[Span]]) -> Iterable[tuple[float, int]]:
        for memory, spans in needed.items():
            for begin, end in union(spans):
                yield from during(begin, end, self.step.memories[memory].size)

    def _split(
        self,
        needs: Sequence[Need],
        copies: Iterable[tuple[float, int]],
        offloaded: Iterable[Sent],
    ) -> tuple[Changes, tuple[Need, ...]]:
        """The memory that only this region uses, and the needs of other memory."""
        own: dict[int, list[Span]] = {}
        shared = []
        not_own = {sent.memory for sent in offloaded} | self.step.shared
        for need in needs:
            if need.memory in not_own:
                shared.append(need)
                continue
            if need.memory not in own:
                in_region = self.step.memories[need.memory].in_region
                own[need.memory] = [] if in_region else [self.step.program_span(need.memory)]
            own[need.memory].append((need.begin, need.end))
        return Changes([*self._changes_of(own), *copies]), tuple(shared)

    def _estimate_call(self, index: int, choice: Choice | None, later: int | None) -> CallEstimate:
        call = self.step.calls[index]
        if choice is EAGER:
            needs = list(eager_needs(self.step, call))
            own, shared = self._split(needs, (), ())
            return CallEstimate(own, shared, (), (), self._resident(call, needs))
        begins, meanwhile = math.inf, 0.0
        if self.ahead and later is None:  # backward reaches this region first: nothing is freed
            choice = Choice(frozenset(range(len(call.operators))))
        elif later is not None:
            begins = self.step.calls[later].backward_begins
            if call.unpacked:
                meanwhile = max(0.0, self.step.working(begins, call.backward_begins))
        region = RegionEstimate(self.step, call, choice, self.link.least, begins)
        all_sent = (*region.sent, *(paged.sent for paged in region.paged))
        replays, kernels = region.replays.count, region.replays.kernels
        self.work += len(call.operators) + replays
        return CallEstimate(
            *self._split(region.needs, region.copies, all_sent),
            tuple(region.sent),
            tuple(region.paged),
            self._resident(call, region.needs),
            replays,
            kernels,
            kernels * self._factor + replays * self._each,
            sum(self.replay_time(op) for op, _ in region.replays.early),
            meanwhile,
            _RECORDING * len(call.operators),
        )

    def _resident(self, call: Call, needs: Iterable[Need]) -> int:
        end = call.forward_ends
        memories = {need.memory for need in needs if need.begin <= end < need.end}
        own = (self.step.memories[memory] for memory in memories)
        return sum(memory.size for memory in own if memory.in_region)
