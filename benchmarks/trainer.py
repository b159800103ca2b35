"""An ordinary Hugging Face Trainer script, unchanged, with and without ebb's variables.

    python benchmarks/trainer.py
    python benchmarks/trainer.py --rounds 5 --steps 10

Each round runs the script once with each set of variables, in a process of its own; the lowest time
counts. The exit status is 1 if a loss or a gradient norm differs from that of the run without ebb,
or if a goal is missed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from environment import environment, publish, quick
from report import environment_line, table

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))
from ebb_tests.frameworks.unchanged_script import run  # noqa: E402

SCRIPT = ROOT / "integration" / "transformers" / "train.py"
CHECKPOINTED = "--gradient-checkpointing"
BLOCKS = {"EBB_MODULES": "*layers.*"}
# For each way to run the script: its arguments and environment variables.
WAYS: dict[str, tuple[list[str], dict[str, str]]] = {
    "plain": ([], {}),
    "gradient checkpointing": ([CHECKPOINTED], {}),
    "gradient checkpointing, EBB=1": ([CHECKPOINTED], {"EBB": "1"}),
    "gradient checkpointing, EBB=1 EBB_AHEAD=1": (
        [CHECKPOINTED],
        {"EBB": "1", "EBB_AHEAD": "1"},
    ),
    "EBB=recompute_all EBB_MODULES": ([], {"EBB": "recompute_all"} | BLOCKS),
    "EBB=save_matmuls EBB_MODULES": ([], {"EBB": "save_matmuls"} | BLOCKS),
}


def measure(rounds: int, steps: int) -> list[dict[str, Any]]:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, (arguments, variables) in WAYS.items():
            found[name].append(run(SCRIPT, *arguments, "--steps", str(steps), **variables))
    plain = found["plain"][0]
    return [
        {
            "way": name,
            "step_seconds": min(one["seconds"] for one in all_runs) / steps,
            "peak_mib": min(one["peak_mib"] for one in all_runs),
            "identical": all(
                (one["losses"], one["norms"]) == (plain["losses"], plain["norms"])
                for one in all_runs
            ),
        }
        for name, all_runs in found.items()
    ]


def goals(rows: list[dict[str, Any]]) -> dict[str, bool]:
    plain, torchs, taken, ahead, modules, _ = rows
    saved = plain["peak_mib"] - torchs["peak_mib"]
    return {
        "EBB=1 is faster than gradient checkpointing": taken["step_seconds"]
        < torchs["step_seconds"],
        "EBB_AHEAD=1 costs at most 5 % of plain": ahead["step_seconds"]
        <= 1.05 * plain["step_seconds"],
        "EBB=1 holds no more (1 % for its library)": taken["peak_mib"] <= 1.01 * torchs["peak_mib"],
        "EBB_MODULES saves as much memory (to 3 %)": plain["peak_mib"] - modules["peak_mib"]
        >= 0.97 * saved,
        "losses and gradient norms are identical": all(row["identical"] for row in rows),
    }


def page(found: dict[str, Any]) -> str:
    rows = found["rows"]
    plain = rows[0]["step_seconds"]
    lines = [
        "# A Hugging Face Trainer script, unchanged",
        "",
        f"{environment_line(found['environment'])}. Written by `benchmarks/trainer.py`.",
        "",
        "`integration/transformers/train.py`, a small Llama; peak resident memory of the process.",
        "",
        table(
            ["", "s a step", "of plain", "peak MiB", "losses and norms"],
            (
                [
                    row["way"],
                    f"{row['step_seconds']:.2f}",
                    f"{row['step_seconds'] / plain:.2f}",
                    f"{row['peak_mib']:.0f}",
                    "identical" if row["identical"] else "DIFFER",
                ]
                for row in rows
            ),
        ),
        "",
        *(f"* {what}: {'yes' if met else '**no**'}" for what, met in found["goals"].items()),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1 if quick() else 3)
    parser.add_argument("--steps", type=int, default=1 if quick() else 6)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    rows = measure(options.rounds, options.steps)
    found = {"environment": environment(), "rows": rows, "goals": goals(rows)}
    publish(found, page(found), None if quick() else options.output, "trainer")
    return 0 if all(found["goals"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
