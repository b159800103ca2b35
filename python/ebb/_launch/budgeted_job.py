"""A job with a memory budget: what the phases of the budget share."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from ebb._launch.agreeing import Ranks
from ebb._launch.budget_messages import Messages
from ebb._launch.budgeted import Blocks
from ebb._launch.other_blocks import OtherBlocks
from ebb._launch.step_memory_monitor import StepMemory
from ebb.policies import recompute_all


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

    def step_ended(self, is_step: bool) -> None:
        """Called at the end of each step; `is_step` as in `StepClock`."""


class BudgetedJob:
    """A job with a memory budget.

    Attributes:
        budget: bytes, or a share of the peak that a step without regions allocates.
        models, optimizers: of the job, as far as ebb has seen them.
        ranks: the other ranks; None: there are none, or the ranks have agreed.
        plans: how many measurements led to a plan.
        beside: at the first measurement, see `Outcome.beside`.
        sized: steps that recorded the sizes of page pools.
    """

    def __init__(
        self,
        budget: int | float,
        blocks: Blocks,
        optimizers: Iterable[torch.optim.Optimizer],
        messages: Messages,
    ) -> None:
        self.budget, self.blocks, self.messages = budget, blocks, messages
        self.models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.optimizers = optimizers
        self.memory = StepMemory()
        self.other_blocks = OtherBlocks(blocks)
        self.ranks: Ranks | None = None
        self.plans = self.sized = 0
        self.beside: int | None = None
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
