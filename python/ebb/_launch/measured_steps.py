"""Measures a job's own steps: what a plan is made from."""

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
    """What is done with a step beside running it."""

    NOTHING = auto()  # the first step of a kind takes longer, and allocates what stays
    LISTEN = auto()  # likewise, before a profile
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
_MOST_AGAIN = 20  # steps that did not count, before there is no plan
_SPREAD, _SLACK = 1.02, 4096  # peaks that differ by less, and by fewer bytes, are the same


def number_of_steps(models: Iterable[torch.nn.Module]) -> int:
    """How many are measured at most, with the one that runs already."""
    return 1 + len(_RECOMPUTED) + _steps_away(device_of(models))


def _steps_away(device: torch.device) -> int:
    return len(_AWAY) if may_send(device) else 0


class NoPlanError(Exception):
    """There can be no plan; the message says why."""


@dataclass(frozen=True)
class Outcome:
    """What all steps together gave.

    Attributes:
        measured: for a plan.
        varies: whether steps allocate now more, now less.
        growth: how much more the largest step allocated than the one that was recorded.
        more: the same in bytes: at least so much more would the step without regions have taken.
        beside: bytes of the program's other tensors, which are not in ``measured.base``.
    """

    measured: Measured
    varies: bool
    growth: float
    more: int
    beside: int


class Measuring:
    """Goes through the steps that are measured, one at each boundary.

    Args:
        blocks: whose policies it sets.
        optimizers: those of the job, when asked.
        budget: bytes, all told, or a share.
        beside: bytes of the program's other tensors when steps were first measured; None: this is
            the first time. If they have grown since, the growth is part of what a budget counts.
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
        self._transfers = ExitStack()  # of how values leave in a step that shows it
        # Peaks of all measured steps but the first, which allocates gradients and optimizer states.
        self._peaks: list[int] = []
        self._is_first = True
        self._begin_anew()
        self._again = 0  # steps that did not count
        self._ahead = 0  # regions that are replayed ahead otherwise

    def _begin_anew(self) -> None:
        self._todo = list(_RECOMPUTED)
        self._is_away = False  # the steps in which all is recomputed have been
        self._profiles: list[tuple[int, Profile]] = []  # with the most bytes of their steps
        self._times: list[tuple[int, float]] = []
        self._times_away: list[float] = []
        self._base = self._beside = 0
        self._like: int | None = None  # how often a step calls blocks
        self._unlike: int | None = None  # how often the last step did that was not like that

    def begin(self) -> None:
        """A step begins, the first that is measured."""
        self._ahead = ahead.configure()["regions"]
        ahead.configure(regions=0)  # what a replay takes is measured, not what is left to be seen
        self._device = device_of(self._blocks.roots())
        self._link = measure_link(self._device)
        self._again_if_need_be = StepsThatRunAgain()
        self._peaks, self._is_first = [], True
        self._begin_anew()
        self._blocks.watch_callers()
        self._blocks.put(recompute_all)
        self._prepare()

    def step_ended(self, calls: int, peak: int) -> Outcome | None:
        """And another begins.

        Args:
            calls: of blocks with gradients.
            peak: the most bytes that the step allocated.

        Returns:
            What was found, if that was the last one.

        Raises:
            NoPlanError: the steps differ too much.
            NothingToPlanError: they call no block.
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
        """How many steps are yet to be measured, at most."""
        return len(self._todo) + (0 if self._is_away else _steps_away(self._device))

    def stop(self) -> None:
        """Nothing is measured any more."""
        self._recording.end()
        self._blocks.callers_seen()
        self._transfers.close()
        if self._is_away:  # the device is done with all copies: the engine frees what they held
            _C.offload_stats()
        if ahead.configure()["regions"] == 0:  # nobody has said anything else meanwhile
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
        """Whether a step is like those before. Of two that are not, the second is the measure."""
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
    except RuntimeError:  # they ran other operators: a plan is made for one of them
        return profiles[-1]


def _durations(times: list[tuple[int, float]], size: int) -> list[float]:
    """Milliseconds of steps, in proportion to their size. The least counts: other work of the
    machine only makes a step longer.
    """
    return [took * size / own if own else took for own, took in times]


class Recording:
    """One step: how long it takes, and, if that is asked for, its profile."""

    def __init__(self) -> None:
        self._do = Do.TIME
        self._began = 0.0
        self._undo = ExitStack()  # of what is in place while a profile is recorded
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
        """Milliseconds, and a profile if there was to be one; None if there is none."""
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
        except RuntimeError:  # it began on another thread
            self._failed = True

    def _give_up(self) -> None:
        self._undo.close()
        self._failed = True


def _make_way_for_torchs_profiler(give_up: Callable[[], None], undo: ExitStack) -> None:
    """A profile of ours ends if the job starts torch's profiler, which cannot run beside it."""
    module = torch.autograd.profiler
    for name in ("_prepare_profiler", "_enable_profiler"):
        torchs = getattr(module, name)

        def starting(*args: Any, torchs: Any = torchs, **kwargs: Any) -> Any:
            give_up()
            return torchs(*args, **kwargs)

        setattr(module, name, starting)
        undo.callback(setattr, module, name, torchs)
