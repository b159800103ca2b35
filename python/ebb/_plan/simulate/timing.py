"""Times of regions and replays. In: a measured step. Out: a `Timing`, fitted to this step."""

from __future__ import annotations

from dataclasses import dataclass

from ebb._plan.simulate.step import Step

RECORDING = 0.001  # milliseconds that a region adds to each operator
_SLOWEST = 0.1  # maximum milliseconds that a replay takes in addition to its kernel


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a step, and of replays."""

    eager: float = 0.0  # duration of the step without regions
    replay_scale: float = 1.0  # ratio of a replay's time to its kernel's time in forward
    replay_overhead: float = 0.0  # time that a replay takes in addition
    copy_slowdown: float = 0.0  # by which each offloaded byte slows the work, out and back together

    def of_replays(self, kernels: float, replays: int = 1) -> float:
        """Time of replays whose kernels took this long in forward."""
        return kernels * self.replay_scale + replays * self.replay_overhead


def fitted(step: Step, duration: float, kernels: float, replays: int) -> Timing:
    """Fit to the step that recomputed everything: the overhead of a replay, or the ratio of its
    time to the kernel's time in forward.

    Args:
        duration: of the step without recording.
        kernels: time in forward of the kernels that the step recomputed.
        replays: how many operators it recomputed.
    """
    took = step.replaying
    eager = duration - took - RECORDING * len(step.operators)
    if eager < kernels:  # the machine was slower during the recording
        eager = duration * (1 - took / step.duration)
    scale, overhead = 1.0, 0.0
    if replays and took >= kernels:
        overhead = min((took - kernels) / replays, _SLOWEST)
    elif replays and kernels > 0:
        scale = max(took / kernels, 0.25)
    return Timing(eager, scale, overhead)
