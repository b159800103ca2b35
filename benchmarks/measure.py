"""Timing several systems against eager, and counting bytes; shared by the benchmarks."""

from __future__ import annotations

import json
import os
import platform
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import ebb

Step = Callable[[], torch.Tensor]  # runs forward, returns the loss


def processor() -> str:
    """The processor's name, as results are filed under it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def interleaved_minima(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Seconds per call: the least over `rounds` rounds, in each of which every step runs once.

    In a new order each round: who runs after a system that leaves cold caches or garbage behind
    would pay for it every time.
    """
    order = list(steps.items())
    shuffle = random.Random(0).shuffle
    for step in steps.values():
        for _ in range(10):
            step()
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(rounds):
        shuffle(order)
        for name, step in order:
            start = time.perf_counter()
            step()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def held_and_peak_bytes(forward: Step) -> tuple[int, int]:
    """Bytes alive between forward and backward, and the most alive at any time, on the CPU.

    From the profiler's record of every allocation (positive) and release (negative).
    """
    forward().backward()  # gradients exist before, so they count on neither side
    boundary = "ebb.benchmark.backward"
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = forward()
        with record_function(boundary):
            loss.backward()
    held = peak = now = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
        elif event.name() == boundary:
            held = now
    return held, peak


def environment() -> dict[str, Any]:
    return {
        "processor": processor(),
        "torch": torch.__version__,
        "ebb": ebb.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }


def write_results(name: str, rows: list[dict[str, Any]]) -> Path:
    """Writes benchmarks/results/<name>-<processor>.json."""
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    slug = "".join(c if c.isalnum() else "-" for c in processor()).strip("-").lower()
    path = folder / f"{name}-{slug}.json"
    path.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=2) + "\n")
    return path


def quick() -> bool:
    """EBB_BENCH_QUICK=1: fewer rounds, to try the benchmark itself."""
    return os.environ.get("EBB_BENCH_QUICK") == "1"
