"""The phases of a budget whose plan an earlier start of the job has left in a file."""

from __future__ import annotations

from dataclasses import replace

import torch
from _ebb_switches import is_set

from ebb import _C
from ebb._launch.agreeing import Ranks, has_ranks
from ebb._launch.budget_phases import Planned
from ebb._launch.budgeted_job import BudgetedJob, Phase
from ebb._launch.decided import Decided
from ebb._launch.plan_file import PlanFile, StoredPlan
from ebb._launch.save_all import SaveAll
from ebb._plan.choose.memory_budget import BudgetError
from ebb._plan.profile.measuring import base_bytes, device_of
from ebb._policy.policy import Policy
from ebb._support.log import log
from ebb._support.shown import clipped
from ebb.policies import recompute_all

_MOST_STEPS = 2  # until a block must be called with gradients
_SETTLED = 21  # steps until the optimizer that marks the steps is known, see Note [Steps of a job]


# Note [Plans that are taken]
# The plan is put in place when a block is first called with gradients, before that call: all blocks
# are regions that recompute everything until then, so any policy may follow. Exceptions:
# * A plan with regions around blocks, or for other blocks (Note [Other blocks]), waits for the end
#   of the first step, since the modules around the first block run already.
# * A model that is first called later in the step follows the plan when it is met, if the plan was
#   made for it too.
# * If the model itself is the only block, its first call is no region. Then ebb decides in the
#   second step.
#
# The first step allocates gradients and optimizer states, so ebb checks bytes from the second on.


class FromFile(Phase):
    """No block was called with gradients. A file may have the plan; `otherwise` begins if not."""

    def __init__(self, job: BudgetedJob, otherwise: Phase) -> None:
        super().__init__(job)
        assert job.file is not None
        self.otherwise, self._file = otherwise, job.file
        self._names: list[str] = []  # of blocks, not announced yet
        self._late: StoredPlan | None = None  # put in place at the end of the step
        self._steps = 0  # steps that have ended without a call of a block with gradients

    def begin(self) -> None:
        self.job.blocks.evaluation.on_first = self._decide

    def end(self) -> None:
        self.job.blocks.evaluation.on_first = None

    def on_new_model(self, model: torch.nn.Module, names: list[str]) -> None:
        self._file.read()
        self.otherwise.on_new_model(model, [])
        super().on_new_model(model, names)

    def announce(self, names: list[str]) -> None:
        self._names += names

    def step_has_ended(self) -> None:
        """Call at the end of a step: another phase begins, if it may."""
        stored, blocks = self._late, self.job.blocks
        if stored is None:  # no block was called with gradients
            self._give_way()
            return
        if stored.candidate != blocks.candidate:
            blocks.use(stored.candidate)
        self.job.enter(Taken(self.job, stored, self._file))

    def _give_way(self) -> None:
        self._steps += 1
        has_file = self._file.stored is not None
        if has_file and self._steps < _MOST_STEPS and not has_ranks():
            return
        self._file.is_for(self._device())
        why = "the first steps called no block with gradients"
        self._refuse(why if has_file else "")

    def _decide(self, name: str, inputs: object) -> None:
        """Take the plan, or let the other phase begin. `inputs`: of the block `name`."""
        try:
            self._choose(name, inputs)
        except Exception as error:
            if isinstance(error, BudgetError) and is_set("EBB_STRICT"):
                raise
            log.info("budget: could not take the plan of %s", self._file.path, exc_info=True)
            self._refuse(f"an error in ebb: {type(error).__name__}: {error}")
            self.job.blocks.put(recompute_all)

    def _choose(self, name: str, inputs: object) -> None:
        job, file = self.job, self._file
        file.inputs.clear()
        file.note_inputs(name, inputs)
        why = file.choose(self._device())
        is_auto = isinstance(self.otherwise, SaveAll)
        stored = file.stored
        if stored is not None and is_auto and has_ranks():
            why = "with several ranks, auto takes no plan from a file"
        if why or stored is None:
            self._refuse(why)
            return
        if stored.decided.too_small and is_set("EBB_STRICT"):
            raise BudgetError(f"ebb: EBB_BUDGET={job.messages.text}: {stored.decided.too_small}")
        if is_auto:
            job.budget = stored.terms.budget
            _C.keep_while_there_is_room(0)
        if stored.is_around or stored.candidate != job.blocks.candidate:
            self._late = stored
            job.blocks.evaluation.on_first = None
        else:
            job.enter(Taken(job, stored, file))

    def _device(self) -> torch.device:
        roots = (block.root() for block in self.job.blocks.alive())
        return device_of(root for root in roots if root is not None)

    def _refuse(self, why: str) -> None:
        """Begin the other phase. `why`: in words, empty if the user need not know."""
        job = self.job
        job.add_all()
        if why:
            job.messages.tell(
                f"no plan from {self._file.name}: {clipped(why, 500)}; the next plan replaces it"
            )
        job.enter(self.otherwise)
        if self._names:
            job.phase.announce(self._names)


class Taken(Planned):
    """The plan from a file is in place. See Note [Plans that are taken]."""

    def __init__(self, job: BudgetedJob, stored: StoredPlan, file: PlanFile) -> None:
        self._stored, self._file = stored, file
        beside = 0 if isinstance(job.budget, int) else None
        super().__init__(job, stored.decided, replace(stored.terms, beside=beside))

    def _policies(self, decided: Decided) -> dict[str, Policy]:
        """The plan's policies. Blocks that had no gradients when it was made recompute all."""
        names = (block.name for block in self.job.blocks.alive())
        others = (name for name in names if name not in self._stored.profiled)
        return dict.fromkeys(others, recompute_all) | super()._policies(decided)

    def _tell(self, decided: Decided, source: str = "") -> None:
        self.job.messages.announced = True
        decided = replace(decided, summary=f"{decided.summary}; EBB_DISABLE=1 turns ebb off")
        super()._tell(decided, f"the plan from {self._file.name}, without profiling: ")

    def begin(self) -> None:
        super().begin()
        self.job.plans -= 1  # no steps were measured for it

    def on_new_model(self, model: torch.nn.Module, names: list[str]) -> None:
        if names and self._since == 0 and self._file.lists_models():
            self.job.blocks.follow(self._policies(self._decided))

    def step_ended(self, is_step: bool) -> None:
        refusal = self.job.ask_ranks(Ranks.refusal, None)  # see Note [Ranks that vote]
        if refusal == "":
            self.job.leave_ranks()
        if refusal:
            self._measure_again(f"{self._file.name}: {refusal}")
        elif self._since == 0:
            self._first_step_ended()
        else:
            super().step_ended(is_step or self._since < _SETTLED)

    def _first_step_ended(self) -> None:
        job = self.job
        self._since += 1
        _, has_new = job.blocks.take()
        if has_new:
            self._measure_again("")
            return
        if self.memory.terms.beside is not None:
            beside = _C.tensor_bytes()[0] - base_bytes(job.blocks.roots(), list(job.optimizers))
            job.beside = max(0, beside)
            self.memory.terms = replace(self.memory.terms, beside=job.beside)
        self._begin_checking(self._decided)

    def _begin_checking(self, decided: Decided) -> None:
        if self._since > 0:  # else a part of the step is over
            super()._begin_checking(decided)

    def _measure_again(self, why: str) -> None:
        name = self._file.name
        super()._measure_again(why or f"{name} is not for all models and optimizers of this job")
