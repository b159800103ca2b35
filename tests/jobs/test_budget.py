"""EBB_BUDGET in jobs that do not know of it: they are measured, planned and switched, with the same
bits.
"""

from __future__ import annotations

import re
import time

import pytest
import torch
from torch import nn

import ebb
from ebb import _C
from ebb._launch import budget_phases as module
from ebb._launch import decided, step_memory_monitor, takeover
from ebb._plan.choose.memory_budget import BudgetError
from ebb._plan.plan import plan_of
from ebb._region.modules import marks_of
from ebb_tests.budget_jobs import (
    PLANNED,
    ROWS,
    STEPS,
    WIDTH,
    Job,
    Net,
    Quiet,
    assert_same,
    peak_of,
    regions,
)


def test_a_job_is_measured_planned_and_switched(install, told):
    expected = Job().train()
    install("60%")

    found = Job().train(PLANNED - 1)
    assert len(told()) == 1
    assert found.train(1 + STEPS - PLANNED).bits

    assert_same(found, expected)
    assert 0 < len(regions(found.model)) <= 4
    (line,) = told()
    assert re.match(
        r"60%: \d regions? \(layers\.\S+\); predicted peak .* (more|eager's) time", line
    )


@pytest.mark.parametrize("budget", ["60%", "1GiB"])
def test_while_it_is_measured_all_blocks_are_recomputed(install, budget):
    """No step takes more than the plan for the least budget would."""
    install(budget)
    job = Job()

    for _ in range(PLANNED - 1):
        job.train(1)
        assert list(regions(job.model).values()) == [ebb.policies.recompute_all] * 4


@pytest.mark.not_sanitized
@pytest.mark.parametrize("share", [0.5, 0.7])
def test_the_peak_is_in_the_budget(install, share):
    plain = Quiet().train(3)
    peak_of(plain)
    allowed, _ = peak_of(plain)
    install(share)
    job = Quiet().train(PLANNED)

    peak_of(job)
    found, _ = peak_of(job)

    assert 0.7 * share * allowed < found <= share * allowed


@pytest.mark.not_sanitized
def test_a_budget_in_bytes_is_all_told(install):
    plain = Quiet().train(3)
    peak_of(plain)
    peak, in_all = peak_of(plain)
    budget = in_all - peak // 3
    install(f"{budget}")
    job = Quiet().train(PLANNED)

    peak_of(job)
    _, found = peak_of(job)

    assert budget - peak // 5 < found <= budget


def test_nothing_is_left_where_all_fits(install, told):
    install("1GiB")

    job = Job().train()

    assert regions(job.model) == {}
    assert all(marks_of(inner) is None for inner in job.model.modules())
    assert len(nn.modules.module._global_forward_pre_hooks) == 0
    assert "fits as it is" in told()[-1]


def test_a_budget_that_is_too_small(trained, told):
    found = trained("1KiB")

    assert len(regions(found.model)) == 4
    line = told()[-1]
    assert "1KiB: a budget of 1.0 KiB is too small; the lowest possible budget is" in line
    assert "the plan with the lowest peak instead: 4 regions" in line


def test_a_budget_that_is_too_small_ends_a_strict_job(install, monkeypatch):
    monkeypatch.setenv("EBB_STRICT", "1")
    install("1KiB")

    with pytest.raises(BudgetError, match=r"EBB_BUDGET=1KiB: a budget of 1\.0 KiB is too small"):
        Job().train()


def test_what_was_measured_counts_more_than_an_estimate(install, told, monkeypatch):
    def too_small(measured, budget, *, at_least=False):
        if not at_least:
            raise BudgetError("ebb: a budget of 60% is too small", 1)
        plan = plan_of(measured, 1.0)
        plan.budget, plan.peak = plan.plain_peak, plan.plain_peak
        return plan

    for place in (module, decided):
        monkeypatch.setattr(place, "plan_of", too_small)
    monkeypatch.setenv("EBB_STRICT", "1")
    install("60%")

    job = Job().train()

    assert set(regions(job.model).values()) == {ebb.policies.recompute_all}
    assert (
        "60%: 4 regions (layers.0-3) that recompute everything; a profiled step of this kind "
        "allocated" in told()[-1]
    )


# What else there is ------------------------------------------------------------------------------


def test_modules_that_are_named_are_the_blocks(install, told):
    install("60%", "layers.[01]")

    job = Job().train()

    assert "layers.0-1;" in told()[0]
    assert set(regions(job.model)) <= {"layers.0", "layers.1"}


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears")
def test_torchs_profiler_runs_beside_it(install, told):
    expected = Job().train(STEPS + 8)
    install("60%")
    found = Job()

    with torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=2)
    ) as profiler:
        for _ in range(STEPS + 8):
            found.train(1)
            profiler.step()

    assert_same(found, expected)
    assert regions(found.model)
    assert len(profiler.events()) > 0


def test_a_profiler_that_never_ends(install, told):
    install("60%")

    with torch.profiler.profile():
        Job().train(25)

    assert "torch.profiler during the first steps; all blocks are recomputed" in told()[-1]


def test_replays_ahead_are_off_only_while_it_is_measured(install, monkeypatch):
    monkeypatch.setattr(ebb._plan.plan, "ahead_is_on", lambda: False)  # a plan leaves them on
    ebb.config.ahead.regions = 1
    monkeypatch.setattr(
        step_memory_monitor, "_OVER", 2.0
    )  # with replays ahead the last region keeps all
    install("60%")

    job = Job().train(2)
    assert ebb.config.ahead.regions == 0
    job.train(STEPS)

    assert ebb.config.ahead.regions == 1


@pytest.mark.parametrize("budget", ["1KiB", "22%"])
def test_where_there_is_no_room_nothing_is_replayed_ahead(budget, install):
    def rows(step):
        return ROWS if step < STEPS else 2 * ROWS  # for which it is planned anew

    ebb.config.ahead.regions = 1
    expected = Job(rows=rows).train(STEPS + 12)
    install(budget)

    found = Job(rows=rows).train(STEPS)
    assert ebb.config.ahead.regions == 0
    found.train(12)
    assert ebb.config.ahead.regions == 0
    takeover.remove()

    assert ebb.config.ahead.regions == 1
    assert_same(found, expected)


def test_modules_that_are_regions_already_are_left_alone(install, told):
    install("60%")
    job = Job()
    handle = ebb.apply(job.model, ebb.policies.save_matmuls, "layers.0")

    job.train()

    assert "layers.1-3;" in told()[0]
    handle.remove()


def test_what_fails_ends_no_job(trained, told, monkeypatch):
    def fails(*_):
        raise RuntimeError("a fault")

    monkeypatch.setattr(module, "plan_of", fails)

    trained("60%")

    assert told()[-1] == (
        "60%: no plan: an error in ebb (TORCH_LOGS=ebb shows its stack): RuntimeError: a fault; "
        "all blocks are recomputed"
    )


def test_taking_it_away_in_the_middle(install):
    install("60%")
    job = Job().train(4)

    takeover.remove()

    job.train(4)
    _C.begin_profile()
    _C.end_profile()


def test_a_steady_step_costs_microseconds(install):
    budget = install("60%")
    Job(depth=32).train()
    looks = []
    for _ in range(20):
        begin = time.perf_counter()
        budget._at_boundary(True)
        looks.append(time.perf_counter() - begin)

    assert min(looks) < 50e-6


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_is_compiled_has_no_blocks(install, told):
    install("60%")
    model = torch.compile(Net(), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    for _ in range(30):
        model(torch.randn(8, WIDTH)).mean().backward()
        optimizer.step()

    assert told()[-1].startswith("60%: no plan")
    assert regions(model) == {}
    torch._dynamo.reset()


# The line that names the measured step: only in a terminal -------------------------------------


class FreesItsBatch(Quiet):
    """Frees the last batch, which is larger than the model, when a step begins."""

    def batch(self, step):
        self.inputs = None
        self.inputs = super().batch(step)
        return self.inputs


def test_bytes_in_use_are_not_negative_if_a_step_frees_more_than_the_model_has(install, told):
    install("1%")

    FreesItsBatch(rows=lambda step: 32 * ROWS).train(STEPS + PLANNED)

    assert ". 0 B are in use when the step begins, " in told()[-1]


def test_a_job_whose_memory_ebb_cannot_lower_is_told_so(install, told):
    install("50%")

    Job(rows=lambda step: 1).train(STEPS + 2 * PLANNED)

    message = "a budget of 50.0% is too small. ebb cannot lower the memory of this job: "
    assert message in told()[-1]


def test_two_lines_where_there_is_no_terminal(install, capsys):
    install("60%")

    Job().train(PLANNED)

    first, last = capsys.readouterr().err.splitlines()
    assert "ebb profiles 6 steps" in first
    assert "; predicted peak " in last
