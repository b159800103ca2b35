"""Runs a job under a budget and records each step's memory, printed lines and results."""

from __future__ import annotations

import gc
import io
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from budget_jobs.job import Job
from ebb import _C
from ebb._launch import takeover
from ebb._launch.budget import Budget
from ebb._launch.budget_phases import Measure, Planned
from ebb._launch.step_clock import StepClock
from ebb._plan.choose.memory_budget import BudgetError, read_budget
from ebb._plan.plan import plan_of
from ebb._plan.profile.measuring import base_bytes


@dataclass
class Step:
    """The work from the end of one optimizer step to the end of the next.

    Attributes:
        began: bytes of the job's tensors at the beginning.
        most: peak of these bytes.
        between: peak while ebb worked after the step.
        phase: "measured", "planned", or "" for other steps.
        planned: bytes that the present plan predicts. All of the plan's bytes count above `began`.
        accepted: bytes that a step under the plan may need although they exceed the budget.
        share: bytes of a budget such as 40%.
        beside: bytes of the program's other tensors, which no budget counts.
        freed: bytes that steps free first, such as gradients. ebb counts above `began` - `freed`.
    """

    began: int = 0
    most: int = 0
    between: int = 0
    phase: str = ""
    planned: int = 0
    accepted: int = 0
    share: int = 0
    beside: int = 0
    freed: int = 0

    @property
    def peak(self) -> int:
        return max(0, self.most - self.began)


@dataclass
class Run:
    """The results of one job under one budget, or without ebb.

    Attributes:
        lines: lines that ebb printed, each with the number of steps that had ended before.
        held: bytes of other tensors than weights, gradients and optimizer states, at the beginning
            of the third step.
        beside: the same as counted by ebb; may include weights of models that do not train.
        least: the lowest possible budget in bytes, if known.
        error: the traceback of an exception in the job.
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
    """Counts the bytes of each step of a job, independently of ebb's own count."""

    def __init__(self, run: Run, job: Job, budget: Budget | None) -> None:
        self._run, self._job, self._budget = run, job, budget
        self._clock = StepClock(self._at_boundary, lambda why: None)
        self._now = Step()
        self._most = 0
        self._ended = False
        self._outside = 0

    @contextmanager
    def counting(self, outside: int, install: Callable[[], Budget | None]) -> Iterator[None]:
        """Counts inside the with-block. Hooks on optimizer steps read the bytes before and after
        ebb's hook, which `install` adds."""
        self._outside = outside
        read = _C.tensor_bytes

        def reading() -> tuple[int, int, bool]:  # ebb reads, then resets the peak
            now, most, is_exact = read()
            self._most = max(self._most, most)
            return now, most, is_exact

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
        now, _, _ = _C.tensor_bytes()
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
        phase, freed = budget.job.phase, budget.job.memory.freed
        if isinstance(phase, Measure):
            self._now.phase = "measured"
        elif isinstance(phase, Planned):
            self._now.phase = "planned"
            self._now.freed = freed
            self._now.planned = phase.memory.planned - freed
            terms = phase.memory.terms
            share = terms.budget if terms.beside is None else 0
            self._now.share = share - freed
            self._now.accepted = phase.memory._accepted - freed
            self._now.beside = phase.outcome.beside - self._outside

    def _at_boundary(self, is_step: bool) -> None:
        now, _, _ = _C.tensor_bytes()
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
    """Replaces stderr, and records the printed lines."""

    def __init__(self, run: Run) -> None:
        self._run, self._text = run, ""

    def write(self, text: str) -> int:
        *lines, self._text = (self._text + text).split("\n")
        self._run.lines += [(len(self._run.steps), line) for line in lines if line]
        return len(text)


def run_job(make: Callable[[], Job], text: str = "", *, gives_up: bool = False) -> Run:
    """Trains under a budget, or without ebb. `gives_up`: all blocks stay recomputed, no plan."""
    run = Run()
    gc.collect()
    _C.use_counting_allocator()
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
        outcome = getattr(found[0].job.phase, "outcome", None) if found else None
        takeover.remove()
        gc.unfreeze()
    run.seconds = time.perf_counter() - began
    if found:
        beside = found[0].job.beside
        run.beside = None if beside is None else beside - outside
        if outcome is not None:
            try:
                plan_of(outcome.measured, 1)
            except BudgetError as error:
                run.least = error.minimum
    return run
