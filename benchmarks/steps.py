"""Step time of every system on every workload, as a ratio to eager, gradients compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from systems import EAGER, System
from timing import Trial, interleaved, time_step
from torch import Tensor
from workloads import Workload

Row = dict[str, Any]


def state_after_step(
    workload: Workload, system: System
) -> tuple[list[Tensor | None], list[Tensor]]:
    """The gradients of one step, and the buffers after it, which are set back."""
    before = [buffer.clone() for buffer in workload.buffers]
    workload.clear_gradients()
    workload.step(system.run)
    gradients = [leaf.grad for leaf in workload.leaves]
    workload.clear_gradients()
    buffers = [buffer.clone() for buffer in workload.buffers]
    for buffer, value in zip(workload.buffers, before, strict=True):
        buffer.copy_(value)
    return gradients, buffers


def equal(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(ours, theirs, strict=True)
    )


def check_exactness(workload: Workload, systems: Sequence[System]) -> dict[str, str]:
    """Compares every system with eager, bit for bit.

    Returns:
        For each system what is different although the gradients are right; empty if nothing is.

    Raises:
        SystemExit: a system gives other gradients than eager.
    """
    gradients, buffers = state_after_step(workload, EAGER)
    notes = {}
    for system in systems:
        found, found_buffers = state_after_step(workload, system)
        if not equal(found, gradients):
            raise SystemExit(f"{system.name} gives other gradients than eager on {workload.name}")
        notes[system.name] = "" if equal(found_buffers, buffers) else "buffers differ from eager's"
    return notes


def time_steps(
    make: Callable[[], Workload], systems: Sequence[System], seconds: float, rounds: int
) -> list[Row]:
    """One row for each system: the least and the median time of a step, and ratios to eager."""
    torch.manual_seed(0)
    workload = make()
    notes = check_exactness(workload, systems)
    device = workload.leaves[0].device

    def trial(system: System) -> Trial:
        def run() -> dict[str, float]:
            workload.clear_gradients()
            return time_step(lambda: workload.step(system.run), device)

        return run

    times = interleaved({s.name: trial(s) for s in systems}, seconds, rounds)
    eager = times[EAGER.name]["step"]
    return [
        {
            "workload": workload.name,
            "system": system.name,
            "family": system.family,
            "ratio": times[system.name]["step"].least / eager.least,
            "ratio_of_medians": times[system.name]["step"].median / eager.median,
            "seconds": times[system.name]["step"].least,
            "median_seconds": times[system.name]["step"].median,
            "steps": times[system.name]["step"].trials,
            "note": notes[system.name],
        }
        for system in systems
    ]
