"""Measures steps of a running job, and gives the input of a plan.

See Note [Steps that are measured].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from ebb import _C, ahead
from ebb._launch.budgeted import Blocks
from ebb._plan.budget import NothingToPlanError
from ebb._plan.link import may_send, measure_link, transfers_of
from ebb._plan.measuring import (
    AWAY,
    RECOMPUTED,
    base_bytes,
    device_of,
    measured_of,
    offload_all,
    window_of_all,
)
from ebb._plan.pages import StepsThatRunAgain
from ebb._plan.profile import Profile, median_of, without_evaluation
from ebb._plan.recording import Purpose, Recording
from ebb._plan.simulate import Measured
from ebb._support import devices
from ebb.policies import recompute_all

_MOST_AGAIN = 20  # maximum number of steps that do not count; more end the measurement
_SPREAD, _SLACK = 1.02, 4096  # peaks within this factor and these bytes count as equal


def number_of_steps(models: Iterable[torch.nn.Module]) -> int:
    """Maximum number of measured steps, plus the step that runs already."""
    return 1 + len(RECOMPUTED) + _steps_away(device_of(models))


def _steps_away(device: torch.device) -> int:
    return len(AWAY) if may_send(device) else 0


class NoPlanError(Exception):
    """No plan is possible; the message says why."""


@dataclass(frozen=True)
class Outcome:
    """The result of all measured steps."""

    measured: Measured  # input for a plan
    varies: bool  # True if the peaks of steps differ
    growth: float  # ratio of the largest step's peak to the recorded step's peak
    # The difference of these peaks in bytes. Without regions, the difference is at least as large.
    more: int
    beside: int  # bytes of the program's other tensors, which are not in `measured.base`


class Measuring:
    """Runs through the measured steps, with one call at each end of a step.

    Args:
        blocks: blocks whose policies it sets.
        optimizers: returns the job's optimizers.
        budget: bytes in total, or a share.
        beside: `Outcome.beside` of the first measurement; None: this is the first. Growth of these
            bytes since the first measurement counts against the budget.
    """

    def __init__(
        self,
        blocks: Blocks,
        optimizers: Callable[[], list[Any]],
        budget: int | float,
        beside: int | None = None,
    ) -> None:
        self._blocks = blocks
        self._optimizers = optimizers
        self._budget = budget
        self._beside_at_first = beside
        self._recording = Recording(gives_way=True)
        self._settings = ExitStack()  # settings of OFFLOAD in steps that offload everything
        self._peaks: list[int] = []  # of all measured steps that do not offload everything
        self._uncounted = 0  # steps that did not count
        self._ahead = ahead.configure()["regions"]  # the job's own setting
        self._begin_anew()

    def begin(self) -> None:
        """Begin the first measured step."""
        ahead.configure(regions=0)  # replays ahead would hide part of the replay time
        self._device = device_of(self._blocks.roots())
        self._link = measure_link(self._device)
        devices.free_cache()  # steps with other policies would keep other blocks in the cache
        self._again = StepsThatRunAgain()
        self._blocks.watch_callers()
        self._blocks.put(recompute_all)
        self._prepare()

    def _begin_anew(self) -> None:
        self._todo = list(RECOMPUTED)
        # Bytes in flight in the last steps, which offload everything; None before them.
        self._window: int | None = None
        self._profiles: list[tuple[int, Profile]] = []  # with the peaks of their steps
        self._times: list[tuple[int, float]] = []
        self._times_away: list[float] = []
        self._base = self._beside = 0
        self._calls: int | None = None  # calls of blocks in a step that counts
        self._other_calls: int | None = None  # `_calls` of the last step, if it did not count

    def step_ended(self, calls: int, peak: int) -> Outcome | None:
        """Record the step that has ended, and begin the next one.

        Args:
            calls: calls of blocks with gradients.
            peak: peak bytes that the step allocated.

        Returns:
            The result, if that was the last step.

        Raises:
            NoPlanError: the steps differ too much.
            NothingToPlanError: the steps call no block.
        """
        ended = self._recording.end()
        self._blocks.stop_watching_callers()
        if self._window is None:
            self._peaks.append(peak)
        if self._counts(calls) and ended is not None:
            self._note(self._todo.pop(0), peak, *ended)
            if not self._todo and self._window is None:
                self._window = window_of_all(self._outcome().measured, self._budget)
                if self._window is not None:
                    self._todo = list(AWAY)
                    self._blocks.put(offload_all)
                    devices.free_cache()
        else:
            self._uncounted += 1
            if self._uncounted > _MOST_AGAIN:
                if calls == 0:
                    raise NothingToPlanError(
                        "no block ran a backward in eager mode (blocks compiled by torch.compile "
                        "do not count)"
                    )
                raise NoPlanError(
                    "the blocks run a different number of times in each step"
                    if ended is not None
                    else "ebb cannot profile steps while torch.profiler is active; stop "
                    "torch.profiler during the first steps"
                )
        if self._todo:
            self._prepare()
            return None
        self.stop()
        return self._outcome()

    def left(self) -> int:
        """Maximum number of steps that are still to be measured."""
        return len(self._todo) + (_steps_away(self._device) if self._window is None else 0)

    def stop(self) -> None:
        """Stop measuring, and restore the job's settings."""
        self._recording.end()
        self._blocks.stop_watching_callers()
        self._settings.close()
        if self._window is not None:
            _C.offload_stats()  # copies have ended: this call makes the engine free their memory
        devices.free_cache()
        if ahead.configure()["regions"] == 0:  # the job has not changed the setting meanwhile
            ahead.configure(regions=self._ahead)

    def _prepare(self) -> None:
        self._settings.close()
        if self._window is not None:
            settings = transfers_of(in_flight_bytes=self._window, prefetch_bytes=self._window)
            self._settings.enter_context(settings)
        if self._todo[0] is Purpose.PROFILE:
            self._base = base_bytes(self._blocks.roots(), self._optimizers())
            self._beside = _C.tensor_bytes()[0] - self._base
            if self._beside_at_first is not None:
                growth = max(0, self._beside - self._beside_at_first)
                self._base, self._beside = self._base + growth, self._beside - growth
        self._recording.begin(self._todo[0])

    def _counts(self, calls: int) -> bool:
        """True if the step calls blocks as often as those before. Two steps in a row with the same
        other number of calls start the measurement again."""
        if calls == 0:
            return False
        if self._calls is None or calls == self._calls:
            self._calls, self._other_calls = calls, None
            return True
        before, self._other_calls = self._other_calls, calls
        if before == calls:
            self._begin_anew()
            self._blocks.put(recompute_all)
            self._calls = calls
        return False

    def _note(self, purpose: Purpose, peak: int, duration: float, profile: Profile | None) -> None:
        if profile is not None:
            if self._blocks.evaluation.has_run:
                profile = without_evaluation(profile)
            self._profiles.append((peak, profile))
        elif purpose is Purpose.TIME and self._window is not None:
            self._times_away.append(duration)
        elif purpose is Purpose.TIME:
            self._times.append((peak, duration))

    def _outcome(self) -> Outcome:
        peaks = self._peaks[1:]  # the first step allocates gradients and optimizer states
        size, largest = max(peak for peak, _ in self._profiles), max(peaks)
        profile = _together([profile for peak, profile in self._profiles if _are_alike(peak, size)])
        # Durations are scaled by the sizes of their steps.
        times = [took * size / peak if peak else took for peak, took in self._times]
        measured = measured_of(profile, times, self._base, self._device, self._link, self._again)
        measured = replace(measured, parents=self._blocks.parents())
        if self._times_away:
            measured = replace(measured, away=min(self._times_away))
        varies = not _are_alike(min(peaks), largest)
        growth = largest / size if varies and size else 1.0
        more = largest - size if varies else 0
        return Outcome(measured, varies, growth, more, self._beside)


def _are_alike(peak: int, other_peak: int) -> bool:
    return max(peak, other_peak) <= _SPREAD * min(peak, other_peak) + _SLACK


def _together(profiles: list[Profile]) -> Profile:
    try:
        return median_of(profiles)
    except RuntimeError:  # the steps ran different operators: plan for the last one
        return profiles[-1]
