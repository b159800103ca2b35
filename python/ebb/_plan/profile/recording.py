"""Records steps. In: a step, or the steps of a job. Out: durations and profiles."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from enum import Enum, auto
from typing import Any

import torch

from ebb import _C
from ebb._plan.profile.profile import Profile, median_of, profile_of
from ebb._support import devices
from ebb._support.sizes import whole_number


class Purpose(Enum):
    """The purpose of a measured step."""

    SKIP = auto()  # the first step of a kind takes longer, and makes lasting allocations
    WARM_UP = auto()  # recorded before a profile: see Note [Steps that are measured]
    TIME = auto()
    PROFILE = auto()


_RECORDED = (Purpose.WARM_UP, Purpose.PROFILE)


class Recording:
    """Measures one step at a time: its duration, and its profile if requested. `gives_way`: True if
    the job may start torch's profiler, which ends the recording; False if that raises."""

    def __init__(self, gives_way: bool = False) -> None:
        self._gives_way = gives_way
        self._purpose = Purpose.SKIP
        self._began = 0.0
        self._undo = ExitStack()  # ends the recording of a profile
        self._profile: dict[str, Any] | None = None  # of the last recording; None: it failed

    def begin(self, purpose: Purpose) -> None:
        """Begin a step. Raises a RuntimeError if torch's profiler runs or a profile is recorded."""
        self._purpose, self._profile = purpose, None
        devices.wait()
        if purpose in _RECORDED:
            try:
                _C.begin_profile()
            except RuntimeError:
                if not self._gives_way:
                    raise
            else:
                self._undo.callback(self._end_profile)
                if self._gives_way:
                    _call_before_torchs_profiler(self._give_up, self._undo)
        elif self._gives_way and devices.in_use() is not None and _C.begin_counting():
            self._undo.callback(_C.end_counting)
            _call_before_torchs_profiler(self._give_up, self._undo)
        self._began = time.perf_counter()

    def end(self) -> tuple[float, Profile | None] | None:
        """End the step: milliseconds, with a profile if one was requested; None if the recording
        failed."""
        devices.wait()
        duration = (time.perf_counter() - self._began) * 1e3
        self._undo.close()
        if self._purpose not in _RECORDED:
            return duration, None
        if self._profile is None:
            return None
        return duration, profile_of(self._profile) if self._purpose is Purpose.PROFILE else None

    def _end_profile(self) -> None:
        try:
            self._profile = _C.end_profile()
        except RuntimeError:  # the recording began on another thread
            if not self._gives_way:
                raise

    def _give_up(self) -> None:
        self._undo.close()
        self._profile = None


def _call_before_torchs_profiler(function: Callable[[], None], undo: ExitStack) -> None:
    """Call `function` when torch's profiler starts, until `undo` is closed."""
    module = torch.autograd.profiler
    for name in ("_prepare_profiler", "_enable_profiler"):
        torchs = getattr(module, name)

        def starting(*args: Any, torchs: Any = torchs, **kwargs: Any) -> Any:
            function()
            return torchs(*args, **kwargs)

        setattr(module, name, starting)
        undo.callback(setattr, module, name, torchs)


def run(
    step: Callable[[], object], purposes: Iterable[Purpose]
) -> Iterator[tuple[float, Profile | None]]:
    """Run a step once for each purpose: milliseconds, with a profile if one was requested."""
    recording = Recording()
    for purpose in purposes:
        recording.begin(purpose)
        try:
            step()
        finally:
            ended = recording.end()
        assert ended is not None
        yield ended


def profile(step: Callable[[], object], *, steps: int = 3, warmup: int = 1) -> Profile:
    """Run a step several times, and record all operators in its regions.

    Operator times are medians over the steps; everything else is from the step whose duration is
    the median. During the recording replays do not run ahead of backward, and torch's profiler
    cannot be started, since ebb uses it.

    Args:
        step: runs a forward with regions, and its backward. Each call must do the same.
        steps: how many steps are recorded.
        warmup: how many steps run before them, since first steps take longer.

    Raises:
        TypeError: ``steps`` or ``warmup`` is no int.
        ValueError: ``steps`` is less than 1, or ``warmup`` is less than 0.
        RuntimeError: the calls of ``step`` ran different operators; or a profile is being recorded
            already; or torch's profiler runs.

    Examples:
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
        >>> x = torch.ones(2, 8)
        >>> def step():
        ...     with ebb.region(ebb.policies.save_all):
        ...         loss = net(x).sum()
        ...     loss.backward()
        >>> [operator.func_name for operator in ebb.profile(step).operators][:2]
        ['aten::addmm.default', 'aten::gelu.default']
    """
    whole_number("steps", steps, least=1)
    whole_number("warmup", warmup)
    purposes = [Purpose.WARM_UP] * warmup + [Purpose.PROFILE] * steps
    return median_of([profile for _, profile in run(step, purposes) if profile is not None])
