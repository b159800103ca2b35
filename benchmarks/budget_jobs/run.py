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
from ebb._launch.step_clock import StepClock
from ebb._plan.budget import BudgetError, read_budget
from ebb._plan.measured import base_bytes
from ebb._plan.plan import plan_of


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
        freed: of these bytes, those that steps free first, such as gradients. All bytes here count
            from `began`, and ebb's count from what is left then.
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
            self._now.freed = watch._freed
            self._now.planned = watch.planned - watch._freed
            self._now.share = watch._share - watch._freed
            self._now.accepted = watch._accepted - watch._freed
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
