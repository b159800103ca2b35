"""EBB_BUDGET in jobs whose steps change: their bytes are counted, and the budget holds again."""

from __future__ import annotations

import pytest
import torch

from ebb import _C
from ebb._launch import step_memory_monitor
from ebb._plan.profile.measuring import base_bytes
from ebb_tests.budget_jobs import (
    PLANNED,
    ROWS,
    STEPS,
    WIDTH,
    Block,
    Job,
    Net,
    Quiet,
    assert_same,
    regions,
    step_bytes,
)
from ebb_tests.exactness import same_bits
from ebb_tests.other_threads import in_thread

LATER = PLANNED + 12  # steps, all told


class ByKeyword(Net):
    def call(self, layer, x):
        return layer(x=x)


class Pair(Block):
    def forward(self, pair):
        return super().forward(pair[0]), pair[1]


class InTuples(Net):
    def call(self, layer, x):
        return layer((x, None))[0]


class Crossing(Block):
    """Reads a second argument."""

    def forward(self, x, memory):
        return super().forward(x + torch.softmax(x @ memory.T, -1) @ memory)


class WithMemory(Net):
    def forward(self, x):
        x, memory = x[:ROWS], x[ROWS // 2 :]
        for layer in self.layers:
            x = layer(x, memory)
        return self.head(x)


class Attending(Block):
    def forward(self, x):
        return super().forward(x + torch.softmax(x @ x.transpose(-1, -2), -1) @ x)


class Steady(Quiet):
    """Its batches grow after PLANNED steps."""

    def __init__(self, model=Net, factor=1.3, **settings):
        rows = [ROWS, int(factor * ROWS)]
        super().__init__(model, lambda step: rows[step >= PLANNED], **settings)


class Reshaped(Quiet):
    """Its batches get another shape of the same size."""

    def batch(self, step):
        return torch.randn(*((8, 32) if step < PLANNED else (2, 128)), WIDTH)


class Unfrozen(Quiet):
    def step(self, step):
        if step in (0, PLANNED):
            self.model.layers[:2].requires_grad_(step > 0)
        super().step(step)


class Precise(Quiet):
    """Without autocast from some step on."""

    def step(self, step):
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=step < PLANNED):
            loss = self.model(self.batch(step)).float().square().mean()
        loss.backward()
        self.note(loss)
        self.optimizer.step()


KINDS = {
    "a batch": Steady,
    "by keyword": lambda: Steady(ByKeyword),
    "in tuples": lambda: Steady(InTuples, block=Pair),
    "a second argument": lambda: Steady(WithMemory, factor=1.6, block=Crossing),
    "shapes of equal size": lambda: Reshaped(block=Attending),
    "parameters that train": Unfrozen,
    "no autocast": Precise,
}


@pytest.mark.not_sanitized
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_budget_holds_again_after_a_step_that_grows(install, told, kind):
    job = kind()
    plain = step_bytes(job, LATER)
    before, later = max(plain[2 : PLANNED - 1]), max(plain[PLANNED:])
    assert later > 1.1 * before
    budget = before - (before - base_bytes([job.model], [job.optimizer])) // 10
    install(budget)

    under_budget = kind()
    found = step_bytes(under_budget, LATER)

    assert all(map(same_bits, under_budget.model.parameters(), job.model.parameters()))
    over = [step for step, nbytes in enumerate(found) if nbytes > 1.02 * budget]
    assert over in ([], [PLANNED])
    lines = told()
    assert len(lines) == 4
    assert "for a step; ebb profiles steps again" in lines[2]


@pytest.mark.sweep
def test_kind_of_step_that_recurs_is_planned_for(install, told):
    """Every eighth step is larger: it is in no step that is measured, so what it took tells."""

    def rows(step):
        return int(1.5 * ROWS) if step % 8 == 7 else ROWS

    job = Quiet(rows=rows)
    plain = step_bytes(job, 8)
    budget = (max(plain[1:7]) + base_bytes([job.model], [job.optimizer])) // 2
    expected = Job(rows=rows).train(48)
    install(budget)

    found = step_bytes(Quiet(rows=rows), 48)

    assert all(nbytes <= 1.02 * budget for nbytes in found[24:])
    assert any("made a plan with a lower peak" in line for line in told())
    assert_same(Job(rows=rows).train(48), expected)


@pytest.mark.not_sanitized
def test_memory_that_grows_between_steps_counts(install, told):
    """The job keeps one tensor more after each step, up to a third of the budget for steps."""

    class Keeping(Quiet):
        kept = 0

        def step(self, step):
            super().step(step)
            if PLANNED <= step < PLANNED + 12:
                self.tensors = [*getattr(self, "tensors", []), torch.ones(more // 12 // 4)]
                self.kept += more // 12 // 4 * 4

    expected = Quiet()
    plain = max(step_bytes(expected, 8)[1:])
    held = base_bytes([expected.model], [expected.optimizer])
    more = (plain - held) // 5
    budget = held + (plain - held) * 6 // 10
    expected.train(32)
    install(budget)

    job = Keeping()
    found = []
    for _ in range(40):
        kept = job.kept
        found.append(step_bytes(job, 1)[0] + kept)

    over = [step for step, nbytes in enumerate(found) if nbytes > 1.02 * budget]
    assert not any({step, step + 1, step + 2} <= set(over) for step in over)
    assert any("but the budget leaves only" in line for line in told())
    assert all(map(same_bits, job.model.parameters(), expected.model.parameters()))


def test_too_small_budget_is_told_of_once_for_each_plan(install, told):
    install("100KiB")  # less than weights take

    found = Quiet(rows=lambda step: ROWS if step < STEPS else 4 * ROWS).train(2 * STEPS)

    lines = told()
    assert sum("is too small" in line for line in lines) == 2
    assert len(lines) == 4
    assert len(regions(found.model)) == 4


def test_smaller_steps_are_profiled_again(install, told):
    def rows(step):
        return ROWS if step < PLANNED else ROWS // 3

    job = Quiet(rows=rows)
    plain = max(step_bytes(job, PLANNED)[1:])
    held = base_bytes([job.model], [job.optimizer])
    install(held + (plain - held) // 2)
    found = Quiet(rows=rows).train(PLANNED)
    assert regions(found.model)

    # they count anew after one that allocates more
    found.train(2 * step_memory_monitor._STEPS_BELOW + PLANNED)

    lines = told()
    assert regions(found.model) == {}, lines
    assert "steps allocate less than planned" in "".join(lines)


def test_model_that_is_frozen_at_first_is_planned_later(install, told):
    class Thawed(Quiet):
        def step(self, step):
            if step in (0, STEPS):
                self.model.layers.requires_grad_(step > 0)
            super().step(step)

    install("60%")
    job = Thawed().train(STEPS)
    assert "no plan yet" in told()[-1]

    job.train(2 + PLANNED)

    assert "; predicted peak " in told()[-1]
    assert 0 < len(regions(job.model)) <= 4


def test_two_threads_that_train_prevent_a_plan(install, told):
    install("60%")
    jobs = [Quiet(), Quiet()]
    jobs[0].train(2)
    in_thread(lambda: jobs[1].train(2))
    jobs[0].train(PLANNED)

    assert "optimizers step on several threads, so ebb cannot tell where a step ends" in told()[-1]
    _C.begin_profile()  # none goes on
    _C.end_profile()


def test_first_profiled_step_makes_no_plan_larger(install, told):
    class Early(Quiet):
        """Its second step allocates more than all others."""

        def step(self, step):
            if step == 1:
                torch.ones(2**18)  # 1 MiB, freed at once
            super().step(step)

    install("60%")

    Early().train()

    assert not any("the peak memory of steps varies" in line for line in told())


@pytest.mark.sweep
def test_steps_that_grow_on_are_told_of_a_few_times(install, told):
    install("35%")

    Quiet(rows=lambda step: ROWS + 16 * max(0, step - PLANNED)).train(60)

    lines = told()
    assert sum("already has the lowest possible peak" in line for line in lines) <= 6
    assert sum("ebb profiles steps again" in line for line in lines) >= 2


def test_other_tensors_of_the_program_give_a_budget_no_slack(install, told):
    """2 % of the budget are allowed, and not of what else is in memory."""
    data = torch.ones(2**22)  # 16 MiB
    job = Steady(factor=1.1)
    plain = max(step_bytes(job, PLANNED)[1:])
    held = base_bytes([job.model], [job.optimizer])
    install(held + (plain - held) * 6 // 10)

    Steady(factor=1.1).train(LATER)

    assert any("ebb profiles steps again" in line for line in told())
    assert data.numel()


def test_job_that_checkpoints_is_not_profiled_with_larger_regions(install, told):
    install("5%")

    Quiet(checkpoints=True).train()

    assert not any("other modules as regions" in line for line in told())


def test_job_that_ends_before_there_is_a_plan_is_told_so(install, told):
    budget = install("60%")
    Quiet().train(3)

    budget._at_exit()

    assert "the job ended after 3 steps, before the plan was ready" in told()[-1]

    Quiet().train(PLANNED)
    told()
    budget._at_exit()
    assert told() == []
