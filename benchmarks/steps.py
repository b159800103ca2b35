"""Step time and bytes of every system on every workload, gradients compared with eager's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from held_bytes import held_and_peak_on_cpu, held_and_peak_on_cuda
from systems import EAGER, System
from timing import Trial, interleaved, time_step
from torch import Tensor
from workloads import Workload

Row = dict[str, Any]


def state_after_step(
    workload: Workload, system: System
) -> tuple[list[Tensor | None], list[Tensor]]:
    """Gradients and buffers after one step. Restores the buffers, clears the gradients."""
    before = [buffer.clone() for buffer in workload.buffers]
    workload.clear_gradients()
    system.step(workload)
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
        For each system a note if buffers differ from eager's, otherwise an empty string.

    Raises:
        SystemExit: a system gives other gradients than eager.
    """
    # By default, some GPU kernels sum in another order each time.
    torch.use_deterministic_algorithms(workload.device.type == "cuda")
    gradients, buffers = state_after_step(workload, EAGER)
    notes = {}
    for system in systems:
        found, found_buffers = state_after_step(workload, system)
        if not equal(found, gradients):
            raise SystemExit(f"{system.name} gives other gradients than eager on {workload.name}")
        notes[system.name] = "" if equal(found_buffers, buffers) else "buffers differ from eager's"
    torch.use_deterministic_algorithms(False)
    return notes


def trial(system: System, workload: Workload, device: torch.device) -> Trial:
    """Times a step of the workload under the system."""

    def run() -> dict[str, float]:
        workload.clear_gradients()
        with system.during():
            return time_step(lambda: workload.step(system.run), device)

    return run


def measure_steps(
    make: Callable[[], Workload],
    device: torch.device,
    systems: Sequence[System],
    seconds: float,
    rounds: int,
) -> list[Row]:
    """One row for each system: shortest and median step time, ratios to eager, bytes."""
    torch.manual_seed(0)
    with device:
        workload = make()
    notes = check_exactness(workload, systems)

    times = interleaved({s.name: trial(s, workload, device) for s in systems}, seconds, rounds)
    eager = times[EAGER.name]["step"]
    memory = held_and_peak_on_cuda if device.type == "cuda" else held_and_peak_on_cpu
    return [
        {
            "workload": workload.name,
            "system": system.name,
            "family": system.family,
            "ratio": phases["step"].least / eager.least,
            "ratio_of_medians": phases["step"].median / eager.median,
            "seconds": phases["step"].least,
            "median_seconds": phases["step"].median,
            "steps": phases["step"].trials,
            # On a GPU: the time until the last kernel is launched.
            **({"host_seconds": phases["host"].least} if "host" in phases else {}),
            **memory(workload, system),
            "note": notes[system.name],
        }
        for system, phases in ((system, times[system.name]) for system in systems)
    ]
