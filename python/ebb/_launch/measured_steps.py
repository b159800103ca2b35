"""Measures steps of a running job, and gives the input of a plan.

See Note [Steps that are measured].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from ebb import _C, ahead
from ebb._launch.budgeted import Blocks
from ebb._plan.choose.memory_budget import NothingToPlanError
from ebb._plan.measure import window_of_all
from ebb._plan.profile.measuring import (
    RECOMPUTED,
    Measured,
    MeasureSequence,
    are_alike,
    base_bytes,
    device_of,
    offload_steps,
)
from ebb._plan.profile.profile import without_evaluation
from ebb._plan.profile.recording import Purpose, Recording
from ebb._support import devices
from ebb.policies import recompute_all

_MOST_AGAIN = 20  # maximum number of steps that do not count; more end the measurement


def number_of_steps(models: Iterable[torch.nn.Module]) -> int:
    """Maximum number of measured steps, plus the step that runs already."""
    return 1 + len(RECOMPUTED) + offload_steps(device_of(models))


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
        self._beside_at_first = beside
        self._beside = 0
        self._sequence = MeasureSequence(
            device_of(blocks.roots()),
            lambda measured: window_of_all(measured, budget),
            may_differ=True,
        )
        self._recording = Recording(gives_way=True)
        self._settings = ExitStack()  # settings of OFFLOAD in steps that offload everything
        self._peaks: list[int] = []  # of all measured steps that do not offload everything
        self._uncounted = 0  # steps that did not count
        self._calls: int | None = None  # calls of blocks in a step that counts
        self._other_calls: int | None = None  # `_calls` of the last step, if it did not count
        self._ahead = ahead.configure()["regions"]  # the job's own setting

    def begin(self) -> None:
        """Begin the first measured step."""
        ahead.configure(regions=0)  # replays ahead would hide part of the replay time
        self._sequence.begin()
        self._blocks.around.watch_callers()
        self._put_policy()
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
        self._blocks.around.stop_watching_callers()
        sequence = self._sequence
        window = sequence.window
        if window is None:
            self._peaks.append(peak)
        if self._counts(calls) and ended is not None:
            duration, profile = ended
            if profile is not None and self._blocks.evaluation.has_run:
                profile = without_evaluation(profile)
            sequence.record(duration, profile, peak)
            if sequence.window != window:
                self._put_policy()
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
        if sequence.purpose is not None:
            self._prepare()
            return None
        self.stop()
        return self._outcome()

    def left(self) -> int:
        """Maximum number of steps that are still to be measured."""
        return self._sequence.left()

    def stop(self) -> None:
        """Stop measuring, and restore the job's settings."""
        self._recording.end()
        self._blocks.around.stop_watching_callers()
        self._settings.close()
        if self._sequence.window is not None:
            _C.offload_stats()  # copies have ended: this call makes the engine free their memory
        devices.free_cache()
        if ahead.configure()["regions"] == 0:  # the job has not changed the setting meanwhile
            ahead.configure(regions=self._ahead)

    def _put_policy(self) -> None:
        self._blocks.put(self._sequence.policy)
        devices.free_cache()  # steps with other policies would keep other blocks in the cache

    def _prepare(self) -> None:
        sequence = self._sequence
        self._settings.close()
        self._settings.enter_context(sequence.transfers())
        if sequence.purpose is Purpose.PROFILE:
            base = base_bytes(self._blocks.roots(), self._optimizers())
            self._beside = _C.tensor_bytes()[0] - base
            if self._beside_at_first is not None:
                growth = max(0, self._beside - self._beside_at_first)
                base, self._beside = base + growth, self._beside - growth
            sequence.base = base
        assert sequence.purpose is not None
        self._recording.begin(sequence.purpose)

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
            self._sequence.restart()
            self._blocks.put(recompute_all)
            self._calls, self._other_calls = calls, None
        return False

    def _outcome(self) -> Outcome:
        peaks = self._peaks[1:]  # the first step allocates gradients and optimizer states
        size, largest = self._sequence.peak, max(peaks)
        varies = not are_alike(min(peaks), largest)
        growth = largest / size if varies and size else 1.0
        more = largest - size if varies else 0
        measured = self._sequence.measured(self._blocks.around.parents())
        return Outcome(measured, varies, growth, more, self._beside)
