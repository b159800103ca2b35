"""Simulates time and memory of a step under other choices."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ebb._plan.changes import Changes, curve, highest, union
from ebb._plan.choice import PLAIN, Choice
from ebb._plan.device_times import on_device
from ebb._plan.measured import Measured
from ebb._plan.pages import NO_PAGER, Paged, Pools
from ebb._plan.region_estimate import RegionEstimate, Stretch, plain_stretches
from ebb._plan.step import Call, Step
from ebb._plan.transfers import NO_LINK, Sent, Transfers

_RECORDING = 0.001  # milliseconds that a region adds to each operator
_SLOWEST = 0.1  # maximum milliseconds that a replay takes in addition to its kernel


@dataclass(frozen=True)
class CallEstimate:
    """Simulated time and memory of one region.

    Attributes:
        own: allocations and frees of memory that no other region uses.
        shared: when the region needs memory that other regions use too, or that is offloaded.
        sent: storages that are offloaded.
        paged: storages whose rows go to pools.
        replays: how many operators are recomputed.
        kernels: time of their kernels in forward.
        replaying: milliseconds of all replays.
        early: milliseconds of replays ahead of backward.
        recording: milliseconds that its operators take longer than outside of regions.
        held: bytes of its own that it holds when forward ends.
    """

    own: Changes
    shared: tuple[Stretch, ...]
    sent: tuple[Sent, ...]
    paged: tuple[Paged, ...]
    replays: int
    kernels: float
    replaying: float
    early: float
    recording: float
    held: int

    @property
    def added(self) -> float:
        """Milliseconds that the region adds to the eager step."""
        return self.replaying + self.recording


@dataclass(frozen=True)
class Estimate:
    """Simulated time and memory of a step.

    Attributes:
        peak: peak bytes that the step allocates.
        duration: in milliseconds.
        replays: how many operators are recomputed.
        peaks_at: time of the peak, in milliseconds of the recorded step.
    """

    peak: int
    duration: float
    replays: int
    peaks_at: float


class Simulator:
    """Simulates a measured step under other choices.

    Attributes:
        step: the recorded step.
        link: speed of offloading.
        window: bytes that may be in flight at a time, in each direction.
        pager: how rows go to pools; None: no paging.
        ahead: True if the next region is replayed ahead during a region's backward.
        plain: the step without regions.
        work: how many operators and replays have been simulated.

    Args:
        measured: of a step.
        ahead: True if the next region is replayed ahead during a region's backward.
    """

    def __init__(self, measured: Measured, ahead: bool = False) -> None:
        profile = measured.profile
        self.step = Step(on_device(profile) if measured.on_accelerator else profile)
        self.link = measured.link or NO_LINK
        self.window = self._find_window()
        self.pager = measured.pager
        self.ahead = ahead
        self._factor, self._each = 1.0, 0.0
        self._slowing = 0.0
        self.work = 0
        self._rest = Changes(self.step.rest)
        self._found: dict[tuple[int, Choice | None, int | None], CallEstimate] = {}
        everything = [self.of_call(call, Choice()) for call in range(len(self.step.calls))]
        kernels = sum(one.kernels for one in everything)
        replaying = self.step.replaying
        self._measure_replays(replaying, kernels, sum(one.replays for one in everything))
        recording = _RECORDING * len(self.step.operators)
        self._plain = measured.duration - replaying - recording
        if self._plain < kernels:  # the machine was slower during the recording
            self._plain = measured.duration * (1 - replaying / self.step.duration)
        self._found.clear()
        self.plain = self.estimate([PLAIN] * len(self.step.calls))
        self._slowing = self._measure_copies(measured.away)

    def _find_window(self) -> int:
        """Bytes for two copies of the largest storage that may be offloaded: one is made while ebb
        waits for the other."""
        sizes = [
            self.step.memories[place].size
            for value, place in self.step.memory_of.items()
            if self.step.values[value].saved or self.step.may_leave(value)
        ]
        return 2 * max((size for size in sizes if size >= self.link.least), default=0)

    def with_step(self, step: Step) -> Simulator:
        """A simulator for a step with other regions, with the same measured times."""
        other = copy.copy(self)
        other.step = step
        other._found = {}
        return other

    def estimate(self, choices: Sequence[Choice | None]) -> Estimate:
        """Simulate the step.

        Args:
            choices: a choice, or ``PLAIN``, for each of ``step.calls``.
        """
        calls = self._of_calls(choices)
        transfers, pools = self._transfers(calls), self._pools(calls)
        peak, when = highest(self._changes(calls, transfers, pools))
        if pools.are_too_large:  # the real pools would be too small for the rows
            peak = sys.maxsize
        added = self._added(calls, choices) + transfers.waited + self._slowed_by(transfers)
        added += pools.took
        return Estimate(peak, self._plain + added, sum(one.replays for one in calls), when)

    def timeline(self, choices: Sequence[Choice | None]) -> list[tuple[float, int]]:
        """Bytes that the step has allocated from each time on, in milliseconds of the profile.

        Args:
            choices: as for `estimate`.
        """
        calls = self._of_calls(choices)
        times, now = curve(self._changes(calls, self._transfers(calls), self._pools(calls)))
        return list(zip(times.tolist(), now.tolist(), strict=True))

    def of_call(self, call: int, choice: Choice | None) -> CallEstimate:
        """Simulate one region, if all blocks are regions."""
        later = range(call + 1, len(self.step.calls)) if self.ahead else ()
        return self._of_call(call, choice, next(filter(self._is_met, later), None))

    def _of_call(self, number: int, choice: Choice | None, later: int | None) -> CallEstimate:
        found = self._found.get((number, choice, later))
        if found is None:  # functools.cache would keep the memory until garbage collection
            found = self._found[number, choice, later] = self._estimate_call(number, choice, later)
        return found

    def _of_calls(self, choices: Sequence[Choice | None]) -> list[CallEstimate]:
        found = []
        later = None  # the region that backward reaches before this one
        for number in reversed(range(len(choices))):
            found.append(self._of_call(number, choices[number], later if self.ahead else None))
            if choices[number] is not PLAIN and self._is_met(number):
                later = number
        return found[::-1]

    def _is_met(self, call: int) -> bool:
        """True if backward unpacks a value of the region."""
        return bool(self.step.calls[call].asked)

    def replayed(self, call: int, choice: Choice) -> dict[int, int]:
        """How often each operator of a region is recomputed."""
        found = RegionEstimate(self.step, self.step.calls[call], choice, self.link.least)
        return {operator: len(times) for operator, times in found.replays.runs.items()}

    def held_at(self, call: int, choice: Choice | None, time: float) -> int:
        """Bytes that a region needs at a time, without offloaded storages that are in flight."""
        found = self.of_call(call, choice)
        there = {one.memory for one in found.shared if one.begin <= time < one.end}
        leaving = (*found.sent, *(one.sent for one in found.paged))
        there |= {one.memory for one in leaving if one.asked <= time < one.ended}
        return found.own.at(time) + sum(self.step.memories[one].size for one in there)

    def pool_bytes(self, choices: Sequence[Choice | None]) -> int:
        """Bytes of all page pools. `choices`: as for `estimate`."""
        return self._pools(self._of_calls(choices)).nbytes

    @property
    def all_away(self) -> list[Choice | None]:
        """Choices that offload all saved tensors."""
        calls = self.step.calls
        return [Choice(offloaded=frozenset(range(len(one.operators)))) for one in calls]

    def not_hidden(self, call: int, sent: Iterable[Sent]) -> float:
        """Milliseconds that a region's copies add: they slow its work, and may take longer than its
        work, in forward and in backward."""
        one, step = self.step.calls[call], self.step
        nbytes = sum(storage.size for storage in sent)
        if nbytes == 0:
            return 0.0
        slowed = self._slowing * nbytes
        forward = step.working(one.begins, one.ends)
        backward = step.working(one.asked[0][0], one.asked[-1][0]) if one.asked else 0.0
        out, back = nbytes / self.link.out - forward, nbytes / self.link.back - backward
        return slowed + max(0.0, out) + max(0.0, back)

    def replay_time(self, operator: int) -> float:
        """Milliseconds that recomputing an operator takes."""
        return self.step.operators[operator].runtime * self._factor + self._each

    def _measure_replays(self, took: float, kernels: float, replays: int) -> None:
        """Fit replay times to the step that recomputed everything: the overhead of a replay, or the
        ratio of its time to the kernel's time in forward."""
        if replays == 0:
            return
        if took >= kernels:
            self._each = min((took - kernels) / replays, _SLOWEST)
        elif kernels > 0:
            self._factor = max(took / kernels, 0.25)

    def _measure_copies(self, away: float | None) -> float:
        """Fit copies to the step that offloaded everything: milliseconds by which each byte slows
        the work, out and back together."""
        nbytes = self._transfers(self._of_calls(self.all_away)).moved
        if away is None or nbytes == 0:
            return 0.0
        return max(0.0, away - self.estimate(self.all_away).duration) / nbytes

    def _slowed_by(self, transfers: Transfers) -> float:
        return self._slowing * transfers.moved

    def _added(self, calls: Sequence[CallEstimate], choices: Sequence[Choice | None]) -> float:
        if not self.ahead:
            return sum(one.added for one in calls)
        added = 0.0
        later = None  # the region that backward reaches before this one
        for number in reversed(range(len(calls))):
            one, call = calls[number], self.step.calls[number]
            meanwhile = 0.0
            if later is not None and call.asked:
                meanwhile = self.step.working(later.asked[0][0], call.asked[0][0])
            if call.asked and choices[number] is not PLAIN:
                later = call
            added += one.added - min(one.early, max(0.0, meanwhile))
        return added

    def _transfers(self, calls: Sequence[CallEstimate]) -> Transfers:
        return Transfers((sent for one in calls for sent in one.sent), self.link, self.window)

    def _pools(self, calls: Sequence[CallEstimate]) -> Pools:
        return Pools((one for call in calls for one in call.paged), self.pager or NO_PAGER)

    def _changes(
        self, calls: Sequence[CallEstimate], transfers: Transfers, pools: Pools
    ) -> list[Changes]:
        all_stays = (*transfers.stays, *pools.stays)
        needed: dict[int, list[tuple[float, float]]] = {
            place: [self.step.outside(place)]
            for place, memory in enumerate(self.step.memories)
            if self.step.is_shared(place) and not memory.is_ours
        }
        for sent in (stays.sent for stays in all_stays):
            if not self.step.memories[sent.memory].is_ours:
                needed[sent.memory] = [self.step.outside(sent.memory)]
        for one in calls:
            for stretch in one.shared:
                needed.setdefault(stretch.memory, []).append((stretch.begin, stretch.end))
        for stays in all_stays:
            sent = stays.sent
            there = needed.setdefault(sent.memory, [])
            there += [(sent.taken, min(stays.left, sent.ended)), (stays.fetched, sent.ended)]
        shared = Changes(self._changes_of(needed))
        standing = Changes([(0.0, pools.nbytes)])
        return [self._rest, shared, standing, pools.tickets, *(one.own for one in calls)]

    def _changes_of(
        self, needed: Mapping[int, list[tuple[float, float]]]
    ) -> Iterable[tuple[float, int]]:
        for place, stretches in needed.items():
            size = self.step.memories[place].size
            for begin, end in union(stretches):
                yield from [(begin, size), (end, -size)]

    def _split(
        self,
        stretches: Iterable[Stretch],
        copies: Iterable[tuple[float, int]],
        sent: Sequence[Sent] = (),
        paged: Sequence[Paged] = (),
    ) -> tuple[Changes, tuple[Stretch, ...], tuple[Sent, ...], tuple[Paged, ...]]:
        own: dict[int, list[tuple[float, float]]] = {}
        shared = []
        leaving = {one.memory for one in (*sent, *(one.sent for one in paged))}
        for one in stretches:
            if self.step.is_shared(one.memory) or one.memory in leaving:
                shared.append(one)
                continue
            memory = self.step.memories[one.memory]
            if one.memory not in own:
                own[one.memory] = [] if memory.is_ours else [self.step.outside(one.memory)]
            own[one.memory].append((one.begin, one.end))
        of_its_own = Changes([*self._changes_of(own), *copies])
        return of_its_own, tuple(shared), tuple(sent), tuple(paged)

    def _estimate_call(self, number: int, choice: Choice | None, later: int | None) -> CallEstimate:
        call = self.step.calls[number]
        if choice is PLAIN:
            plain = list(plain_stretches(self.step, call))
            held = self._held(call, plain)
            return CallEstimate(*self._split(plain, ()), 0, 0.0, 0.0, 0.0, 0.0, held)
        begins = math.inf
        if self.ahead and later is None:  # backward reaches this region first: nothing is freed
            choice = Choice(frozenset(range(len(call.operators))))
        elif later is not None:
            begins = self.step.calls[later].asked[0][0]
        found = RegionEstimate(self.step, call, choice, self.link.least, begins)
        runs, kernels = found.replays.count, found.replays.kernels
        self.work += len(call.operators) + runs
        return CallEstimate(
            *self._split(found.stretches, found.copies, found.sent, found.paged),
            runs,
            kernels,
            kernels * self._factor + runs * self._each,
            sum(self.replay_time(operator) for operator, _ in found.replays.early),
            _RECORDING * len(call.operators),
            self._held(call, found.stretches),
        )

    def _held(self, call: Call, stretches: Iterable[Stretch]) -> int:
        end = call.forward_ends
        there = {one.memory for one in stretches if one.begin <= end < one.end}
        return sum(self.step.memories[one].size for one in there if self.step.memories[one].is_ours)
