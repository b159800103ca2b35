"""Measures a job's own steps for a plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import torch

from ebb import _C, ahead
from ebb._launch.budgeted import Blocks
from ebb._plan.budget import NothingToPlanError
from ebb._plan.link import may_send, measure_link, transfers_of
from ebb._plan.measured import Measured, base_bytes, spread_of
from ebb._plan.measuring import device_of, may_send_all
from ebb._plan.pages import StepsThatRunAgain
from ebb._plan.profile import Profile, median_of, profile_of
from ebb._plan.simulate import Simulator
from ebb._plan.transfers import Link
from ebb._policy.decision import OFFLOAD
from ebb._policy.policy import Policy
from ebb._support import devices
from ebb.policies import recompute_all

offload_all = Policy(default=OFFLOAD)


class Do(Enum):
    """The kind of measurement in a step."""

    NOTHING = auto()  # the first step of a kind takes longer, and makes lasting allocations
    LISTEN = auto()  # records a step whose profile is discarded, before a profile
    TIME = auto()
    PROFILE = auto()


_RECORDED = (Do.LISTEN, Do.PROFILE)


# Note [Steps that are measured]
# All measured steps are steps of the job, with unchanged results. Every block is recomputed in
# them, except in the offload steps below. The simulator computes what other choices would need. A
# step counts only if it calls blocks as often as the steps before it. If a gradient scaler skips
# optimizer.step(), two iterations look like one step; ebb then measures another step in its place.
#
# On a CPU, torch's profiler reports a free only if it also reported the allocation. Gradients
# allocated in a step that is not recorded would never appear to be freed. So the step before a
# profile is recorded, too.
#
# If values can be offloaded and the predicted step fits, ebb runs two steps that offload everything
# that autograd saves, and times the second. The time shows how much copies slow computation.
_RECOMPUTED = (Do.LISTEN, Do.PROFILE, Do.PROFILE, Do.TIME, Do.TIME)
_AWAY = (Do.NOTHING, Do.TIME)
_MOST_AGAIN = 20  # maximum number of steps that do not count; more end the measurement
_SPREAD, _SLACK = 1.02, 4096  # peaks within this factor and these bytes count as equal


def number_of_steps(models: Iterable[torch.nn.Module]) -> int:
    """Maximum number of measured steps, plus the step that runs already."""
    return 1 + len(_RECOMPUTED) + _steps_away(device_of(models))


def _steps_away(device: torch.device) -> int:
    return len(_AWAY) if may_send(device) else 0


class NoPlanError(Exception):
    """No plan is possible; the message says why."""


@dataclass(frozen=True)
class Outcome:
    """The result of all measured steps.

    Attributes:
        measured: input for a plan.
        varies: True if the peaks of steps differ.
        growth: ratio of the largest step's peak to the recorded step's peak.
        more: the same difference in bytes; a lower bound of it for the step without regions.
        beside: bytes of the program's other tensors, which are not in ``measured.base``.
    """

    measured: Measured
    varies: bool
    growth: float
    more: int
    beside: int


class Measuring:
    """Runs through the measured steps, with one call at each end of a step.

    Args:
        blocks: blocks whose policies it sets.
        optimizers: returns the job's optimizers.
        budget: bytes in total, or a share.
        beside: bytes of the program's other tensors at the first measurement; None: this is the
            first. Growth since the first measurement counts against the budget.
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
        self._recording = Recording()
        self._link: Link | None = None
        self._device = torch.device("cpu")
        self._again_if_need_be = StepsThatRunAgain()
        self._transfers = ExitStack()  # settings of OFFLOAD in steps that offload everything
        # Peaks of all measured steps but the first, which allocates gradients and optimizer states.
        self._peaks: list[int] = []
        self._is_first = True
        self._begin_anew()
        self._again = 0  # steps that did not count
        self._ahead = 0  # the job's own setting for replays ahead

    def _begin_anew(self) -> None:
        self._todo = list(_RECOMPUTED)
        self._is_away = False  # True in the last steps, which offload everything
        self._profiles: list[tuple[int, Profile]] = []  # with the peaks of their steps
        self._times: list[tuple[int, float]] = []
        self._times_away: list[float] = []
        self._base = self._beside = 0
        self._like: int | None = None  # calls of blocks in a step that counts
        self._unlike: int | None = None  # calls of blocks in the last step, if it did not count

    def begin(self) -> None:
        """Begin the first measured step."""
        self._ahead = ahead.configure()["regions"]
        ahead.configure(regions=0)  # measure the full time of replays, not what stays visible
        self._device = device_of(self._blocks.roots())
        self._link = measure_link(self._device)
        self._again_if_need_be = StepsThatRunAgain()
        self._peaks, self._is_first = [], True
        self._begin_anew()
        self._blocks.watch_callers()
        self._blocks.put(recompute_all)
        self._prepare()

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
        self._blocks.callers_seen()
        if not self._is_away and not self._is_first:
            self._peaks.append(peak)
        self._is_first = False
        if self._counts(calls) and ended is not None:
            self._note(peak, *ended)
            self._todo.pop(0)
            is_last = not self._todo and not self._is_away
            if is_last and may_send_all(self._outcome().measured, self._budget):
                self._is_away, self._todo = True, list(_AWAY)
                self._blocks.put(offload_all)
        else:
            self._again += 1
            if self._again > _MOST_AGAIN:
                if calls == 0:
                    raise NothingToPlanError(
                        "no block has a backward; what torch.compile has compiled is none"
                    )
                raise NoPlanError(
                    "the number of calls of blocks varies from step to step"
                    if ended is not None
                    else "steps could not be recorded, since torch's profiler runs"
                )
        if self._todo:
            self._prepare()
            return None
        self.stop()
        return self._outcome()

    def left(self) -> int:
        """Maximum number of steps that are still to be measured."""
        return len(self._todo) + (0 if self._is_away else _steps_away(self._device))

    def stop(self) -> None:
        """Stop measuring, and restore the job's settings."""
        self._recording.end()
        self._blocks.callers_seen()
        self._transfers.close()
        if self._is_away:  # copies have ended: this call makes the engine free their memory
            _C.offload_stats()
        if ahead.configure()["regions"] == 0:  # the job has not changed the setting meanwhile
            ahead.configure(regions=self._ahead)

    def _prepare(self) -> None:
        do = self._todo[0]
        self._transfers.close()
        if self._is_away:
            window = Simulator(self._outcome().measured).window
            self._transfers.enter_context(
                transfers_of(in_flight_bytes=window, prefetch_bytes=window)
            )
        if do is Do.PROFILE:
            self._base = base_bytes(self._blocks.roots(), self._optimizers())
            self._beside = _C.tensor_bytes()[0] - self._base
            if self._beside_at_first is not None:
                growth = max(0, self._beside - self._beside_at_first)
                self._base, self._beside = self._base + growth, self._beside - growth
        self._recording.begin(do)

    def _counts(self, calls: int) -> bool:
        """True if a step is like those before. Two equal other steps in a row start anew."""
        if calls == 0:
            return False
        if self._like is None or calls == self._like:
            self._like, self._unlike = calls, None
            return True
        before, self._unlike = self._unlike, calls
        if before == calls:
            self._begin_anew()
            self._blocks.put(recompute_all)
            self._like = calls
        return False

    def _note(self, peak: int, duration: float, profile: Profile | None) -> None:
        do = self._todo[0]
        if self._is_away:
            self._times_away += [duration] if do is Do.TIME else []
            return
        if profile is not None:
            self._profiles.append((peak, profile))
        elif do is Do.TIME:
            self._times.append((peak, duration))

    def _outcome(self) -> Outcome:
        size, largest = max(peak for peak, _ in self._profiles), max(self._peaks)
        profile = _together([one for own, one in self._profiles if _are_alike(own, size)])
        measured = Measured(
            profile=profile,
            duration=min(durations := _durations(self._times, size)),
            spread=spread_of(durations),
            base=self._base,
            link=self._link,
            parents=self._blocks.parents(),
            pager=self._again_if_need_be.pager(profile, self._device),
            on_accelerator=self._device.type != "cpu",
        )
        if self._times_away:
            measured = replace(measured, away=min(self._times_away))
        varies = not _are_alike(min(self._peaks), largest)
        growth = largest / size if varies and size else 1.0
        more = largest - size if varies else 0
        return Outcome(measured, varies, growth, more, self._beside)


def _are_alike(peak: int, other: int) -> bool:
    return max(peak, other) <= _SPREAD * min(peak, other) + _SLACK


def _together(profiles: list[Profile]) -> Profile:
    try:
        return median_of(profiles)
    except RuntimeError:  # the steps ran different operators: plan for the last one
        return profiles[-1]


def _durations(times: list[tuple[int, float]], size: int) -> list[float]:
    """Times of steps in milliseconds, scaled by their size. Callers use the lowest: other work on
    the machine only makes steps slower.
    """
    return [took * size / own if own else took for own, took in times]


class Recording:
    """Measures one step: its time, and its profile if requested."""

    def __init__(self) -> None:
        self._do = Do.TIME
        self._began = 0.0
        self._undo = ExitStack()  # undoes the changes for recording a profile
        self._failed = False

    def begin(self, do: Do) -> None:
        self._do, self._failed = do, False
        devices.wait()
        if do in _RECORDED:
            try:
                _C.begin_profile()
            except RuntimeError:  # torch's profiler runs
                self._failed = True
            else:
                self._undo.callback(self._end_profile)
                _make_way_for_torchs_profiler(self._give_up, self._undo)
        self._began = time.perf_counter()

    def end(self) -> tuple[float, Profile | None] | None:
        """Milliseconds, with a profile if one was requested; None if recording failed."""
        devices.wait()
        duration = (time.perf_counter() - self._began) * 1e3
        self._found: dict[str, Any] | None = None
        self._undo.close()
        if self._do not in _RECORDED:
            return duration, None
        if self._failed or self._found is None:
            return None
        return duration, profile_of(self._found) if self._do is Do.PROFILE else None

    def _end_profile(self) -> None:
        try:
            self._found = _C.end_profile()
        except RuntimeError:  # the recording began on another thread
            self._failed = True

    def _give_up(self) -> None:
        self._undo.close()
        self._failed = True


def _make_way_for_torchs_profiler(give_up: Callable[[], None], undo: ExitStack) -> None:
    """End our profile if the job starts torch's profiler, which cannot run at the same time."""
    module = torch.autograd.profiler
    for name in ("_prepare_profiler", "_enable_profiler"):
        torchs = getattr(module, name)

        def starting(*args: Any, torchs: Any = torchs, **kwargs: Any) -> Any:
            give_up()
            return torchs(*args, **kwargs)

        setattr(module, name, starting)
        undo.callback(setattr, module, name, torchs)
