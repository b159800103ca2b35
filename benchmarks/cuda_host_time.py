"""Host time of training steps on CUDA's path, on a machine without a GPU.

    PYTHONPATH=tests python -m ebb_tests.dry_cuda benchmarks/cuda_host_time.py --output results

The dry CUDA runtime (tests/ebb_tests/dry_cuda) needs a CUDA build of torch. Its kernels do nothing,
and a launch costs less than a real one, so ratios are larger than on a GPU. The time is processor
time of all threads, so what other processes take does not count. Gradients have no values here:
`benchmarks/run.py` compares them.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch reads it on import

import torch
from environment import environment, quick
from report import environment_line, number, table, write_results
from systems import EAGER, System, all_systems
from timing import Trial, interleaved
from torch import Tensor
from workloads import Block, Workload, blocks_in_turn, chain_256, llama_tiny

from ebb_tests import dry_cuda
from ebb_tests.dry_cuda.models import BATCH, LENGTH, WIDTH
from ebb_tests.dry_cuda.models import Block as GPTBlock


def gpt() -> Workload:
    x = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    blocks: list[Any] = [GPTBlock() for _ in range(1 if quick() else 24)]
    return blocks_in_turn("GPT, 24 blocks", blocks, x)


def twice(block: Block, *inputs: Tensor) -> Tensor:
    """Eager, after a forward without autograd whose results are dropped."""
    with torch.inference_mode():
        block(*inputs)
    return block(*inputs)


def trial(system: System, workload: Workload) -> Trial:
    def run() -> dict[str, float]:
        workload.clear_gradients()
        torch.cuda.synchronize()
        start = time.process_time()
        workload.step(system.run)
        return {"step": time.process_time() - start}

    return run


def measure(make: Callable[[], Workload], seconds: float) -> dict[str, Any]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        workload = make()
    systems = [system for system in all_systems() if not system.name.endswith("ahead")]
    systems.append(System("eager, and the forward again without autograd", "", twice))
    workload.clear_gradients()
    before = dry_cuda.launches()
    EAGER.step(workload)
    launches = dry_cuda.launches() - before
    times = interleaved({s.name: trial(s, workload) for s in systems}, seconds)
    # The least depends on which system meets the machine's few fastest moments.
    medians = {name: phases["step"].median for name, phases in times.items()}
    ratios = {name: value / medians[EAGER.name] for name, value in medians.items()}
    print(workload.name, {name: round(ratio, 3) for name, ratio in ratios.items()}, flush=True)
    return {"launches": launches, "eager_seconds": medians[EAGER.name], "ratios": ratios}


def page(found: dict[str, Any]) -> str:
    workloads = found["workloads"]
    systems = list(next(iter(workloads.values()))["ratios"])
    body = [
        [system, *(number(row["ratios"][system]) for row in workloads.values())]
        for system in systems
    ]
    body.append(["eager, us", *(f"{row['eager_seconds'] * 1e6:.0f}" for row in workloads.values())])
    body.append(["eager, kernels", *(str(row["launches"]) for row in workloads.values())])
    return "\n".join(
        [
            "# Host time on CUDA's path",
            "",
            f"{environment_line(found['environment'])}. Written by `benchmarks/cuda_host_time.py`.",
            "",
            "Processor time of forward and backward over eager's (ratio of medians), with torch's "
            "own CUDA dispatch, allocator and autograd threads, on a runtime whose kernels do "
            "nothing (see tests/ebb_tests/dry_cuda). A launch costs less here than on a GPU, so "
            "ratios are larger than there.",
            "",
            table(["", *workloads], body),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="folder for the results; default: none")
    parser.add_argument("--seconds", type=float, default=30, help="time for each model")
    options = parser.parse_args()
    if not dry_cuda.is_loaded():
        parser.error("run it as the first lines of this file say")
    torch.set_num_threads(1)
    makes = {
        "Llama block, tiny": llama_tiny,
        "256 ops on 4 x 8": chain_256,
        "GPT, 24 blocks": gpt,
    }
    found = {
        "workloads": {name: measure(make, options.seconds) for name, make in makes.items()},
        "environment": environment(),
    }
    print(page(found))
    if options.output is not None:
        write_results(options.output / "dry-cuda-host-time", found, page(found))


if __name__ == "__main__":
    main()
