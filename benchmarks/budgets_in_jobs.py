"""Compares jobs under EBB_BUDGET with eager: bits, bytes of each step, and the printed lines.

    OMP_NUM_THREADS=1 python benchmarks/budgets_in_jobs.py
    OMP_NUM_THREADS=1 python benchmarks/budgets_in_jobs.py --only "gradient*" --lines
    OMP_NUM_THREADS=1 python benchmarks/budgets_in_jobs.py --sections models

Each job runs without ebb, with all blocks recomputed, and under each budget, in one process. Rules:

* All bits are eager's.
* A measured step exceeds the budget only if recomputing all, or an earlier step, needs as much.
* The bytes of a budget such as 40% are this share of eager's peak.
* Under a plan, no three steps in a row exceed the budget, and ebb reports each step that does.
* ebb makes a plan, or prints one line with the reason.

The exit status is 1 if a job breaks a rule.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import resource
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

# Importing these three modules fills KINDS.
from budget_jobs import loops, loops_that_change, loops_with_extras  # noqa: F401
from budget_jobs.job import KINDS, Job
from budget_jobs.judge import bits_that_differ, judge, prediction
from budget_jobs.run import Step, run_job
from environment import environment
from report import table

QUICK = ("plain", "GAN", "growing batch", "optimizer in backward", "short", "memory that grows")
BUDGETS = ("60%", "35%", "75% in bytes")
BUDGETS_OF_MODELS = ("50%", "least")


def survey(
    section: str, name: str, make: Any, budgets: tuple[str, ...], shows_lines: bool
) -> list[dict[str, Any]]:
    """Runs one job eager and under each budget; one row for each budget."""
    rows = []
    eager = run_job(make)
    if eager.error:
        print(f"{name} does not run without ebb: {eager.error}", file=sys.stderr)
        return [{"section": section, "job": name, "budget": "", "broken": ["the job itself"]}]
    all_recomputed = run_job(make, "50%", gives_up=True)
    usual = eager.steps[2:6] or eager.steps or [Step()]
    whole = max(step.most for step in usual) - eager.held
    least = None
    for budget in budgets:
        text = budget
        if budget == "75% in bytes":
            text = str(int(0.75 * whole)) if eager.steps else "4MiB"
        elif budget == "least":
            if least is None:
                continue
            text = str(least + 1)
        run = run_job(make, text)
        least = run.least or least
        broken = judge(make, run, eager, all_recomputed, text)
        if broken and broken[0].startswith("bits") and bits_that_differ(run_job(make), eager):
            broken[0] += " (and of two runs without ebb, too)"
        predicted = prediction(run, eager)
        rows.append(
            {
                "section": section,
                "job": name,
                "budget": budget,
                "text": text,
                "eager": max(step.peak for step in usual),
                "eager_whole": whole,
                "predicted": predicted and predicted[0],
                "measured": predicted and predicted[1],
                "unknown": (run.beside or 0) - run.held if run.beside is not None else 0,
                "plans": sum(
                    step.phase == "planned" and before.phase != "planned"
                    for before, step in zip(run.steps, run.steps[1:], strict=False)
                ),
                "steps": len(run.steps),
                "seconds": run.seconds,
                "seconds_of_eager": eager.seconds,
                "lines": run.lines,
                "broken": broken,
                "error": run.error,
                "of_steps": [asdict(step) for step in run.steps],
                "of_steps_of_eager": [[step.began, step.most] for step in eager.steps],
                "of_steps_all_recomputed": [[s.began, s.most] for s in all_recomputed.steps],
            }
        )
        if broken or shows_lines:
            show(rows[-1])
    return rows


def show(row: dict[str, Any]) -> None:
    print(f"{row['job']}, {row['budget']} ({row['text']}):")
    for what in row["broken"]:
        print(f"  BROKEN: {what}")
    for after, line in row["lines"]:
        print(f"  after {after} steps: {line}")
    if row["error"]:
        print(re.sub("^", "  ", row["error"], flags=re.MULTILINE))
    sys.stdout.flush()


HEAD = ["job", "budget", "eager's peak", "predicted", "measured", "", "plans", "lines", "broken"]


def cells(row: dict[str, Any]) -> list[str]:
    if "text" not in row:
        return [row["job"], *[""] * 7, "; ".join(row["broken"])]
    predicted, measured = row["predicted"], row["measured"]
    return [
        row["job"],
        row["budget"],
        f"{row['eager']:,}",
        f"{predicted:,}" if predicted else "-",
        f"{measured:,}" if predicted else "-",
        f"{measured / predicted - 1:+.2%}" if predicted else "-",
        str(row["plans"]),
        str(len(row["lines"])),
        "; ".join(row["broken"]),
    ]


CHILD = "a process with little address space"
MEBIBYTE = 1 << 20


class Large(Job):
    """Trains with tensors so large that malloc maps the memory of each by itself."""

    steps = 12

    def rows(self, step: int) -> int:
        return 32768


def train_with_little_address_space(more: int) -> None:
    """Runs in the child. `more`: bytes of address space beyond the current use; 0: no limit."""
    torch.set_num_threads(1)
    job = Large()
    if more:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for _ in job.train():
        pass
    print(json.dumps(job.bits))


def survey_child(shows_lines: bool) -> list[dict[str, Any]]:
    """Runs a job under EBB_BUDGET in a child whose memory is too small for an eager step."""
    eager = run_job(Large)
    usual = max(step.peak for step in eager.steps[2:6])

    def child(budget: str, more: int) -> subprocess.CompletedProcess[str]:
        variables = {k: v for k, v in os.environ.items() if not k.startswith("EBB")}
        variables |= {"MALLOC_MMAP_THRESHOLD_": "65536"}
        variables |= {"EBB_BUDGET": budget} if budget else {}
        command = [sys.executable, __file__, "--child", str(more)]
        return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)

    rows = []
    room = int(0.7 * usual) + 24 * MEBIBYTE
    fails = child("", room).returncode != 0
    for budget in ("60%", "35%"):
        found = child(budget, room)
        lines = [(0, line) for line in found.stderr.splitlines() if line]
        broken = []
        if found.returncode:
            broken.append(f"exit status {found.returncode}: {found.stderr[-300:]}")
        elif json.loads(found.stdout) != eager.bits:
            broken.append("bits differ")
        if not any("; predicted peak " in line for _, line in lines):
            broken.append("no plan")
        if not fails:
            broken.append("without ebb it would have done, too")
        rows.append(
            {
                "section": "kinds",
                "job": CHILD,
                "budget": budget,
                "text": budget,
                "eager": usual,
                "predicted": None,
                "measured": None,
                "plans": 1,
                "lines": lines,
                "error": "",
                "broken": broken,
            }
        )
        if broken or shows_lines:
            show(rows[-1])
    return rows


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=["*"], help="globs over names of jobs")
    parser.add_argument("--sections", nargs="+", choices=("kinds", "models"), default=["kinds"])
    parser.add_argument("--quick", action="store_true", help="a few jobs")
    parser.add_argument("--lines", action="store_true", help="show what each run told")
    parser.add_argument("--output", type=Path, help="a file of JSON")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def is_wanted(name: str, options: argparse.Namespace) -> bool:
    if options.quick:
        return name in QUICK
    return any(fnmatch.fnmatchcase(name, glob) for glob in options.only)


def main() -> int:
    options = parse_options()
    if options.child is not None:
        train_with_little_address_space(options.child)
        return 0
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    jobs: list[tuple[str, str, Any, tuple[str, ...]]] = []
    if "kinds" in options.sections:
        jobs += [("kinds", name, made, BUDGETS) for name, made in KINDS.items()]
    if "models" in options.sections:
        from budget_jobs.models import model_jobs

        jobs += [("models", name, made, BUDGETS_OF_MODELS) for name, made in model_jobs()]
    for section, name, made, budgets in jobs:
        if is_wanted(name, options):
            rows += survey(section, name, made, budgets, options.lines)
    if "kinds" in options.sections and is_wanted(CHILD, options):
        rows += survey_child(options.lines)
    print(table(HEAD, map(cells, rows)))
    names = {row["job"] for row in rows}
    broken = {row["job"] for row in rows if row["broken"]}
    print(f"\n{len(names)} jobs, {len(rows)} runs; {len(names - broken)} jobs broke no rule")
    if options.output:
        options.output.write_text(
            json.dumps({"environment": environment(), "runs": rows}, indent=1) + "\n"
        )
    return 1 if broken or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
