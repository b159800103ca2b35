"""EBB_BUDGET: measures a job's own steps, makes a plan, and puts it in place."""

from __future__ import annotations

import atexit
import functools
import math
import time
import weakref
import zlib
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch
from _ebb_switches import is_set

from ebb import _C
from ebb._launch.agreeing import Offer, Ranks, has_ranks, ranks_of_job
from ebb._launch.assignment import Assignment, InCall
from ebb._launch.budgeted import Blocks, CallAround, is_compiled
from ebb._launch.checking import Checking
from ebb._launch.decided import Decided, decided_by, least_of
from ebb._launch.measured_steps import Measuring, NoPlanError, Outcome, number_of_steps
from ebb._launch.memory_limit import free
from ebb._launch.models import Meets
from ebb._launch.step_clock import StepClock
from ebb._launch.watch import Watch
from ebb._plan.choose.memory_budget import BudgetError, NothingToPlanError, allowed
from ebb._plan.plan import plan_of
from ebb._plan.profile.measuring import Measured, device_of
from ebb._report import planned
from ebb._report.planned import ReportedPlan
from ebb._support import devices
from ebb._support.job import is_first
from ebb._support.log import log
from ebb._support.names import in_ranges
from ebb._support.progress import Progress
from ebb._support.shown import clipped, tell
from ebb.policies import recompute_all

_NO_BLOCKS = (
    "ebb found no repeated block, and no module matches EBB_MODULES. Name modules: "
    "EBB_MODULES='*.layers.*' (python -m ebb --list-modules SCRIPT lists their names)"
)
_MOST_MEASURED = 5  # maximum number of times that steps are measured in a job
_SOON = 64  # steps after a plan in which one step over the budget does not mean a change for good
_ROOM = 1.25  # times the peak without regions, see Note [Other blocks]
_LONG, _LONG_STEPS = 1.0, 20  # seconds, and steps: ebb reports planning that takes more than both


# Note [The phases of a budget]
# 1. All blocks are recomputed from the first forward on.
# 2. From the end of the first step on, ebb measures steps. See Note [Steps that are measured].
# 3. At the end of the last measured step ebb makes the plan and puts it in place. If there are
#    several ranks, see Note [Ranks that agree].
# 4. Under the plan ebb counts the bytes of each step. See Note [Steps over the budget].
# Blocks change only between two steps. If a new model comes, another optimizer marks the steps, or
# steps change for good, ebb begins again at 2. If no plan can be made, all blocks stay recomputed:
# for a job with a memory budget, a slow step is better than running out of memory.

# Note [Other blocks]
# If the budget is too small for the blocks that find_blocks names, much of a step's memory may be
# for work between them, such as a U-Net's concatenations. Then ebb measures steps with coarser
# blocks. If no candidate stays within the budget, ebb uses the one that needs the least memory.
# When backward enters a region, most of it is recomputed at once, so a coarser region may need more
# memory than a step without regions: up to a fifth more in loops of recurrent cells. ebb measures
# coarser blocks only if 1.25 times the peak without regions is free.

# Note [Steps over the budget]
# A step may change in more ways than ebb can check in advance: sizes, dtypes, which tensors need
# gradients, a second backward. So ebb counts the bytes. If a step exceeds the budget, all blocks
# are recomputed from the next step on, and ebb measures steps again. If a single step exceeds the
# budget soon after a plan, ebb assumes a recurring kind of step that was not measured, and plans
# for less memory from the existing measurements. The first time ebb scales the target by
# allowed / allocated bytes. After that ebb extrapolates linearly from the planned and the allocated
# bytes of the last two such steps. If no plan needs less memory, ebb prints that, and the job
# continues.


class Budget(Meets):
    """Applies a memory budget to a job.

    Args:
        budget: bytes, or a share of the peak that a step without regions allocates.
        text: the user's text for the budget.
        patterns: globs over module names that select the blocks; empty: ebb finds the blocks.
        assignment: the policy for calls of torch.utils.checkpoint.
    """

    def __init__(
        self, budget: int | float, text: str, patterns: tuple[str, ...], assignment: Assignment
    ) -> None:
        self.blocks = Blocks(patterns)
        self._budget = budget
        self._text = text
        self._assignment = assignment
        self._clock = StepClock(self._at_boundary, self._give_up)
        self._models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._measuring: Measuring | None = None  # while steps are measured
        self._outcome: Outcome | None = None
        self._steps = 0  # steps that have ended
        self._ranks: Ranks | None = None  # until the ranks have agreed
        self._watch = Watch()
        self._measured = 0  # how many measurements led to a plan
        self._beside: int | None = None  # at the first measurement, see Outcome.beside
        self._leasts: dict[int, float] = {}  # lowest peak in bytes, by Blocks.candidate
        self._plain_peak = 0  # peak bytes of a step without regions
        self._since = 0  # steps that have ended under the plan
        self._has_regions = False  # True if the plan has regions
        self._waits = False  # True while ebb waits for the first backward of a block
        self._sized = 0  # steps that recorded the sizes of page pools
        self._moved = ExitStack()  # restores the process settings that a plan has changed
        self._reported: ReportedPlan | None = None  # the plan in place
        self._checking: Checking | None = None  # while steps under the plan are measured
        self._has_ended = False  # ebb makes no more plans
        self._announced = False
        self._has_compiled = False  # torch.compile has compiled a module of a model
        self._progress = Progress(f"ebb: EBB_BUDGET={text}: profiling")

    def start(self, undo: ExitStack) -> None:
        """Apply the budget until `undo` is closed."""
        self._clock.start(undo)
        undo.callback(self._stop)
        atexit.register(self._at_exit)
        undo.callback(atexit.unregister, self._at_exit)

    def meet(self, model: torch.nn.Module) -> None:
        """Find the blocks of a model, before its first forward."""
        try:
            self._models.add(model)
            names = self.blocks.add(model, recompute_all)
            self._has_compiled |= any(map(is_compiled, model.modules()))
            if why := devices.why_uncounted():
                self._give_up(why)
            elif names and torch.is_grad_enabled():
                self._announce(names)
        except Exception as error:
            self._fail(error)

    def checkpoint_call(self, function: Callable[..., Any]) -> Callable[[InCall], InCall] | None:
        """A wrapper for the context that the region of a torch.utils.checkpoint call enters. None
        if the call is no region, because it is inside or around a block.
        """
        if self.blocks.are_plain or _C.in_region() or self.blocks.are_inside(function):
            return None
        return functools.partial(CallAround, self.blocks, function)

    def _announce(self, names: list[str]) -> None:
        if self._announced or not names:
            return
        self._announced = True
        shown = clipped(", ".join(dict.fromkeys(in_ranges(names))), 300)
        self._tell(
            f"ebb profiles {number_of_steps(self._models)} steps, then chooses what each of these "
            f"blocks saves and recomputes: {shown}; EBB_DISABLE=1 turns ebb off"
        )
        if self._assignment.text.startswith("EBB="):
            self._tell(
                f"{self._assignment.text} applies only to calls of torch.utils.checkpoint outside "
                "of these blocks"
            )

    def _tell(self, what: str) -> None:
        log.info("budget: %s", what)
        self._progress.end()
        if is_first():
            tell(f"ebb: EBB_BUDGET={self._text}: {what}")

    def _at_exit(self) -> None:
        if self._has_compiled and self._steps and not self._announced and not self._has_ended:
            self._tell(
                "no plan: torch.compile has compiled all blocks, and chooses what their graphs "
                "save. Set torch._functorch.config.activation_memory_budget, or a policy by "
                "ebb.apply"
            )
        if self._measuring is not None and not self._has_ended and self._announced:
            self._tell(
                f"the job ended after {self._steps} steps, before the plan was ready; all blocks "
                "were recomputed. Run more steps, or save a plan of ebb.plan and set EBB=plan.toml"
            )

    # Between two steps ----------------------------------------------------------------------------

    def _at_boundary(self, is_step: bool) -> None:
        try:
            self._step_ended(is_step)
            self._look_at_ranks()
        except NothingToPlanError as error:
            self._wait(str(error) if any(self.blocks.alive()) else _NO_BLOCKS)
        except NoPlanError as error:
            has_blocks = any(self.blocks.alive())
            self._give_up(str(error) if has_blocks else _NO_BLOCKS)
            self._look_at_ranks()
        except Exception as error:
            self._ranks = None
            if isinstance(error, BudgetError) and is_set("EBB_STRICT"):
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
        self._steps += 1
        if self._steps == 1 and self._ranks is None:
            self._ranks = ranks_of_job()
            if self._ranks is not None:
                self._ranks.join()
        if self._has_ended:
            return
        self._watch.step_ended()
        if self._outcome is not None and self._watch.has_plan:
            self._look(is_step)
        elif not self._waits or self._watch.has_replayed():
            self._measure_on(is_step)
        if self._measuring is not None and is_first():
            steps = number_of_steps(self._models)
            self._progress.show(steps + 1 - self._measuring.left(), steps)

    def _measure_on(self, is_step: bool) -> None:
        calls, has_new = self.blocks.take()
        if has_new or not is_step or self._waits:
            self._begin()
        elif self._measuring is not None:
            try:
                if calls == 0 and self.blocks.candidate > 0:
                    raise NothingToPlanError("the model's forward does not call these modules")
                outcome = self._measuring.step_ended(calls, self._watch.peak)
            except (NoPlanError, NothingToPlanError) as error:
                if self._choose_other_blocks(str(error)):
                    return
                raise
            if outcome is not None:
                self._measuring, self._outcome = None, outcome
                self._beside = outcome.beside
                self.blocks.put(recompute_all)
                if self._ranks is None:
                    self._switch_or_choose_others(self._decide(outcome.measured))

    def _switch_or_choose_others(self, decided: Decided) -> None:
        assert self._outcome is not None
        left = allowed(self._budget, self._outcome.measured.base, decided.plain_peak)
        why = decided.too_small
        if not why or left <= 0 or not self._choose_other_blocks(why, decided):
            self._switch(decided)

    def _choose_other_blocks(self, why: str, least: Decided | None = None) -> bool:
        """Choose other modules as blocks, and measure steps with them. See Note [Other blocks].

        Args:
            why: why the current blocks are not sufficient.
            least: the plan with the lowest peak for the current blocks; None: they cannot be
                measured.

        Returns:
            False if no other blocks may be better.
        """
        here = self.blocks.candidate
        if self._assignment.announced:
            return False  # inside a larger block, the job's own checkpointing would have no effect
        if has_ranks() or here in self._leasts or not (self._leasts or least):
            return False
        self._leasts[here] = math.inf if least is None else least.peak
        if least is not None:
            self._plain_peak = least.plain_peak
        following = here + 1
        may = self.blocks.have(following, self._models)
        if not may or _ROOM * self._plain_peak > free(device_of(self._models)):
            following = min(self._leasts, key=self._leasts.__getitem__)
        if following == here:
            return False
        self.blocks.use(following)
        self._begin()
        names = clipped(", ".join(in_ranges(block.name for block in self.blocks.alive())), 300)
        reason, _, _ = clipped(why, 300).partition(". ")
        self._tell(f"{reason}; ebb profiles again with other modules as regions: {names}")
        return True

    def _begin(self) -> None:
        """Measure steps from now on."""
        self._add_all()
        if self._measuring is not None:
            self._measuring.stop()
        self._end_plan()
        self._moved.close()  # measurements and plans are for the job's own settings
        self._outcome, self._waits = None, False
        self._watch.end()
        self._announce([block.name for block in self.blocks.used()])
        optimizers = self._clock.optimizers
        self._measuring = Measuring(
            self.blocks, lambda: list(optimizers), self._budget, self._beside
        )
        self._measuring.begin()
        self._watch.leave_out()

    def _add_all(self) -> None:
        """Make all blocks regions, also those that a plan had left without one."""
        for model in list(self._models):
            self.blocks.add(model, recompute_all)

    def _wait(self, why: str) -> None:
        """Keep all blocks recomputed until a plan is possible."""
        if self._measuring is not None:
            self._measuring.stop()
            self._measuring = None
        self._outcome, self._waits = None, True
        self._watch.has_replayed()
        reason = clipped(why.removeprefix("ebb: "), 300)
        self._tell(f"no plan yet: {reason}; {self._without_plan()} until there is one")

    def _give_up(self, why: str) -> None:
        if self._has_ended:
            return
        self._stop()
        self._outcome = None
        with suppress(Exception):  # finding blocks may be what failed
            self._add_all()
        self.blocks.put(recompute_all)
        self._tell(f"no plan: {clipped(why, 300)}; {self._without_plan()}")

    def _without_plan(self) -> str:
        has_blocks = any(self.blocks.alive())
        return (
            "all blocks are recomputed" if has_blocks else "the job runs as if no budget were set"
        )

    def _stop(self) -> None:
        self._has_ended = True
        self._progress.end()
        self._moved.close()
        if self._measuring is not None:
            self._measuring.stop()
            self._measuring = None
        self._end_plan()
        self.blocks.are_plain = False

    # Plans ----------------------------------------------------------------------------------------

    def _look_at_ranks(self) -> None:
        """Put the plan of the ranks in place, once it is there."""
        if self._ranks is None:
            return
        outcome = self._outcome
        offer = None if outcome is None else _offer(outcome.measured, self._budget)
        try:
            is_done, decided = self._ranks.look(
                offer, self._has_ended, lambda most: self._decide_for(most, outcome)
            )
        except Exception as error:
            log.info("budget: the ranks do not agree, so this rank plans alone: %s", error)
            is_done, decided = True, None
            if outcome is not None:
                decided = self._decide(outcome.measured)
        if is_done:
            self._ranks = None
        if decided is not None and not self._has_ended:
            self._switch(decided)

    def _decide_for(self, most: Offer, outcome: Outcome | None) -> Decided:
        """Plan for all ranks of a kind: this rank's profile, with the kind's largest values."""
        assert outcome is not None
        measured = outcome.measured.with_highest(most.duration, most.base)
        return self._decide(measured, most.budget)

    def _decide(self, measured: Measured, budget: float | None = None) -> Decided:
        assert self._outcome is not None
        budget = self._budget if budget is None else budget
        growth = self._outcome.growth
        if isinstance(budget, int) and growth > 1:
            budget = measured.base + int((budget - measured.base) / growth)
        began = time.perf_counter()
        try:
            return decided_by(plan_of(measured, budget))
        except BudgetError as error:
            return least_of(measured, budget, str(error).removeprefix("ebb: "))
        finally:
            took = time.perf_counter() - began
            if took > max(_LONG, _LONG_STEPS * measured.duration * 1e-3):
                self._tell(f"planning took {took:.1f} s")

    def _switch(self, decided: Decided) -> None:
        """Put a plan in place, and watch the steps under it."""
        assert self._outcome is not None
        if decided.too_small and is_set("EBB_STRICT"):
            raise BudgetError(f"ebb: EBB_BUDGET={self._text}: {decided.too_small}")
        if self.blocks.met_hooks() and self._measured == 0:
            self._tell(
                "the job's saved-tensor hooks (such as save_on_cpu) do not get the tensors that "
                "blocks save, so these stay on the device. A budget in percent counts from the "
                "peak without these hooks; prefer a budget in bytes"
            )
        self._put_in_place(decided)
        if self._outcome.varies and self._measured == 0:
            self._tell("the peak memory of steps varies; the plan is for the largest profiled step")
        self._measured += 1
        self._since = 0
        budget, beside = self._budget, None
        if isinstance(budget, int):
            beside = self._outcome.beside
        else:
            budget = round(budget * (decided.plain_peak + self._outcome.more))
        fits, freed = not decided.too_small, self._outcome.measured.freed
        self._watch.begin(decided.peak, budget, beside, fits=fits, freed=freed)

    def _put_in_place(self, decided: Decided) -> None:
        self._moved.close()
        decided.settings.put(self._moved)
        self._add_all()
        self._has_regions = bool(decided.policies)
        self.blocks.follow(decided.policies)
        if decided.too_small:
            why = clipped(decided.too_small, 500)
            self._tell(f"{why}; ebb uses the plan with the lowest peak instead: {decided.summary}")
        else:
            self._tell(decided.summary)
        self._begin_plan(decided.reported)
        self._watch.leave_out()

    def _begin_plan(self, reported: ReportedPlan | None) -> None:
        """Tell reports about the plan."""
        self._end_plan()
        self._reported = reported
        if reported is not None:
            planned.begins(reported)
            if _C.is_reporting():
                self._checking = Checking(reported)

    def _end_plan(self) -> None:
        if self._checking is not None:
            self._checking.stop()
        if self._reported is not None:
            planned.ends(self._reported)
        self._reported = self._checking = None

    # Steps under a plan ---------------------------------------------------------------------------

    def _look(self, is_step: bool) -> None:
        """Check after a step if the plan still fits."""
        self._since += 1
        watch = self._watch
        if self._checking is not None and not self._checking.step_ended(watch.peak):
            self._checking = None
        sized, before = _C.paging_stats()["recorded_steps"], self._sized
        self._sized = sized
        may_measure = self._measured < _MOST_MEASURED
        if not is_step or self.blocks.have_new():
            if watch.is_over:
                self._tell(f"{watch.in_words()}; ebb profiles steps again")
            self._begin()
        elif sized != before:
            return  # this step recorded the sizes of page pools, and used none
        elif watch.is_over:
            has_changed = self._measured == 1 or self._since > _SOON or watch.was_over
            if may_measure and has_changed:
                self._tell(f"{watch.in_words()}; ebb profiles steps again")
                self._begin()
            else:
                self._plan_for_less()
        elif may_measure and self._has_regions and watch.is_far_below():
            self._tell("steps allocate less than planned; ebb profiles steps again")
            self._begin()

    def _plan_for_less(self) -> None:
        """Plan for less memory, since some steps need more than the measured ones."""
        assert self._outcome is not None
        measured, watch = self._outcome.measured, self._watch
        planned_peak, why = watch.planned, watch.in_words()
        # `base` was measured without a plan, so it does not include tensors of a plan's own.
        decided = decided_by(plan_of(measured, measured.base + watch.less(), at_least=True))
        if decided.peak >= planned_peak or not decided.policies:
            self._tell(
                f"{why}; the current plan already has the lowest possible peak. Use a smaller "
                "batch or a larger budget"
            )
            watch.accept()
            return
        self._tell(f"{why}; ebb made a plan with a lower peak")
        watch.planned = decided.peak
        self._put_in_place(decided)


def _offer(measured: Measured, budget: float) -> Offer:
    what = "\n".join(f"{op.func_name} {op.region}" for op in measured.profile.operators)
    return Offer(
        kind=f"{zlib.crc32(what.encode()):x}",
        peak=measured.profile.peak,
        budget=budget,
        duration=measured.duration,
        base=measured.base,
    )
