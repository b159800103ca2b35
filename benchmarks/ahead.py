"""Measures steps with replays ahead of backward against ebb without them and against other tools.

    OMP_NUM_THREADS=1 python benchmarks/ahead.py
    OMP_NUM_THREADS=1 python benchmarks/ahead.py --only Llama --seconds 10

All systems may use the same cores, and take turns in one process. Gradients are compared with
eager's, bit for bit. With as many intra-op threads as cores, replays run ahead only if backward
leaves a core idle. The goal for this case: at most 2 % longer than without replays ahead. The exit
status is 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from environment import device, environment, publish, quick
from held_bytes import most_bytes_ahead
from report import environment_line, table
from steps import equal, trial
from systems import RECOMPUTE_ALL, System, all_systems
from timing import interleaved
from torch import Tensor
from workloads import LlamaBlock, PreNormBlock, Workload, blocks_in_turn

import ebb

ROOT = Path(__file__).resolve().parents[1]
AHEAD = "ebb recompute_all, ahead"
WITHOUT = "ebb recompute_all"
ALLOWED_WHERE_BUSY = 1.02  # step time over the time without replays ahead, if no core is idle


DEMO_PROGRAM = ROOT / "examples" / "train_gpt.py"
DEMO = "ebb recompute_all ahead"  # in examples/train_gpt.py
DEMO_WITHOUT = "ebb recompute_all"
DEMO_GOAL = 1.05


@dataclass(frozen=True)
class Case:
    """A program, and the goal: the longest allowed step with replays ahead, over eager's."""

    make: Callable[[], Workload]
    goal: float


def pre_norm(count: int, width: int) -> Callable[[], Workload]:
    def make() -> Workload:
        x = torch.randn(2, 128, width, requires_grad=True)
        blocks = [PreNormBlock(width) for _ in range(count)]
        return blocks_in_turn(f"{count} pre-LN blocks, width {width}", blocks, x)

    return make


def llama(count: int) -> Callable[[], Workload]:
    def make() -> Workload:
        x = torch.randn(1, 4, 16, requires_grad=True)
        blocks = [LlamaBlock(16, heads=2, hidden=32) for _ in range(count)]
        angles = torch.randn(4, 8), torch.randn(4, 8)
        return blocks_in_turn(f"{count} tiny Llama block{'s'[: count - 1]}", blocks, x, *angles)

    return make


CASES = [
    Case(pre_norm(4, 512), 1.03),
    Case(pre_norm(12, 512), 1.015),
    Case(pre_norm(4, 64), 1.08),
    Case(llama(1), 1.15),
    Case(llama(4), 1.15),
]
SYSTEMS = [
    system
    for system in all_systems()
    if system.name in ("eager", AHEAD)
    or (system.family == RECOMPUTE_ALL and "reentrant" not in system.name)
]


def gradients(workload: Workload, system: System) -> list[Tensor | None]:
    workload.clear_gradients()
    system.step(workload)
    found = [leaf.grad for leaf in workload.leaves]
    workload.clear_gradients()
    return found


def held_by_a_region(workload: Workload) -> int:
    """The most bytes that a region around one block drops in forward and recomputes."""
    ebb.reset_stats()
    numbers = iter(range(1 << 20))

    def run(block: Any, *inputs: Tensor) -> Tensor:
        with ebb.region(ebb.policies.recompute_all, f"block {next(numbers)}"):
            return block(*inputs)

    workload.step(run)
    workload.clear_gradients()
    return max(region["bytes_dropped"] for region in ebb.stats()["regions"].values())


def measure(case: Case, seconds: float) -> dict[str, Any]:
    torch.manual_seed(0)
    with device():
        workload = case.make()
    expected = gradients(workload, SYSTEMS[0])
    for system in SYSTEMS * 3:
        if not equal(gradients(workload, system), expected):
            raise SystemExit(f"{system.name} gives other gradients than eager on {workload.name}")

    before = ebb.stats()["ahead"]
    trials = {system.name: trial(system, workload, device()) for system in SYSTEMS}
    times = interleaved(trials, 0 if quick() else seconds, 1 if quick() else 5)
    gc.collect()
    after = ebb.stats()["ahead"]
    eager = times["eager"]["step"]
    return {
        "workload": workload.name,
        "goal": case.goal,
        "seconds": eager.least,
        "ratios": {name: phases["step"].least / eager.least for name, phases in times.items()},
        "ratios_of_medians": {
            name: phases["step"].median / eager.median for name, phases in times.items()
        },
        "did": {name: after[name] - before[name] for name in after if name.startswith("regions_")},
        "most_bytes": most_bytes_ahead(workload, SYSTEMS[-1]),
        "bytes_of_a_region": held_by_a_region(workload),
    }


def where_busy(seconds: float) -> dict[str, float]:
    """Step time with replays ahead over step time without, with as many threads as cores."""
    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)
    try:
        rows = [measure(case, seconds) for case in (CASES[0], CASES[2])]
    finally:
        torch.set_num_threads(threads)
    found = {row["workload"]: row["ratios"][AHEAD] / row["ratios"][WITHOUT] for row in rows}
    steps = demo(threads=cores)
    return found | {"the demo": steps[DEMO] / steps[DEMO_WITHOUT]}


def demo(threads: int | None = None) -> dict[str, float]:
    """Step time of each policy of the demo over eager's. `threads` None: as in the environment."""
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        steps = "2" if quick() else "100"
        command = [sys.executable, str(DEMO_PROGRAM), "--steps", steps, "--json", str(figures)]
        variables = os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
        null = subprocess.DEVNULL
        subprocess.run(command, env=variables, check=True, stdout=null, stderr=null)
        return {row["policy"]: row["time_ratio"] for row in json.loads(figures.read_text())["rows"]}


def goals(found: dict[str, Any]) -> dict[str, bool]:
    met = {
        f"{row['workload']}: {row['ratios'][AHEAD]:.3f}, at most {row['goal']}": row["ratios"][
            AHEAD
        ]
        <= row["goal"]
        for row in found["rows"]
    }
    for row in found["rows"]:
        text = f"{row['workload']}: at most one region's bytes ({row['bytes_of_a_region']:,})"
        met[text] = row["most_bytes"] <= row["bytes_of_a_region"]
    demo = found["demo"][DEMO]
    met[f"the demo's training step: {demo:.3f}, at most {DEMO_GOAL}"] = demo <= DEMO_GOAL
    for name, ratio in found["where_busy"].items():
        text = f"as many threads as cores, {name}: {ratio:.3f} of the time without, at most "
        met[f"{text}{ALLOWED_WHERE_BUSY}"] = ratio <= ALLOWED_WHERE_BUSY
    return met


def page(found: dict[str, Any]) -> str:
    names = [system.name for system in SYSTEMS]
    rows = [
        [
            row["workload"],
            f"{row['seconds'] * 1e3:.2f}",
            *(
                f"{row['ratios'][name]:.3f} [{row['ratios_of_medians'][name]:.3f}]"
                for name in names[1:]
            ),
            f"{row['most_bytes']:,}",
            f"{row['bytes_of_a_region']:,}",
        ]
        for row in found["rows"]
    ]
    head = ["", "eager, ms", *names[1:], "bytes ahead", "bytes of a region"]
    lines = [
        "# Replays ahead of backward",
        "",
        f"{environment_line(found['environment'])}. Written by `benchmarks/ahead.py`.",
        "",
        "A step's least time as a multiple of eager's; in brackets, medians. Bytes ahead: there "
        "before backward needs them, at most.",
        "",
        table(head, rows),
        "",
        "The demo (`make demo`), whole training steps: "
        + ", ".join(f"{name} {ratio:.2f}" for name, ratio in found["demo"].items()),
        "",
        *(f"* {what}: {'yes' if met else '**no**'}" for what, met in found["goals"].items()),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    chosen = [case for case in CASES if options.only.lower() in case.make().name.lower()]
    found = {
        "environment": environment(),
        "rows": [measure(case, options.seconds) for case in chosen],
        "demo": demo(),
        "where_busy": where_busy(options.seconds),
    }
    found["goals"] = goals(found)
    folder = None if quick() or options.only else options.output
    publish(found, page(found), folder, "ahead")
    return 0 if all(found["goals"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
