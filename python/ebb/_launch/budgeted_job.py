"""A job with a memory budget: what the phases of the budget share, and the lines that it prints."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from ebb._launch.agreeing import Ranks
from ebb._launch.assignment import Assignment
from ebb._launch.budgeted import Blocks
from ebb._launch.other_blocks import OtherBlocks
from ebb._launch.plan_file import PlanFile
from ebb._launch.step_memory_monitor import StepMemory
from ebb._plan.profile.measuring import RECOMPUTED, device_of, offload_steps
from ebb._support.job import print_first
from ebb._support.log import log
from ebb._support.names import in_ranges
from ebb._support.shown import clipped
from ebb.policies import recompute_all


class NoPlanError(Exception):
    """No plan is possible; the message says why."""


def number_of_steps(models: Iterable[torch.nn.Module]) -> int:
    """Maximum number of measured steps, plus the step that runs already."""
    return 1 + len(RECOMPUTED) + offload_steps(device_of(models))


class Messages:
    """Prints lines about a budget."""

    def __init__(self, text: str, assignment: Assignment) -> None:
        self.text = text  # the user's text for the budget
        self.assignment = assignment
        self.announced = False  # True once a line has named the blocks
        # With the budget `auto`: bytes of the limit that plans cannot use.
        self.beside_limit: int | None = None

    def tell(self, what: str) -> None:
        log.info("budget: %s", what)
        print_first(f"ebb: EBB_BUDGET={self.text}: {what}")

    def announce(self, names: Iterable[str], line: str) -> None:
        """Print once that ebb has found blocks. `line`: with a place for their names."""
        if self.announced:
            return
        self.announced = True
        self.tell(line.format(clipped(", ".join(in_ranges(names)), 300)))

    def announce_profiling(self, names: Iterable[str], models: Iterable[torch.nn.Module]) -> None:
        """Print once that ebb profiles steps with these blocks."""
        if self.announced or not (names := list(names)):
            return
        self.announce(
            names,
            f"ebb profiles {number_of_steps(models)} steps, then chooses what each of these blocks "
            "saves and recomputes: {}; EBB_DISABLE=1 turns ebb off",
        )
        if self.assignment.text.startswith("EBB="):
            self.tell(
                f"{self.assignment.text} applies only to calls of torch.utils.checkpoint outside "
                "of these blocks"
            )


class Phase:
    """A phase of a budget. See Note [The phases of a budget]."""

    has_ended = False  # True: ebb makes no more plans

    def __init__(self, job: BudgetedJob) -> None:
        self.job = job

    def begin(self) -> None:
        """Called when the phase begins."""

    def end(self) -> None:
        """Undo what the phase has changed."""

    def on_new_model(self, model: torch.nn.Module) -> None:
        """Called with each new model."""

    def announce(self, names: list[str]) -> None:
        """Called with the blocks of a new model."""
        self.job.messages.announce_profiling(names, self.job.models)

    def blocks_added(self, model: torch.nn.Module, names: list[str]) -> None:
        """Called with each new model that has blocks."""
        if torch.is_grad_enabled():
            self.announce(names)

    def step_ended(self, is_step: bool) -> None:
        """Called at the end of each step; `is_step` as in `StepClock`."""


class BudgetedJob:
    """A job with a memory budget."""

    def __init__(
        self,
        budget: int | float,
        blocks: Blocks,
        optimizers: Iterable[torch.optim.Optimizer],
        messages: Messages,
        file: PlanFile | None = None,
    ) -> None:
        self.budget = budget  # bytes, or a share of the peak that a step without regions allocates
        self.blocks, self.messages = blocks, messages
        # Of the job, as far as ebb has seen them.
        self.models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.optimizers = optimizers
        self.memory = StepMemory()
        self.other_blocks = OtherBlocks(blocks)
        self.ranks: Ranks | None = None  # the other ranks, until they have agreed
        self.file = file  # keeps the plan for the next start; None: the user has named no file
        self.plans = 0  # how many measurements led to a plan
        self.beside: int | None = None  # at the first measurement, see `Outcome.beside`
        self.phase = Phase(self)

    def enter(self, phase: Phase) -> None:
        """End the current phase, and begin another."""
        self.phase.end()
        self.phase = phase
        phase.begin()

    def add_all(self) -> None:
        """Make all blocks regions, also those that a plan had left without one."""
        for model in list(self.models):
            self.blocks.add(model, recompute_all)
