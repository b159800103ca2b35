"""A job with a memory budget: what the phases of the budget share, and the lines that it prints."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import TypeVar

import torch

from ebb._launch.agreeing import Ranks, has_ranks
from ebb._launch.assignment import Assignment
from ebb._launch.budgeted import Blocks
from ebb._launch.decided import Decided
from ebb._launch.memory_limit import free
from ebb._launch.plan_file import PlanFile
from ebb._launch.step_memory_monitor import StepMemory
from ebb._plan.profile.measuring import RECOMPUTED, device_of, offload_steps
from ebb._support.job import print_first, print_once
from ebb._support.log import log
from ebb._support.names import in_ranges
from ebb._support.shown import clipped
from ebb.policies import recompute_all

_T = TypeVar("_T")
_ROOM = 1.25  # times the peak without regions, see Note [Other blocks]


class NoPlanError(Exception):
    """No plan is possible; the message says why."""


def number_of_steps(models: Iterable[torch.nn.Module]) -> int:
    """Maximum number of measured steps, plus the step that runs already."""
    return 1 + len(RECOMPUTED) + offload_steps(device_of(models))


class Messages:
    def __init__(self, text: str, assignment: Assignment) -> None:
        self.text = text  # the user's text for the budget
        self.assignment = assignment
        self.announced = False  # True once a line has named the blocks
        # With the budget `auto`: bytes of the limit that plans cannot use.
        self.beside_limit: int | None = None

    def tell(self, what: str) -> None:
        log.info("budget: %s", what)
        print_first(f"ebb: EBB_BUDGET={self.text}: {what}")

    def warn(self, what: str) -> None:
        """Print once on each rank that the budget, or its file, cannot be used."""
        log.info("budget: %s", what)
        print_once(f"ebb: EBB_BUDGET={self.text}: {what}", on_each_rank=True)

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

    def __init__(self, job: BudgetedJob) -> None:
        self.job = job

    def begin(self) -> None:
        """Called when the phase begins."""

    def end(self) -> None:
        """Undo what the phase has changed."""

    def on_new_model(self, model: torch.nn.Module, names: list[str]) -> None:
        """Called with each new model, and the names of its blocks."""
        if names and torch.is_grad_enabled():
            self.announce(names)

    def announce(self, names: list[str]) -> None:
        """Called with the blocks of a new model."""
        self.job.messages.announce_profiling(names, self.job.models)

    def step_ended(self, is_step: bool) -> None:
        """Called at the end of each step; `is_step` as in `StepClock`."""


# Note [Other blocks]
# If the budget is too small for the blocks that find_blocks names, much of a step's memory may be
# for work between them, such as a U-Net's concatenations. Then ebb measures steps with coarser
# blocks. If no candidate stays within the budget, ebb uses the one that needs the least memory.
# When backward enters a region, most of it is recomputed at once, so a coarser region may need more
# memory than a step without regions: up to a fifth more in loops of recurrent cells. ebb measures
# coarser blocks only if 1.25 times the peak without regions is free.


class OtherBlocks:
    """Tries the candidates for blocks. See Note [Other blocks]."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._leasts: dict[int, float] = {}  # lowest peak in bytes, by Blocks.candidate
        self._plain_peak = 0  # peak bytes of a step without regions

    def next(self, models: Collection[torch.nn.Module], least: Decided | None) -> int | None:
        """The candidate to measure next; None if no other blocks may be better. `least`: the plan
        with the lowest peak for the current blocks; None: they cannot be measured."""
        here = self._blocks.candidate
        if has_ranks() or here in self._leasts or not (self._leasts or least):
            return None
        self._leasts[here] = math.inf if least is None else least.peak
        if least is not None:
            self._plain_peak = least.plain_peak
        following = here + 1
        may = self._blocks.have(following, models)
        if not may or _ROOM * self._plain_peak > free(device_of(models)):
            following = min(self._leasts, key=self._leasts.__getitem__)
        return None if following == here else following


class BudgetedJob:
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
        # The models of the job that have run.
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
        self.phase.end()
        self.phase = phase
        phase.begin()

    def ask_ranks(self, question: Callable[[Ranks], _T], otherwise: _T) -> _T:
        """The answer of the other ranks; `otherwise` if there are none, or none from now on, since
        they cannot be reached."""
        if self.ranks is None:
            return otherwise
        try:
            return question(self.ranks)
        except Exception as error:  # the type depends on the store
            log.info("budget: other ranks cannot be reached, so this one plans alone: %s", error)
            self.ranks = None
            return otherwise

    def leave_ranks(self) -> None:
        self.ask_ranks(Ranks.leave, None)
        self.ranks = None

    def add_all(self) -> None:
        """Make all blocks regions, also those that a plan had left without one."""
        for model in list(self.models):
            self.blocks.add(model, recompute_all)
