"""Measures the cost of counting the bytes of each step, for a job with a budget on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

from environment import quick
from planner_models import make

import ebb
from ebb._launch.step_memory_monitor import StepMemory

MODEL = "GPT"
MOST = 0.002  # largest cost, as a share of a step
ROUNDS = 3 if quick() else 30
SIZES = (64, 4096, 1 << 20)  # bytes; ebb keeps the size of the largest in a table

# A program that times allocations. It has its own process, since counting cannot be disabled.
ALLOCATING = f"""
import json, sys, time, torch, ebb
if sys.argv[1] == "counted":
    ebb._C.use_counting_allocator()
torch.set_num_threads(1)
found = {{}}
for size in {SIZES}:
    least = 1.0
    for _ in range({ROUNDS}):
        begin = time.perf_counter()
        for _ in range(2000):
            torch.empty(size, dtype=torch.uint8)
        least = min(least, (time.perf_counter() - begin) / 2000)
    found[size] = least
print(json.dumps(found))
"""


def _allocating(how: str) -> dict[int, float]:
    """Seconds of one allocation for each size. `how`: "counted" or "not counted"."""
    command = [sys.executable, "-c", ALLOCATING, how]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {int(size): seconds for size, seconds in json.loads(found).items()}


def measure_watching() -> dict[str, Any]:
    """Time that counting adds to each allocation and each step, and its share of a step."""
    runs = [(_allocating("not counted"), _allocating("counted")) for _ in range(3)]
    more = {
        size: max(0.0, min(c[size] for _, c in runs) - min(p[size] for p, _ in runs))
        for size in SIZES
    }
    model = make(MODEL, quick())
    for _ in range(2):
        model.step()
    durations = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        model.step()
        durations.append(time.perf_counter() - begin)
    allocations = sum(size > 0 for *_, size in ebb.profile(model.step, steps=1).allocations)
    memory, ends = StepMemory(), []
    for _ in range(1000):
        begin = time.perf_counter()
        memory.step_ended()
        ends.append(time.perf_counter() - begin)
    step = min(durations)
    return {
        "model": MODEL,
        "step": step,
        "allocations": allocations,
        "nanoseconds": {str(size): seconds * 1e9 for size, seconds in more.items()},
        "end_of_step": min(ends),
        "share": (allocations * max(more.values()) + min(ends)) / step,
    }


def goals(found: dict[str, Any]) -> dict[str, bool]:
    share = found["share"]
    return {f"counting bytes: {share:.3%} of a step, at most {MOST:.1%}": share <= MOST}


def in_words(found: dict[str, Any]) -> str:
    each = found["nanoseconds"].items()
    more = ", ".join(f"{int(size):,} bytes: {took:.0f} ns" for size, took in each)
    return (
        f"Each allocation of a tensor takes longer ({more}), and the end of a step takes "
        f"{found['end_of_step'] * 1e6:.1f} us. A step of {found['model']} takes "
        f"{found['step'] * 1e3:.0f} ms and allocates {found['allocations']} times."
    )
