"""EBB_BUDGET: measures a job's own steps, makes a plan, and puts it in place."""

from __future__ import annotations

import atexit
import zlib
from contextlib import ExitStack, suppress

import torch
from _ebb_switches import is_set

from ebb import _C
from ebb._launch.agreeing import Offer, Ranks, ranks_of_job
from ebb._launch.assignment import Assignment
from ebb._launch.budget_phases import Agree, Ended, Measure, Start, Wait
from ebb._launch.budgeted import Blocks, is_compiled
from ebb._launch.budgeted_job import BudgetedJob, Messages, NoPlanError
from ebb._launch.decided import Decided
from ebb._launch.memory_limit import Limit
from ebb._launch.models import ModelObserver
from ebb._launch.plan_file import PlanFile, PlanFileError
from ebb._launch.save_all import SaveAll
from ebb._launch.step_clock import StepClock
from ebb._launch.taken import FromFile
from ebb._launch.variables import warn_setting_ignored
from ebb._plan.choose.memory_budget import BudgetError, NothingToPlanError
from ebb._plan.profile.measuring import Measured
from ebb._report.text import size
from ebb._support import devices
from ebb._support.log import log
from ebb._support.shown import clipped
from ebb.policies import recompute_all

_NO_BLOCKS = (
    "ebb found no blocks to plan for. Name modules: "
    "EBB_MODULES='*.layers.*' (python -m ebb --list-modules SCRIPT lists their names)"
)


class Budget(ModelObserver):
    """Applies a memory budget to a job. Arguments: see `install_budget`."""

    def __init__(
        self,
        budget: int | float | Limit,
        text: str,
        patterns: tuple[str, ...],
        assignment: Assignment,
        file: str = "",
    ) -> None:
        self._clock = StepClock(self._at_boundary, self._give_up)
        self.blocks = Blocks(patterns)
        self.job = BudgetedJob(
            0 if isinstance(budget, Limit) else budget,
            self.blocks,
            self._clock.optimizers,
            Messages(text, assignment),
            PlanFile(file, budget, patterns) if file else None,
        )
        first = SaveAll(self.job, budget) if isinstance(budget, Limit) else Start(self.job)
        self.job.enter(FromFile(self.job, first) if file else first)
        self._steps = 0  # steps that have ended, without those in which all was saved
        self._has_compiled = False  # torch.compile has compiled a module of a model

    def start(self, undo: ExitStack) -> None:
        self._clock.start(undo)
        undo.callback(self._stop)
        atexit.register(self._at_exit)
        undo.callback(atexit.unregister, self._at_exit)
        undo.callback(_C.keep_while_there_is_room, 0)  # under `auto`

    def on_new_model(self, model: torch.nn.Module) -> None:
        try:
            self.job.models.add(model)
            names = self.blocks.add(model, recompute_all)
            self._has_compiled |= any(map(is_compiled, model.modules()))
            if why := devices.why_uncounted():
                self._give_up(why)
                return
            if names and self.job.file is not None:
                self.job.file.met(model)
            self.job.phase.on_new_model(model, names)
        except Exception as error:
            self._fail(error)

    def _at_exit(self) -> None:
        job = self.job
        announced, has_ended = job.messages.announced, isinstance(job.phase, Ended)
        if self._has_compiled and self._steps and not announced and not has_ended:
            job.messages.tell(
                "no plan: torch.compile has compiled all blocks, and chooses what their graphs "
                "save. Set torch._functorch.config.activation_memory_budget, or a policy by "
                "ebb.apply"
            )
        if isinstance(job.phase, Measure) and announced:
            job.messages.tell(
                f"the job ended after {self._steps} steps, before the plan was ready; all blocks "
                "were recomputed. Run more steps, or save a plan of ebb.plan and set EBB=plan.toml"
            )

    def _at_boundary(self, is_step: bool) -> None:
        try:
            self._step_ended(is_step)
            self._look_at_ranks()
        except NothingToPlanError as error:
            self._wait(str(error) if self.blocks.alive() else _NO_BLOCKS)
        except NoPlanError as error:
            self._give_up(str(error) if self.blocks.alive() else _NO_BLOCKS)
            self._look_at_ranks()
        except Exception as error:
            self.job.ranks = None
            if isinstance(error, BudgetError | PlanFileError) and is_set("EBB_STRICT"):
                self._stop()
                raise
            self._fail(error)
        finally:
            self.blocks.evaluation.step_ended()

    def _fail(self, error: Exception) -> None:
        log.info("budget", exc_info=True)
        name = type(error).__name__
        self._give_up(f"an error in ebb (TORCH_LOGS=ebb shows its stack): {name}: {error}")

    def _step_ended(self, is_step: bool) -> None:
        job = self.job
        if isinstance(job.phase, FromFile):
            job.phase.step_has_ended()
        if isinstance(job.phase, SaveAll):
            if not job.phase.has_filled():
                self.blocks.take()
                return
            job.phase.begin_to_plan()
            job.enter(Start(job))
            is_step = False  # the step that ended saved everything; measured steps recompute
        self._steps += 1
        if self._steps == 1 and job.ranks is None:
            job.ranks = ranks_of_job()
            if (file := job.file) is not None:
                job.ask_ranks(lambda ranks: ranks.vote(file.vote), None)
        if isinstance(job.phase, Ended):
            return
        job.memory.step_ended()
        job.phase.step_ended(is_step)

    def _wait(self, why: str) -> None:
        reason = clipped(why.removeprefix("ebb: "), 300)
        if is_set("EBB_STRICT") and not self.blocks.alive():
            self._stop()
            warn_setting_ignored(f"ebb: EBB_BUDGET={self.job.messages.text}", reason)  # raises
        self.job.enter(Wait(self.job))
        self.job.messages.tell(f"no plan yet: {reason}; {self._without_plan()} until there is one")

    def _give_up(self, why: str) -> None:
        if isinstance(self.job.phase, Ended):
            return
        self._stop()
        with suppress(Exception):  # finding blocks may be what failed
            self.job.add_all()
        self.blocks.put(recompute_all)
        self.job.messages.warn(f"no plan: {clipped(why, 300)}; {self._without_plan()}")

    def _without_plan(self) -> str:
        if self.blocks.alive():
            return "all blocks are recomputed"
        return "the job runs as if no budget were set"

    def _stop(self) -> None:
        self.job.enter(Ended(self.job))

    def _look_at_ranks(self) -> None:
        """Put the plan of the ranks in place, once it is there."""
        job, phase, ranks = self.job, self.job.phase, self.job.ranks
        if isinstance(phase, Agree) and ranks is not None:
            measured = phase.outcome.measured
            offer = _offer(measured, job.budget)
            decided = job.ask_ranks(lambda ranks: _look(ranks, offer, phase), None)
            if job.ranks is None:
                decided = phase.decide(measured)
            if job.file is not None and ranks.first is not None:
                job.file.writer = ranks.first
            if decided is not None:
                job.ranks = None
                phase.switch(decided)
        elif isinstance(phase, Ended):
            job.leave_ranks()


def _look(ranks: Ranks, offer: Offer, phase: Agree) -> Decided | None:
    values = ranks.look(offer, lambda most: phase.decide_for(most).to_json())
    if values is None:
        return None
    lowest, messages = ranks.lowest, phase.job.messages
    if lowest < offer.budget and messages.beside_limit is None:  # else no rank was given a budget
        words = f"{lowest:.0%}" if isinstance(lowest, float) else size(lowest)
        messages.tell(f"another rank has a lower budget, {words}; the plan keeps to the lowest")
    return Decided.from_json(values)


def _offer(measured: Measured, budget: float) -> Offer:
    operators = "\n".join(f"{op.func_name} {op.region}" for op in measured.profile.operators)
    kind = f"{zlib.crc32(operators.encode()):x}"
    return Offer(kind, measured.profile.peak, budget, measured.duration, measured.base)
