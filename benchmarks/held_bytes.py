"""Bytes that a step holds between forward and backward, and its peak memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from systems import RECOMPUTE_ALL_AHEAD, System
from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function
from workloads import Block, Workload

import ebb

BOUNDARY = "ebb.benchmark.backward"


def held_and_peak_on_cpu(workload: Workload, system: System) -> dict[str, int]:
    """Measures with torch's profiler, which records each allocation and release.

    The bytes do not include gradients, since these exist before the step. The profiler records
    only this thread. With replays ahead, the peak is the sum of two parts: the peak of this thread
    without replays ahead, and the largest number of bytes that replays ahead hold.
    """
    with system.during():
        found = held_and_peak_of_this_thread(workload, system)
    if system.family == RECOMPUTE_ALL_AHEAD:
        without = held_and_peak_of_this_thread(workload, system)
        found["peak_bytes"] = without["peak_bytes"] + most_bytes_ahead(workload, system)
    return found


def most_bytes_ahead(workload: Workload, system: System) -> int:
    """The most bytes that replays ahead hold at a time, sampled at the end of each block's forward
    and at the start of its backward."""
    most = 0

    def look(*_: object) -> None:
        nonlocal most
        most = max(most, ebb.stats()["ahead"]["bytes"])

    def run(block: Block, *inputs: Tensor) -> Tensor:
        result = system.run(block, *inputs)
        look()
        result.register_hook(look)  # type: ignore[no-untyped-call]
        return result

    with system.during():
        workload.step(run)
    workload.clear_gradients()
    return most


def held_and_peak_of_this_thread(workload: Workload, system: System) -> dict[str, int]:
    workload.step(system.run)
    gc.collect()
    return held_and_peak_of(lambda: workload.forward(system.run))


def held_and_peak_of(forward: Callable[[], Tensor]) -> dict[str, int]:
    """Measures a step, `forward` and the backward of its loss, with torch's profiler.

    Counts only memory that this thread allocates during the step.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = forward()
        with record_function(BOUNDARY):
            loss.backward()  # type: ignore[no-untyped-call]
        del loss
    assert profiler.profiler is not None
    results: Any = profiler.profiler.kineto_results
    alive: dict[int, int] = {}  # bytes by address
    held = peak = now = 0
    for event in sorted(all_of(results.experimental_event_tree()), key=lambda e: e.start_time_ns):
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            if fields.alloc_size > 0:
                alive[fields.ptr] = fields.alloc_size
                now += fields.alloc_size
                peak = max(peak, now)
            else:
                now -= alive.pop(fields.ptr, 0)
        elif event.name == BOUNDARY:
            held = now
    return {"held_bytes": held, "peak_bytes": peak}


def all_of(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from all_of(event.children)


def held_and_peak_on_cuda(workload: Workload, system: System) -> dict[str, int]:
    """Measures with the caching allocator: bytes above parameters and their gradients."""
    system.step(workload)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with system.during():
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
