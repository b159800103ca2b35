"""Measures ebb's cost outside of any region: the same eager program with and without ebb.

An import cannot be undone, so each timing runs in a process of its own. Processes with and without
ebb take turns. As a script, this file is one such process:

    python benchmarks/outside.py {with,without} SECONDS
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any


def measure_outside(pairs: int, seconds: float) -> dict[str, Any]:
    """Times a step of the tiny Llama block in `pairs` pairs of processes.

    Returns:
        For each variant, the shortest step of each process in seconds. ``ratio`` divides the minima
        of these, ``ratio_of_medians`` their medians. ``noise`` shows how much equal processes
        differ: the longest over the shortest of the processes without ebb.
    """
    minima: dict[str, list[float]] = {"with": [], "without": []}
    for pair in range(pairs):
        for variant in sorted(minima, reverse=pair % 2 == 1):
            command = [sys.executable, str(Path(__file__).resolve()), variant, str(seconds)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            minima[variant].append(json.loads(output.splitlines()[-1]))
    return {
        **minima,
        "ratio": min(minima["with"]) / min(minima["without"]),
        "ratio_of_medians": (
            statistics.median(minima["with"]) / statistics.median(minima["without"])
        ),
        "noise": max(minima["without"]) / min(minima["without"]),
    }


def time_this_process(variant: str, seconds: float) -> float:
    import torch
    from timing import interleaved, time_step
    from workloads import llama_tiny, run_directly

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if variant == "with":
        import ebb

        with ebb.region():
            torch.ones(2, requires_grad=True).exp().sum().backward()  # type: ignore[no-untyped-call]
    assert ("ebb" in sys.modules) == (variant == "with")
    workload = llama_tiny()
    cpu = torch.device("cpu")

    def trial() -> dict[str, float]:
        workload.clear_gradients()
        return time_step(lambda: workload.step(run_directly), cpu)

    return interleaved({"eager": trial}, seconds)["eager"]["step"].least


if __name__ == "__main__":
    print(json.dumps(time_this_process(sys.argv[1], float(sys.argv[2]))))
