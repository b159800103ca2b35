"""Compares jobs under EBB_BUDGET with eager: bits, bytes of each step, and the printed lines.

    OMP_NUM_THREADS=1 python benchmarks/budgets_in_jobs.py
    OMP_NUM_THREADS=1 python benchmarks/budgets_in_jobs.py --only "gradient*" --lines
    OMP_NUM_THREADS=1 python benchmarks/budgets_in_jobs.py --sections models

Each job runs without ebb, with all blocks recomputed, and under each budget, in one process. The
rules: all bits are eager's; a measured step exceeds the budget only if recomputing all, or an
earlier step, takes as much; a share is of eager's peak; under a plan no three steps in a row exceed
the budget, and ebb prints a line for each that does; ebb makes a plan, or prints one line with the
reason. The exit status is 1 if a rule is broken.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import io
import json
import os
import re
import resource
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from budget_job_kinds import KINDS, Job
from environment import environment
from torch.optim.optimizer import register_optimizer_step_post_hook

from ebb import _C
from ebb._launch import takeover
from ebb._launch.budget import Budget
from ebb._launch.step_clock import StepClock
from ebb._plan.budget import BudgetError, read_budget
from ebb._plan.measured import base_bytes
from ebb._plan.plan import plan_of
from report import table

OVER, SLACK = 1.02, 4096  # times a budget plus these bytes: a larger step exceeds the budget
SHARES = 0.1  # a share may come to so much more bytes than that share of eager's peak
STEADY = 0.005  # relative difference up to which peaks of steps without ebb count as equal
QUICK = ("plain", "GAN", "growing batch", "optimizer in backward", "short", "memory that grows")
BUDGETS = ("60%", "35%", "75% in bytes")
BUDGETS_OF_MODELS = ("50%", "least")


@dataclass
class Step:
    """What lies between two steps of the optimizer that tells the steps.

    Attributes:
        began: bytes of tensors that were there when it began, those of other jobs left out.
        most: the most that were there at a time.
        between: the most while ebb worked, after it.
        phase: "measured", "planned", or "" (another).
        planned, accepted, share, beside: of the plan that is in place: bytes that it predicts, that
            a step may take although they are above the budget, that a share comes to, and those of
            the program's other tensors, which no budget counts.
    """

    began: int = 0
    most: int = 0
    between: int = 0
    phase: str = ""
    planned: int = 0
    accepted: int = 0
    share: int = 0
    beside: int = 0

    @property
    def peak(self) -> int:
        return max(0, self.most - self.began)


@dataclass
class Run:
    """One job under one budget, or without.

    Attributes:
        lines: what ebb told, each with the number of steps that had ended by then.
        held: bytes of the job's other tensors, which are not weights, gradients or states, when the
            third step began.
        beside: likewise, as ebb counted them; they may be weights of models that do not train.
        error: the traceback of what the job raised.
    """

    bits: list[dict[str, str]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    lines: list[tuple[int, str]] = field(default_factory=list)
    held: int = 0
    beside: int | None = None
    least: int | None = None
    error: str = ""
    seconds: float = 0.0


class Meter:
    """Counts the bytes of each step of a job; ebb's own counting goes on beside it."""

    def __init__(self, run: Run, job: Job, budget: Budget | None) -> None:
        self._run, self._job, self._budget = run, job, budget
        self._clock = StepClock(self._at_boundary, lambda why: None)
        self._now = Step()
        self._most = 0
        self._ended = False
        self._outside = 0

    @contextmanager
    def counting(self, outside: int, install: Callable[[], Budget | None]) -> Iterator[None]:
        """ebb comes in between what is read before and after it at the end of a step."""
        self._outside = outside
        read = _C.tensor_bytes

        def reading() -> tuple[int, int]:  # what counts begins anew in the midst of a step's end
            now, most = read()
            self._most = max(self._most, most)
            return now, most

        before = register_optimizer_step_post_hook(self._clock._on_step)
        self._budget = install()
        after = register_optimizer_step_post_hook(self._after)
        _C.tensor_bytes = reading
        self._begin()
        try:
            yield
        finally:
            _C.tensor_bytes = read
            before.remove()
            after.remove()

    def _bytes(self) -> tuple[int, int]:
        now, _ = _C.tensor_bytes()
        most, self._most = self._most, 0
        _C.reset_most_tensor_bytes()
        return now - self._outside, most - self._outside

    def _begin(self) -> None:
        budget = self._budget
        self._now = Step(began=self._bytes()[0])
        if len(self._run.steps) == 2:
            base = base_bytes(self._job.models(), self._job.optimizers())
            self._run.held = self._now.began - base
        if budget is None:
            return
        watch = budget._watch
        if budget._measuring is not None:
            self._now.phase = "measured"
        elif watch.has_plan and not budget._has_ended:
            self._now.phase = "planned"
            self._now.planned, self._now.share = watch.planned, watch._share
            self._now.accepted = watch._accepted
            outcome = budget._outcome
            self._now.beside = 0 if outcome is None else outcome.beside - self._outside

    def _at_boundary(self, is_step: bool) -> None:
        now, _ = _C.tensor_bytes()
        self._now.most = self._most - self._outside
        self._most = now
        self._run.steps.append(self._now)
        self._ended = True

    def _after(self, *_: Any) -> None:
        if self._ended:
            self._ended = False
            ended, (_, ended.between) = self._now, self._bytes()
            self._begin()


class Told(io.TextIOBase):
    """In place of stderr."""

    def __init__(self, run: Run) -> None:
        self._run, self._text = run, ""

    def write(self, text: str) -> int:
        *lines, self._text = (self._text + text).split("\n")
        self._run.lines += [(len(self._run.steps), line) for line in lines if line]
        return len(text)


def run_job(make: Callable[[], Job], text: str = "", *, gives_up: bool = False) -> Run:
    """Trains under a budget, or without; gives_up: it is never planned, and all is recomputed."""
    run = Run()
    gc.collect()
    _C.count_host_tensors()
    outside = _C.tensor_bytes()[0]
    found: list[Budget] = []

    def install() -> Budget | None:
        if not text:
            return None
        found.append(takeover.install_budget(read_budget(text), text, ()))
        if gives_up:
            found[0]._give_up("all is recomputed")
        return found[0]

    began, stderr = time.perf_counter(), sys.stderr
    try:
        sys.stderr = Told(run)
        job = make()
        with Meter(run, job, None).counting(outside, install):
            gc.freeze()
            for _ in job.train():
                gc.collect()
        run.bits = job.bits
        job.close()
    except Exception:
        run.error = traceback.format_exc()
    finally:
        sys.stderr = stderr
        takeover.remove()
        gc.unfreeze()
    run.seconds = time.perf_counter() - began
    if found:
        run.beside = None if found[0]._beside is None else found[0]._beside - outside
        if found[0]._outcome is not None:
            try:
                plan_of(found[0]._outcome.measured, 1)
            except BudgetError as error:
                run.least = error.minimum
    return run


# Results of a run ------------------------------------------------------------------------------


def bits_that_differ(run: Run, eager: Run) -> str:
    if len(run.bits) != len(eager.bits):
        return f"{len(run.bits)} steps, not {len(eager.bits)}"
    for step, (one, other) in enumerate(zip(run.bits, eager.bits, strict=True)):
        different = [what for what in other if one.get(what) != other[what]]
        if different:
            return f"step {step}: {', '.join(different)}"
    return ""


def steps_in_words(run: Run, numbers: list[int]) -> str:
    shown = (f"{n} ({run.steps[n].most:,} in all, {run.steps[n].peak:,})" for n in numbers[:6])
    return ", ".join(shown) + (f" and {len(numbers) - 6} more" if len(numbers) > 6 else "")


def measured_too_large(run: Run, eager: Run, all_recomputed: Run, budget: int | float) -> list[int]:
    """Measured steps that took more than the budget, and than recomputing all or steps before; with
    other regions, which are measured only if there is memory for it, than those without ebb."""
    large, before = [], 0
    others = [after for after, line in run.lines if "profiles again with other modules" in line]
    for number, (step, other) in enumerate(zip(run.steps, all_recomputed.steps, strict=False)):
        limit = max(other.most, before)
        if others and number >= others[0]:
            limit = max(limit, eager.steps[number].most)
        if isinstance(budget, int):
            limit = max(limit, budget + max(run.held, run.beside or 0))
        if step.phase == "measured" and step.most > OVER * limit + SLACK:
            large.append(number)
        before = max(before, step.most)
    return large


def planned_too_large(run: Run, budget: int | float) -> list[int]:
    """Steps under a plan that took more than the budget, and than what was said to be the least."""
    large: list[int] = []
    for number, step in enumerate(run.steps):
        if step.phase != "planned" or step.peak <= step.accepted:
            continue
        if isinstance(budget, int):
            is_over = step.most - step.beside > OVER * budget + SLACK
        else:
            is_over = step.peak > OVER * step.share + SLACK
        if is_over:
            large.append(number)
    return large


def shares_of_eager(run: Run, eager: Run, budget: float) -> list[float]:
    """What each plan takes as the budget, over that share of what measured steps take in eager."""
    found, most, share = [], 0, 0
    for number, (step, other) in enumerate(zip(run.steps, eager.steps, strict=False)):
        if step.phase == "measured":
            is_first = number == 0 or run.steps[number - 1].phase != "measured"
            most = 0 if is_first else max(most, other.peak)  # what stays is made in the first one
        elif step.phase == "planned" and step.share != share:
            share = step.share
            found.append(share / (budget * most) if most else 1.0)
    return found


def prediction(run: Run, eager: Run) -> tuple[int, int] | None:
    """Predicted and measured bytes of the steps under the first plan that are like those before."""
    first = next((n for n, step in enumerate(run.steps) if step.phase == "planned"), None)
    if first is None:
        return None
    like = max(step.peak for step in eager.steps[max(0, first - 4) : first])
    found = []
    for step, other in zip(run.steps[first:], eager.steps[first:], strict=False):
        if step.phase != "planned" or step.planned != run.steps[first].planned:
            break
        if abs(other.peak - like) <= STEADY * like:
            found.append(step.peak)
    found = found[1:] or found  # the first step under a plan may be another
    return (run.steps[first].planned, max(found)) if found else None


def judge(job: type[Job] | Job, run: Run, eager: Run, all_recomputed: Run, text: str) -> list[str]:
    """The rules that are broken."""
    if run.error:
        return [f"raises: {run.error.strip().splitlines()[-1]}"]
    broken = []
    different = bits_that_differ(run, eager)
    if different:
        broken.append(f"bits differ: {different}")
    budget = read_budget(text)
    large = measured_too_large(run, eager, all_recomputed, budget)
    if large:
        broken.append(f"measured steps are too large: {steps_in_words(run, large)}")
    if isinstance(budget, float) and not job.saves_less_itself:
        shares = shares_of_eager(run, eager, budget)
        if any(share > 1 + SHARES for share in shares):
            words = ", ".join(f"{share:.1%}" for share in shares)
            broken.append(f"plans are for {words} of that share of what steps take without ebb")
    large = planned_too_large(run, budget)
    if any({n, n + 1, n + 2} <= set(large) for n in large):
        broken.append(f"over the budget for long: {steps_in_words(run, large)}")
    told = {after for after, line in run.lines if "a step allocated" in line}
    silent = [n for n in large if n + 1 not in told]
    if silent:
        broken.append(f"over the budget, and not told: {steps_in_words(run, silent)}")
    lines = [line for _, line in run.lines if line.startswith("ebb: EBB_BUDGET")]
    is_planned = any(step.phase == "planned" for step in run.steps)
    why_not = [line for line in lines if "no plan" in line]
    if not is_planned and job.expected != "silent" and len(why_not) != 1:
        broken.append(f"no plan, and {len(why_not)} lines say why")
    if job.expected == "plan" and not is_planned:
        broken.append("there should be a plan")
    others = [line for _, line in run.lines if not line.startswith("ebb: EBB_BUDGET")]
    if any("Traceback" in line or "Error" in line for line in others):
        broken.append(f"stderr: {others}")
    return broken


def survey(
    section: str, name: str, make: Any, budgets: tuple[str, ...], shows_lines: bool
) -> list[dict[str, Any]]:
    """One job under all budgets."""
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


# A process with little address space --------------------------------------------------------------

CHILD = "a process with little address space"
MEBIBYTE = 1 << 20


class Large(Job):
    """Tensors that malloc takes from the system one by one."""

    steps = 12

    def rows(self, step: int) -> int:
        return 32768


def train_with_little_address_space(more: int) -> None:
    """What the child does; more: bytes of address space beside what it has when it begins."""
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
    """EBB_BUDGET where memory for a step without ebb is not to be had."""
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


# The command --------------------------------------------------------------------------------------


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
        from budget_job_models import model_jobs

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
