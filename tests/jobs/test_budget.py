"""EBB_BUDGET in unchanged jobs: ebb profiles steps, then applies a plan, with the same bits."""

from __future__ import annotations

import gc
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
from ebb._plan.profile.measuring import base_bytes
from ebb._region.modules import marks_of
from ebb._report.metrics import Metrics
from ebb_tests.budget_jobs import (
    PLANNED,
    ROWS,
    STEPS,
    Job,
    Quiet,
    assert_same,
    peak_of,
    regions,
)


def test_job_is_profiled_planned_and_switched(install, told):
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
def test_all_blocks_are_recomputed_while_steps_are_profiled(install, budget):
    """No step takes more than the plan for the least budget would."""
    install(budget)
    job = Job()

    for _ in range(PLANNED - 1):
        job.train(1)
        assert list(regions(job.model).values()) == [ebb.policies.recompute_all] * 4


@pytest.mark.not_sanitized
@pytest.mark.parametrize("share", [0.5, 0.7, None])
def test_peak_is_in_the_budget(install, share):
    """A budget in percent counts from the peak, and one in bytes counts all memory in use."""
    plain = Quiet().train(3)
    peak_of(plain)
    peak, in_all = peak_of(plain)
    budget = in_all - peak // 3 if share is None else share * peak
    install(str(budget) if share is None else share)
    job = Quiet().train(PLANNED)

    peak_of(job)
    found = peak_of(job)[share is None]

    assert budget - (peak // 5 if share is None else 0.3 * budget) < found <= budget


def test_no_hook_or_region_is_left_if_the_step_fits(install, told):
    install("1GiB")

    job = Job().train()

    assert regions(job.model) == {}
    assert all(marks_of(inner) is None for inner in job.model.modules())
    assert len(nn.modules.module._global_forward_pre_hooks) == 0
    assert "fits as it is" in told()[-1]


def test_too_small_budget_gives_the_plan_with_the_lowest_peak(trained, told, install, monkeypatch):
    found = trained("1KiB")

    assert len(regions(found.model)) == 4
    line = told()[-1]
    assert "1KiB: a budget of 1.0 KiB is too small; the lowest possible budget is" in line
    assert "the plan with the lowest peak instead: 4 regions" in line

    takeover.remove()
    monkeypatch.setenv("EBB_STRICT", "1")
    install("1KiB")
    with pytest.raises(BudgetError, match=r"EBB_BUDGET=1KiB: a budget of 1\.0 KiB is too small"):
        Job().train()


def test_measured_peak_takes_precedence_over_a_predicted_one(install, told, monkeypatch):
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


def test_named_modules_are_the_blocks(install, told):
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


def test_profiler_that_never_ends_prevents_a_plan(install, told):
    install("60%")

    with torch.profiler.profile():
        Job().train(25)

    assert "torch.profiler during the first steps; all blocks are recomputed" in told()[-1]


def test_replays_ahead_are_off_only_while_steps_are_profiled(install, monkeypatch):
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
def test_nothing_is_replayed_ahead_under_a_budget_without_room(budget, install):
    def rows(step):
        return ROWS if step < STEPS else 2 * ROWS  # for which it is planned anew

    ebb.config.ahead.regions = 1
    expected = Job(rows=rows).train(STEPS + 12)
    install(budget)

    found = Job(rows=rows)
    for steps in (STEPS, 12):
        found.train(steps)
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


def test_internal_error_keeps_job_running(trained, told, monkeypatch):
    def fails(*_):
        raise RuntimeError("a fault")

    monkeypatch.setattr(module, "plan_of", fails)

    trained("60%")

    assert told()[-1] == (
        "60%: no plan: an error in ebb (TORCH_LOGS=ebb shows its stack): RuntimeError: a fault; "
        "all blocks are recomputed"
    )


def test_steady_step_costs_microseconds(install):
    budget = install("60%")
    Job(depth=32).train()
    looks = []
    for _ in range(20):
        begin = time.perf_counter()
        budget._at_boundary(True)
        looks.append(time.perf_counter() - begin)

    assert min(looks) < 50e-6


# ebb.metrics() ------------------------------------------------------------------------------------


def tensor_bytes():
    gc.collect()
    return _C.tensor_bytes()[0]


class Logged(Quiet):
    """Asks at one place of the step."""

    def __init__(self, place, **settings):
        super().__init__(**settings)
        self.place, self.measured, self.found = place, Metrics(), []

    def step(self, step):
        super().step(step)
        if self.place == "after zero_grad":
            self.optimizer.zero_grad()
        self.found.append(self.measured.read())


@pytest.mark.not_sanitized
@pytest.mark.parametrize("place", ["after step", "after zero_grad"])
@pytest.mark.parametrize("share", [0.6, None])
def test_metrics_have_the_peak_the_age_of_the_plan_and_the_budget(install, share, place):
    outside = tensor_bytes()
    plain = Logged(place).train(5)
    base = base_bytes([plain.model], [plain.optimizer])
    eager = plain.found[-1]["ebb/peak_bytes"] - outside
    budget = share if share is not None else eager - (eager - base) // 3
    del plain
    outside = tensor_bytes()
    install(budget)
    job = Logged(place).train(PLANNED + 4)

    before, planned = job.found[: PLANNED - 1], job.found[PLANNED:]
    assert not any("ebb/budget_bytes" in found for found in before)
    assert [found["ebb/plan_age"] for found in planned] == [1, 2, 3, 4]
    for found in planned:
        assert found["ebb/peak_bytes"] <= found["ebb/budget_bytes"] < eager + outside
        assert abs((found["ebb/eager_peak_bytes"] - outside) / eager - 1) < 0.03
        if share is None:
            assert abs((found["ebb/budget_bytes"] - outside) / budget - 1) < 0.03
