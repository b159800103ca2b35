"""Bytes that a step holds between forward and backward, and the most that are alive at any time."""

from __future__ import annotations

import gc
from typing import Any

import torch
from systems import System
from torch.profiler import ProfilerActivity, profile, record_function
from workloads import Workload

BOUNDARY = "ebb.benchmark.backward"


def held_and_peak_on_cpu(workload: Workload, system: System) -> dict[str, int]:
    """From the profiler's record of every allocation (positive) and release (negative).

    Gradients exist before, so they count on neither side.
    """
    workload.step(system.run)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = workload.forward(system.run)
        with record_function(BOUNDARY):
            loss.backward()  # type: ignore[no-untyped-call]
        del loss
    assert profiler.profiler is not None
    events: Any = profiler.profiler.kineto_results
    held = peak = now = 0
    for event in sorted(events.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
        elif event.name() == BOUNDARY:
            held = now
    return {"held_bytes": held, "peak_bytes": peak}


def held_and_peak_on_cuda(workload: Workload, system: System) -> dict[str, int]:
    """From the caching allocator: bytes above those of the parameters and their gradients."""
    workload.step(system.run)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = workload.forward(system.run)
    held = torch.cuda.memory_allocated() - before
    loss.backward()  # type: ignore[no-untyped-call]
    del loss
    torch.cuda.synchronize()
    return {
        "held_bytes": held,
        "peak_bytes": torch.cuda.max_memory_allocated() - before,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }
