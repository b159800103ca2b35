"""A budget for a job that does not know of it: measures its steps, plans, and switches."""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace

import torch
from _ebb_switches import is_set

from ebb import _C
from ebb._launch import agreeing
from ebb._launch.agreeing import Offer, Ranks, ranks_of_job
from ebb._launch.budgeted import Blocks, Shape
from ebb._launch.checking import Checking
from ebb._launch.measured_steps import Measuring, NoPlanError, Outcome, number_of_steps
from ebb._launch.step_clock import StepClock
from ebb._launch.taken import Taken
from ebb._plan.budget import BudgetError
from ebb._plan.measured import Measured
from ebb._plan.plan import Plan, plan_of
from ebb._plan.process_settings import ProcessSettings
from ebb._policy.policy import Policy
from ebb._report import planned
from ebb._report.planned import ReportedPlan
from ebb._report.text import size
from ebb._support.job import is_first
from ebb._support.log import log
from ebb._support.names import in_ranges
from ebb._support.shown import clipped, tell
from ebb.policies import recompute_all, save_all

_FOR_GOOD = 8  # steps of other shapes, one after the other, after which all is measured again
_MOST_PLANS = 5  # that are made because shapes have changed for good
_GROWTH = 0.1  # of a batch over those that were measured; the grid of what is planned for


@dataclass(frozen=True)
class Decided:
    """What a plan comes to.

    Attributes:
        policies: of blocks, by their names; all others keep everything.
        summary: in words.
        too_small: why the budget is not kept, if it is not.
        settings: of the process, that go with the policies.
        reported: what reports tell of it.
    """

    policies: Mapping[str, Policy]
    summary: str
    too_small: str = ""
    settings: ProcessSettings = field(default_factory=ProcessSettings)
    reported: ReportedPlan | None = None


def _decided(plan: Plan, too_small: str = "") -> Decided:
    summary = plan.summary().removeprefix("ebb: ")
    return Decided(plan.policies, summary, too_small, plan.settings, _reported(plan))


# Note [The phases of a budget]
# 1. All blocks are recomputed from the first forward on: what fits at all, fits then.
# 2. From the end of the first step on, steps are measured. See Note [Steps that are measured].
# 3. At the end of the last of them the plan is made and put in place. Ranks wait until they meet,
#    see Note [Ranks that agree].
# Blocks change only between two steps. If a new model comes, or another optimizer tells the steps,
# or shapes change for good, it begins again at 2. Where there can be no plan, all blocks stay
# recomputed: who gives a budget would rather lose time than memory.


class Budget:
    """What a budget does in a job.

    Args:
        budget: bytes, or a share of what a step without regions allocates.
        text: what the user wrote for it.
        patterns: globs over names of modules, which are the blocks; none: they are found.
        taken: what is taken over beside blocks.
    """

    def __init__(
        self, budget: int | float, text: str, patterns: tuple[str, ...], taken: Taken
    ) -> None:
        self.blocks = Blocks(patterns)
        self._budget = budget
        self._text = text
        self._taken = taken
        self._clock = StepClock(self._at_boundary, self._in_backward)
        self._models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._measuring: Measuring | None = None  # while steps are measured
        self._outcome: Outcome | None = None
        self._steps = 0  # that have ended
        self._ranks: Ranks | None = None  # until they have agreed
        self._growth = 1.0  # what the plan is for, over what was recorded
        self._most_kept: int | None = None  # bytes of a measured step in which all is kept
        # Shapes of late, and for how many steps.
        self._unlike: tuple[tuple[Shape, ...] | None, int] = (None, 0)
        self._plans = 0
        self._moved = ExitStack()  # of settings of the process, if a plan has changed some
        self._reported: ReportedPlan | None = None  # that is in place
        self._checking: Checking | None = None  # while steps under it are measured
        self._has_ended = False  # there will be no plan
        self._announced = False

    def start(self, undo: ExitStack) -> None:
        """From now on, until `undo` is closed."""
        self._clock.start(undo)
        undo.callback(self._stop)

    def meet(self, model: torch.nn.Module) -> None:
        """Before the first forward of a model."""
        try:
            self._models.add(model)
            names = self.blocks.add(model, recompute_all)
            if names and torch.is_grad_enabled():
                self._announce(names)
        except Exception as error:
            self._fail(error)

    def calls_do_nothing(self) -> bool:
        """Whether calls of torch.utils.checkpoint are no regions now: where a block's policy
        counts, and in steps that are measured without any region.
        """
        return self.blocks.are_plain or _C.in_region()

    def _announce(self, names: list[str]) -> None:
        if self._announced or not names:
            return
        self._announced = True
        shown = clipped(", ".join(dict.fromkeys(in_ranges(names))), 300)
        self._tell(
            f"{number_of_steps(self._models)} steps are measured, then it is planned what these "
            f"keep: {shown}; EBB_DISABLE=1 turns it off"
        )
        if self._taken.text.startswith("EBB="):
            self._tell(
                f"{self._taken.text} counts for calls of torch.utils.checkpoint that are in none "
                "of these, and for nothing else"
            )

    def _tell(self, what: str) -> None:
        log.info("budget: %s", what)
        if is_first():
            tell(f"ebb: EBB_BUDGET={self._text}: {what}")

    # Between two steps ----------------------------------------------------------------------------

    def _at_boundary(self, is_step: bool) -> None:
        try:
            self._step_ended(is_step)
            self._meet_ranks()
        except NoPlanError as error:
            found = any(self.blocks.alive())
            self._give_up(str(error) if found else "no module is a block, or matches EBB_MODULES")
            self._meet_ranks()
        except Exception as error:
            self._ranks = None
            if isinstance(error, BudgetError) and is_set("EBB_STRICT"):
                self._stop()
                raise
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        log.info("budget", exc_info=True)
        self._give_up(f"{type(error).__name__}: {error}")

    def _in_backward(self) -> None:
        if not self._has_ended:
            self._give_up("an optimizer steps while backward runs, so no step has an end")

    def _step_ended(self, is_step: bool) -> None:
        self._steps += 1
        if self._steps == 1 and self._ranks is None:
            self._ranks = ranks_of_job()
            if self._ranks is not None:
                self._ranks.join()
        if self._has_ended:
            return
        if self._outcome is not None and self._plans > 0 and self._ranks is None:
            self._look(is_step)
        else:
            self._measure_on(is_step)

    def _measure_on(self, is_step: bool) -> None:
        seen, has_new = self.blocks.take()
        if has_new or not is_step:
            self._begin()
        elif self._measuring is not None:
            outcome = self._measuring.step_ended(seen)
            if outcome is not None:
                self._measuring, self._outcome = None, outcome
                self._growth = _rounded_up(outcome.growth)
                self.blocks.put(recompute_all)
                if self._ranks is None:
                    self._switch(self._decide(outcome.measured))

    def _begin(self) -> None:
        """Steps are measured from now on."""
        self._add_all()
        if self._measuring is not None:
            self._measuring.stop()
        self._end_plan()
        self._moved.close()  # the job's own settings are what is measured, and planned for
        self._outcome, self._growth = None, 1.0
        self._announce([block.name for block in self.blocks.used()])
        optimizers = self._clock.optimizers
        self._measuring = Measuring(self.blocks, lambda: list(optimizers), self._most_kept)
        self._measuring.begin()

    def _add_all(self) -> None:
        """Also those that were given their own forward back."""
        for model in list(self._models):
            self.blocks.add(model, recompute_all)

    def _give_up(self, why: str) -> None:
        self._stop()
        self._outcome = None
        with suppress(Exception):  # what made it give up may be how blocks are found
            self._add_all()
        self.blocks.put(recompute_all)
        self._tell(f"no plan: {clipped(why, 300)}; all blocks are recomputed")

    def _stop(self) -> None:
        self._has_ended = True
        self._moved.close()
        if self._measuring is not None:
            self._measuring.stop()
            self._measuring = None
        self._end_plan()
        self.blocks.are_plain = False

    # Plans ----------------------------------------------------------------------------------------

    def _meet_ranks(self) -> None:
        """At some boundaries. A rank that has given up comes too: others wait for it."""
        if self._ranks is None or self._steps not in agreeing.MEETINGS:
            return
        outcome = self._outcome
        offer = None if outcome is None else _offer(outcome.measured, self._budget)
        try:
            again, decided = self._ranks.agree(
                self._steps, offer, self._has_ended, lambda most: self._decide_for(most, outcome)
            )
        except Exception as error:
            log.info("ranks do not agree: %s", error)
            again, decided = False, None
            if outcome is not None:
                decided = self._decide(outcome.measured)
        if again and not self._has_ended:
            return
        self._ranks = None
        if self._has_ended:
            return
        if decided is None:
            raise NoPlanError("steps differ too much to be measured")
        self._switch(decided)

    def _decide_for(self, most: Offer, outcome: Outcome | None) -> Decided:
        """For all ranks of a kind: what this one measured, where none measured more."""
        assert outcome is not None
        return self._decide(
            replace(
                outcome.measured,
                duration=most.duration,
                base=most.base,
                plain=most.plain,
                plain_peak=most.plain_peak,
                kept=most.kept,
            ),
            most.budget,
        )

    def _decide(self, measured: Measured, budget: float | None = None) -> Decided:
        budget = self._budget if budget is None else budget
        if isinstance(budget, int) and self._growth > 1:
            budget = measured.base + int((budget - measured.base) / self._growth)
        try:
            plan = plan_of(measured, budget)
        except BudgetError as error:
            return self._least(measured, budget, str(error).removeprefix("ebb: "))
        return _decided(plan)

    def _least(self, measured: Measured, budget: int | float, why: str) -> Decided:
        """What needs least, by a plan or as it was measured with all blocks recomputed: there
        nothing is estimated.
        """
        plan = plan_of(measured, budget, at_least=True)
        peak = measured.profile.peak
        if plan.peak < peak:
            return _decided(plan, why)
        names = dict.fromkeys(one.region for one in measured.profile.operators)
        summary = (
            f"{len(names)} regions ({', '.join(in_ranges(names))}), where all is recomputed; the "
            f"step allocated {size(peak)} so"
        )
        return Decided(
            dict.fromkeys(names, recompute_all),
            summary,
            why if peak > plan.budget else "",
            ProcessSettings(ahead=False),
            reported=_reported(plan, measured),
        )

    def _switch(self, decided: Decided) -> None:
        """Puts a plan in place."""
        assert self._outcome is not None
        if decided.too_small and is_set("EBB_STRICT"):
            raise BudgetError(f"ebb: EBB_BUDGET={self._text}: {decided.too_small}")
        self._plans += 1
        self._moved.close()
        decided.settings.put(self._moved)
        self._add_all()
        # A call of torch.utils.checkpoint around a block would recompute it.
        self.blocks.follow(decided.policies, save_all if self._taken.announced else None)
        if decided.too_small:
            self._tell(f"{clipped(decided.too_small, 500)}; what needs least: {decided.summary}")
        else:
            self._tell(decided.summary)
        if self._outcome.varies and self._plans == 1:
            self._tell(
                "the sizes of batches change; the plan is made for the largest that was measured"
            )
        self._begin_plan(decided.reported)

    def _begin_plan(self, reported: ReportedPlan | None) -> None:
        """For reports."""
        self._end_plan()
        self._reported = reported
        if reported is not None:
            planned.begins(reported)
            if _C.is_reporting():
                self._checking = Checking(reported, self.blocks)

    def _end_plan(self) -> None:
        if self._checking is not None:
            self._checking.stop()
        if self._reported is not None:
            planned.ends(self._reported)
        self._reported = self._checking = None

    # Steps under a plan ---------------------------------------------------------------------------

    def _look(self, is_step: bool) -> None:
        """Whether the plan still fits; a few blocks tell."""
        assert self._outcome is not None
        if self._checking is not None and not self._checking.step_ended():
            self._checking = None
        is_usual, shapes, growth = self.blocks.glance()
        if not is_step or self.blocks.have_new():
            self._begin()
        elif is_usual:
            self._unlike = (None, 0)
        else:
            before, count = self._unlike
            self._unlike = (shapes, count + 1 if shapes == before else 1)
            if self._are_for_good(growth):
                self._begin()
            elif isinstance(self._budget, int) and growth * self._outcome.growth > self._growth:
                self._grow(growth)

    def _are_for_good(self, growth: float) -> bool:
        assert self._outcome is not None
        matters = growth > 1 or not self._outcome.varies
        return matters and self._unlike[1] >= _FOR_GOOD and self._plans < _MOST_PLANS

    def _grow(self, growth: float) -> None:
        """A batch was larger than all that were measured: memory is taken to grow with it."""
        assert self._outcome is not None
        self._growth = _rounded_up(growth * self._outcome.growth)
        self._tell(f"a batch is {growth:.2f} times as large as those that were measured")
        self._moved.close()
        self._switch(self._decide(self._outcome.measured))


def _rounded_up(growth: float) -> float:
    return max(1.0, math.ceil(round(growth / _GROWTH, 6)) * _GROWTH)


def _reported(plan: Plan, measured: Measured | None = None) -> ReportedPlan | None:
    """What reports tell of it, without what it was made from: that would stay in memory."""
    try:
        found = plan._for_reports(measured)
        found.keep_points(_C.is_reporting())
        return found
    except Exception:  # a report is not worth a plan
        log.info("reports do not know the plan", exc_info=True)
        return None


def _offer(measured: Measured, budget: float) -> Offer:
    what = "\n".join(f"{one.func_name} {one.region}" for one in measured.profile.operators)
    return Offer(
        kind=f"{zlib.crc32(what.encode()):x}",
        peak=measured.profile.peak,
        budget=budget,
        duration=measured.duration,
        base=measured.base,
        plain=measured.plain,
        plain_peak=measured.plain_peak,
        kept=measured.kept,
    )
