"""The phases of a budget: each has its own state, and acts at the end of each step."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, replace

from _ebb_switches import is_set

from ebb import _C
from ebb._config import config
from ebb._launch.agreeing import Offer
from ebb._launch.budgeted_job import BudgetedJob, NoPlanError, Phase
from ebb._launch.checking import Checking
from ebb._launch.decided import Decided, decided_by, least_of
from ebb._launch.plan_file import PlanFileError
from ebb._launch.step_memory_monitor import PlannedMemory, Terms
from ebb._plan.choose.memory_budget import BudgetError, NothingToPlanError, allowed
from ebb._plan.measure import window_of_all
from ebb._plan.plan import plan_of
from ebb._plan.profile.measuring import (
    Measured,
    MeasureSequence,
    are_alike,
    base_bytes,
    device_of,
)
from ebb._plan.profile.profile import without_evaluation
from ebb._plan.profile.recording import Purpose, Recording
from ebb._policy.policy import Policy
from ebb._report import planned
from ebb._report.text import size
from ebb._support import devices
from ebb._support.names import in_ranges
from ebb._support.shown import clipped
from ebb.policies import recompute_all

_MOST_MEASURED = 5  # maximum number of times that steps are measured in a job
_MOST_AGAIN = 20  # maximum number of steps that do not count; more end the measurement
_SOON = 64  # steps after a plan in which one step over the budget does not mean a change for good
_LONG, _LONG_STEPS = 1.0, 20  # seconds, and steps: ebb reports planning that takes more than both


# Note [The phases of a budget]
# 1. `Start`: all blocks are recomputed from the first forward on.
# 2. `Measure`: from the end of the first step on, ebb measures steps. See Note [Steps that are
#    measured].
# 3. `Agree`: at the end of the last measured step ebb makes the plan and puts it in place. If there
#    are several ranks, see Note [Ranks that agree].
# 4. `Planned`: ebb counts the bytes of each step. See Note [Steps over the budget].
# Blocks change only between two steps. If a new model comes, another optimizer marks the steps, or
# steps change for good, ebb begins again at 2. If no plan can be made yet (`Wait`), or at all
# (`Ended`), all blocks stay recomputed: for a job with a memory budget, a slow step is better than
# running out of memory. Under EBB_BUDGET=auto, `SaveAll` comes first. If a file may have the plan,
# `FromFile` comes before all others, then perhaps `Taken`: see Note [Plans that are taken].

# Note [Steps over the budget]
# A step may change in more ways than ebb can check in advance: sizes, dtypes, which tensors need
# gradients, a second backward. So ebb counts the bytes. If a step exceeds the budget, all blocks
# are recomputed from the next step on, and ebb measures steps again. If a single step exceeds the
# budget soon after a plan, ebb assumes a recurring kind of step that was not measured, and plans
# for less memory from the existing measurements. The first time ebb scales the target by
# allowed / allocated bytes. After that ebb extrapolates linearly from the planned and the allocated
# bytes of the last two such steps. If no plan needs less memory, ebb prints that, and the job
# continues.


def measure(job: BudgetedJob) -> None:
    job.add_all()
    job.enter(Measure(job))


class Start(Phase):
    """No step has ended."""

    def step_ended(self, is_step: bool) -> None:
        _, has_new = self.job.blocks.take()
        if has_new or not is_step:
            measure(self.job)


@dataclass(frozen=True)
class Outcome:
    """The result of all measured steps."""

    measured: Measured  # input for a plan
    varies: bool  # True if the peaks of steps differ
    growth: float  # ratio of the largest step's peak to the recorded step's peak
    # The difference of these peaks in bytes. Without regions, the difference is at least as large.
    more: int
    beside: int  # bytes of the program's other tensors, which are not in `measured.base`


class Measure(Phase):
    """Measures steps. See Note [Steps that are measured]."""

    def __init__(self, job: BudgetedJob) -> None:
        super().__init__(job)
        self._recording = Recording(gives_way=True)
        self._undo = ExitStack()  # stops the measurement, and restores the job's settings
        self._settings = ExitStack()  # settings of OFFLOAD in steps that offload everything
        self._peaks: list[int] = []  # of all measured steps that do not offload everything
        self._uncounted = 0  # steps that did not count
        self._calls: int | None = None  # calls of blocks in a step that counts
        self._other_calls: int | None = None  # `_calls` of the last step, if it did not count
        self._beside = 0  # `Outcome.beside`

    def begin(self) -> None:
        blocks = self.job.blocks
        names = [block.name for block in blocks.used()]
        self.job.messages.announce_profiling(names, self.job.models)
        self._undo.callback(_restore_ahead, config.ahead.regions)
        config.ahead.regions = 0  # replays ahead would hide part of the replay time
        self._sequence = MeasureSequence(
            device_of(blocks.roots()),
            lambda measured: window_of_all(measured, self.job.budget),
            in_job=True,
        )
        self._undo.callback(self._stop)
        if self.job.file is not None and blocks.candidate == 0:
            self.job.file.inputs.clear()
            blocks.evaluation.on_first = self.job.file.note_inputs
        blocks.around.watch_callers()
        self._put_policy()
        self._prepare()
        self.job.memory.leave_out()

    def end(self) -> None:
        self._undo.close()

    def _stop(self) -> None:
        self.job.blocks.evaluation.on_first = None
        self._recording.end()
        self.job.blocks.around.stop_watching_callers()
        self._settings.close()
        if self._sequence.window is not None:
            _C.offload_stats()  # copies have ended: this call makes the engine free their memory
        devices.free_cache()

    def step_ended(self, is_step: bool) -> None:
        job = self.job
        calls, has_new = job.blocks.take()
        if has_new or not is_step:
            measure(job)
            return
        try:
            if calls == 0 and job.blocks.candidate > 0:
                raise NothingToPlanError("the model's forward does not call these modules")
            self._record(calls)
        except (NoPlanError, NothingToPlanError) as error:
            if _choose_other_blocks(job, str(error)):
                return
            raise
        if self._sequence.purpose is not None:
            self._prepare()
            return
        outcome = self._outcome()
        job.beside = outcome.beside
        job.blocks.put(recompute_all)
        job.enter(Agree(job, outcome))

    def _record(self, calls: int) -> None:
        """Record the step that has ended, with so many calls of blocks with gradients."""
        blocks, sequence = self.job.blocks, self._sequence
        ended = self._recording.end()
        blocks.around.stop_watching_callers()
        peak, window = self.job.memory.peak, sequence.window
        if window is None:
            self._peaks.append(peak)
        if not self._counts(calls) or ended is None:
            self._uncounted += 1
            if self._uncounted <= _MOST_AGAIN:
                return
            if calls == 0:
                raise NothingToPlanError(
                    "no block ran a backward in eager mode (blocks compiled by torch.compile do "
                    "not count)"
                )
            raise NoPlanError(
                "ebb cannot profile steps while torch.profiler is active; stop torch.profiler "
                "during the first steps"
                if ended is None
                else "the blocks run a different number of times in each step"
            )
        duration, profile = ended
        if profile is not None and blocks.evaluation.has_run:
            profile = without_evaluation(profile)
        sequence.record(duration, profile, peak)
        if sequence.window != window:
            self._put_policy()

    def _put_policy(self) -> None:
        self.job.blocks.put(self._sequence.policy)
        devices.free_cache()  # steps with other policies would keep other blocks in the cache

    def _prepare(self) -> None:
        """Begin the next step."""
        job, sequence = self.job, self._sequence
        self._settings.close()
        self._settings.enter_context(sequence.transfers())
        if sequence.purpose is Purpose.PROFILE:
            base = base_bytes(job.blocks.roots(), list(job.optimizers))
            self._beside = _C.tensor_bytes()[0] - base
            if job.beside is not None:
                growth = max(0, self._beside - job.beside)
                base, self._beside = base + growth, self._beside - growth
            sequence.base = base
        assert sequence.purpose is not None
        self._recording.begin(sequence.purpose)

    def _counts(self, calls: int) -> bool:
        """True if the step calls blocks as often as those before. Two steps in a row with the same
        other number of calls start the measurement again."""
        if calls == 0:
            return False
        if self._calls is None or calls == self._calls:
            self._calls, self._other_calls = calls, None
            return True
        before, self._other_calls = self._other_calls, calls
        if before == calls:
            self._sequence.restart()
            if self.job.file is not None and self.job.blocks.candidate == 0:
                self.job.file.inputs.clear()
            self.job.blocks.put(recompute_all)
            self._calls, self._other_calls = calls, None
        return False

    def _outcome(self) -> Outcome:
        peaks = self._peaks[1:]  # the first step allocates gradients and optimizer states
        size, largest = self._sequence.peak, max(peaks)
        varies = not are_alike(min(peaks), largest)
        growth = largest / size if varies and size else 1.0
        more = largest - size if varies else 0
        parents = self.job.blocks.around.parents()
        measured = replace(self._sequence.measured(), parents=parents)
        return Outcome(measured, varies, growth, more, self._beside)


def _restore_ahead(regions: int) -> None:
    if config.ahead.regions == 0:  # the job has not changed the setting meanwhile
        config.ahead.regions = regions


def _choose_other_blocks(job: BudgetedJob, why: str, least: Decided | None = None) -> bool:
    """Measure steps with other modules as blocks; False if none may be better. See
    Note [Other blocks]. `why`: why the current blocks are not sufficient."""
    if job.messages.assignment.announced:
        return False  # inside a larger block, the job's own checkpointing would have no effect
    following = job.other_blocks.next(job.models, least)
    if following is None:
        return False
    job.blocks.use(following)
    measure(job)
    names = clipped(", ".join(in_ranges(block.name for block in job.blocks.alive())), 300)
    reason, _, _ = clipped(why, 300).partition(". ")
    where = "" if least is None else " with these regions"
    job.messages.tell(f"{reason}{where}; ebb profiles again with other modules as regions: {names}")
    return True


class Agree(Start):
    """Steps have been measured. Makes the plan; if there are several ranks, once they agree."""

    def __init__(self, job: BudgetedJob, outcome: Outcome) -> None:
        super().__init__(job)
        self.outcome = outcome

    def begin(self) -> None:
        if self.job.ranks is not None:
            return
        decided = self.decide(self.outcome.measured)
        left = allowed(self.job.budget, self.outcome.measured.base, decided.plain_peak)
        why = decided.too_small
        if not why or left <= 0 or not _choose_other_blocks(self.job, why, decided):
            self.switch(decided)

    def decide_for(self, most: Offer) -> Decided:
        """Plan for all ranks of a kind: this rank's profile, with the kind's largest values."""
        measured = replace(self.outcome.measured, duration=most.duration, base=most.base)
        return self.decide(measured, most.budget)

    def decide(self, measured: Measured, budget: float | None = None) -> Decided:
        budget = self.job.budget if budget is None else budget
        growth = self.outcome.growth
        if isinstance(budget, int) and growth > 1:
            budget = measured.base + int((budget - measured.base) / growth)
        began = time.perf_counter()
        try:
            return decided_by(plan_of(measured, budget))
        except BudgetError as error:
            why = str(error).removeprefix("ebb: ")
            if self.job.messages.beside_limit is not None:  # the user gave no budget
                needed = size(error.minimum + self.job.messages.beside_limit)
                uses = why.partition(". ")[2]
                why = f"the memory limit is too small; the job needs at least {needed}. {uses}"
            return least_of(measured, budget, why)
        finally:
            took = time.perf_counter() - began
            if took > max(_LONG, _LONG_STEPS * measured.duration * 1e-3):
                self.job.messages.tell(f"planning took {took:.1f} s")

    def switch(self, decided: Decided) -> None:
        """Put a plan in place."""
        job = self.job
        if decided.too_small and is_set("EBB_STRICT"):
            raise BudgetError(f"ebb: EBB_BUDGET={job.messages.text}: {decided.too_small}")
        if job.plans == 0 and any(block.met_hooks for block in job.blocks.alive()):
            job.messages.tell(
                "the job's saved-tensor hooks (such as save_on_cpu) do not get the tensors that "
                "blocks save, so these stay on the device. A budget in percent counts from the "
                "peak without these hooks; prefer a budget in bytes"
            )
        job.enter(Planned(job, decided, _terms(job, self.outcome, decided), self.outcome))


def _terms(job: BudgetedJob, outcome: Outcome, decided: Decided) -> Terms:
    freed = outcome.measured.freed
    if isinstance(job.budget, int):
        return Terms(job.budget, outcome.beside, freed)
    return Terms(round(job.budget * (decided.plain_peak + outcome.more)), None, freed)


class Planned(Phase):
    """A plan is in place. Checks after each step if the plan still fits."""

    def __init__(
        self, job: BudgetedJob, decided: Decided, terms: Terms, outcome: Outcome | None = None
    ) -> None:
        super().__init__(job)
        self.outcome = outcome  # of the measured steps; None: the plan is from a file
        self._decided = decided
        fits = not decided.too_small
        self.memory = PlannedMemory(job.memory, decided.peak, terms, fits=fits)
        self.checking: Checking | None = None  # while steps under the plan are measured
        self._since = 0  # steps that have ended under the plan
        self._sized = 0  # steps that have recorded the sizes of page pools
        self._settings = ExitStack()  # restores the process settings that the plan has changed

    def begin(self) -> None:
        job = self.job
        self._put_in_place(self._decided)
        self._sized = _C.paging_stats()["recorded_steps"]
        if self.outcome is not None and self.outcome.varies and job.plans == 0:
            job.messages.tell(
                "the peak memory of steps varies; the plan is for the largest profiled step"
            )
        job.plans += 1
        job.memory.freed = self.memory.terms.freed

    def end(self) -> None:
        self._end_reports()
        self._settings.close()  # measurements and plans are for the job's own settings
        self.job.memory.freed = 0

    def _put_in_place(self, decided: Decided) -> None:
        self._end_reports()
        self._decided, job = decided, self.job
        self._settings.close()
        decided.regions._settings.put(self._settings)
        job.add_all()
        job.blocks.follow(self._policies(decided))
        self._tell(decided)
        if decided.reported is not None:
            decided.reported.steps = 0
            planned.begins(decided.reported)
        self._begin_checking(decided)
        self._write(decided)
        job.memory.leave_out()

    def _policies(self, decided: Decided) -> dict[str, Policy]:
        return decided.regions.policies

    def _begin_checking(self, decided: Decided) -> None:
        if decided.reported is not None and _C.is_reporting():
            self.checking = Checking(decided.reported)

    def _tell(self, decided: Decided, source: str = "") -> None:
        summary = decided.summary
        if decided.too_small:
            why = clipped(decided.too_small, 500)
            summary = f"{why}; ebb uses the plan with the lowest peak instead: {summary}"
        self.job.messages.tell(f"{source}{summary}")

    def _write(self, decided: Decided) -> None:
        """Keep the plan for the next start of the job."""
        job, file = self.job, self.job.file
        if self.outcome is None or file is None or not file.writes():
            return
        try:
            operators = self.outcome.measured.profile.operators
            names = dict.fromkeys(operator.region for operator in operators)
            path = file.write(decided, self.memory.terms, job.blocks, names)
        except PlanFileError as error:
            if is_set("EBB_STRICT"):
                raise
            job.messages.warn(str(error))
        else:
            job.messages.tell(
                f"the next start of the job takes this plan from {clipped(path, 1000)}"
            )

    def _end_reports(self) -> None:
        if self.checking is not None:
            self.checking.stop()
            self.checking = None
        if self._decided.reported is not None:
            planned.ends(self._decided.reported)

    def step_ended(self, is_step: bool) -> None:
        self._since += 1
        job, memory = self.job, self.memory
        memory.step_ended()
        if (reported := self._decided.reported) is not None:
            reported.limit, reported.steps = memory.limit, (reported.steps or 0) + 1
        if self.checking is not None and not self.checking.step_ended(job.memory.peak):
            self.checking = None
        before, self._sized = self._sized, _C.paging_stats()["recorded_steps"]
        may_measure = job.plans < _MOST_MEASURED
        _, has_new = job.blocks.take()
        if has_new or not is_step:
            self._measure_again(memory.in_words() if memory.is_over else "")
        elif self._sized != before:
            return  # this step recorded the sizes of page pools, and used none
        elif memory.is_over:
            has_changed = job.plans <= 1 or self._since > _SOON or memory.was_over
            if may_measure and has_changed:
                self._measure_again(memory.in_words())
            else:
                self._plan_for_less()
        elif may_measure and self._decided.regions.policies and memory.is_far_below():
            self._measure_again("steps allocate less than planned")

    def _measure_again(self, why: str) -> None:
        if why:
            self.job.messages.tell(f"{why}; ebb profiles steps again")
        measure(self.job)

    def _plan_for_less(self) -> None:
        """Plan for less memory, since some steps need more than the measured ones."""
        assert self.outcome is not None  # steps over a plan from a file are measured
        measured, memory = self.outcome.measured, self.memory
        planned_peak, why = memory.planned, memory.in_words()
        # `base` was measured without a plan, so it does not include tensors of a plan's own.
        decided = decided_by(plan_of(measured, measured.base + memory.less(), at_least=True))
        if decided.peak >= planned_peak or not decided.regions.policies:
            self.job.messages.tell(
                f"{why}; the current plan already has the lowest possible peak. Use a smaller "
                "batch or a larger budget"
            )
            memory.accept()
            return
        self.job.messages.tell(f"{why}; ebb made a plan with a lower peak")
        memory.planned = decided.peak
        self._put_in_place(decided)


class Wait(Phase):
    """Keeps all blocks recomputed until a block first runs backward."""

    def begin(self) -> None:
        self._replays = _C.stats()["total"]["ops_replayed"]

    def step_ended(self, is_step: bool) -> None:
        before, self._replays = self._replays, _C.stats()["total"]["ops_replayed"]
        if self._replays > before:
            self.job.blocks.take()
            measure(self.job)


class Ended(Phase):
    """ebb makes no more plans."""
