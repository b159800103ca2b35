"""Reports of jobs with a budget: steps under the plan are measured and reported beside the plan."""

from __future__ import annotations

import dataclasses
import json

import pytest
from torch import nn

import ebb
from ebb._launch import budget_phases, checking, decided, step_memory_monitor, takeover
from ebb._launch import budget_phases as module
from ebb._report.report import latest, reports
from ebb._report.text import size
from ebb_tests import budget_jobs
from ebb_tests.budget_jobs import PLANNED, ROWS, Block, Quiet, assert_same
from ebb_tests.one_step_report import no_reports_yet  # noqa: F401
from ebb_tests.programs_apart import run_program
from ebb_tests.report_page import can_be_shown, data_of, shown

CHECKED = PLANNED + len(checking._ORDER)


def blocks():
    return nn.Sequential(*(Block(dropout=0.0) for _ in range(4)))


class Job(Quiet):
    def __init__(self, **settings):
        super().__init__(blocks, **settings)


@pytest.fixture
def install(install):
    with ebb.record_reports():
        yield install
        takeover.remove()


def plan_of_last_step():
    found = latest(reports())
    return None if found is None else found.plan


def test_steps_under_the_plan_are_measured(install, capsys):
    with ebb.record_reports(0):
        expected = budget_jobs.Job(blocks).train(CHECKED)
    install("60%")
    job = budget_jobs.Job(blocks).train(PLANNED)
    assert plan_of_last_step() is None

    job.train(len(checking._ORDER) - 1)
    assert plan_of_last_step().measured is None
    job.train(1)

    plan = plan_of_last_step()
    assert plan.measured.peak <= plan.budget
    assert abs(plan.deviation["peak"]) < 0.03
    assert plan.measured.duration > 0
    assert max(size for _, size in plan.measured.timeline) == plan.measured.peak
    assert plan.regions <= {"0", "1", "2", "3"}
    assert [point.is_plan for point in plan.points].count(True) == 1
    assert len(plan.points) > 3
    assert_same(job, expected)
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"predicted peak {size(plan.predicted.peak)} (" in line
    assert f"of eager's {size(plan.plain.peak)}), " in line


@pytest.mark.parametrize("until", [PLANNED + 4, 10**9])
def test_smaller_batches_are_not_compared_with_the_plan(install, until):
    """Batches that are as large again are, or a new plan for batches that stay small."""
    stays_small = until > 10**6
    install("60%")
    job = Job(rows=lambda step: ROWS // 2 if PLANNED <= step < until else ROWS)
    job.train(PLANNED + (step_memory_monitor._STEPS_BELOW if stays_small else 4))
    plan = plan_of_last_step()
    assert (stays_small and plan is None) or plan.measured is None

    job.train(PLANNED + CHECKED if stays_small else 1 + len(checking._ORDER))

    assert abs(plan_of_last_step().deviation["peak"]) < 0.03


def test_larger_batches_end_the_plan(install):
    install("60%")
    job = Job(rows=lambda step: ROWS if step < CHECKED else 2 * ROWS)
    job.train(CHECKED)
    before = plan_of_last_step()

    job.train(PLANNED)
    assert plan_of_last_step() is None  # all is recomputed, and measured again
    job.train(CHECKED)

    after = plan_of_last_step()
    assert after.budget > 1.8 * before.budget
    assert abs(after.deviation["peak"]) < 0.03


def test_report_of_a_too_small_budget(install, capsys):
    install("1KiB")
    Job().train(CHECKED + 1)

    assert "is too small" in capsys.readouterr().err
    plan = plan_of_last_step()
    assert plan.measured.peak > plan.budget
    assert abs(plan.deviation["peak"]) < 0.03
    assert next(point for point in plan.points if point.is_plan).peak == plan.predicted.peak
    assert plan.budget < 0  # what is there when the step begins is more
    less = f"{size(-plan.budget)} below the memory in use when the step begins"
    assert f"plan for a budget of {less}:" in str(ebb.report())


@can_be_shown
def test_page_of_a_too_small_budget(install, tmp_path):
    install("1KiB")
    Job().train(CHECKED + 1)

    page = shown(ebb.report(), tmp_path)

    assert " below the memory in use when the step begins" in page["plan-note"].text
    for drawing in ("memory", "plan-curve"):
        assert 'data-line="budget"' not in page[drawing].html
        assert "NaN" not in page[drawing].html
    assert all(y <= 226 for _, y in page["memory"].line("measured"))


def test_profiled_step_is_the_prediction_if_all_was_recomputed_in_it(install, monkeypatch):
    """The step that was measured is the prediction."""
    least = module.plan_of

    def too_small(measured, budget, *, at_least=False):
        if not at_least:
            raise module.BudgetError("ebb: too small")
        plan = least(measured, budget, at_least=True)
        plan.peak = measured.profile.peak + 1
        return plan

    for place in (module, decided):
        monkeypatch.setattr(place, "plan_of", too_small)
    install("1KiB")
    Job().train(CHECKED + 1)

    plan = plan_of_last_step()
    assert abs(plan.deviation["peak"]) < 0.01
    (own,) = [point for point in plan.points if point.is_plan]
    assert all(cut.is_region and not cut.kept for cut in own.cuts)


def test_bytes_are_not_measured_while_replays_run_ahead(install, monkeypatch):
    monkeypatch.setattr(ebb._plan.plan, "ahead_is_on", lambda: False)  # a plan leaves them on
    ebb.config.ahead.regions = 1
    monkeypatch.setattr(
        step_memory_monitor, "_OVER", 2.0
    )  # with replays ahead the last region keeps all
    install("60%")
    Job().train(CHECKED + 1)

    measured = plan_of_last_step().measured
    assert measured.peak is None
    assert measured.duration > 0


def test_without_reports_nothing_is_measured(install):
    with ebb.record_reports(0):
        budget = install("60%")
        job = Job().train(PLANNED)
        assert budget.job.phase.checking is None
        job.train(2)
    job.train(2)

    plan = plan_of_last_step()
    assert plan.measured is None
    assert plan.points == ()  # they would need all that was measured
    assert plan.predicted.peak <= plan.budget


@pytest.mark.parametrize("steps", [4, PLANNED + 2])
def test_budget_can_be_removed_at_any_step(install, steps):
    install("60%")
    job = Job().train(steps)
    takeover.remove()

    job.train(3)

    assert plan_of_last_step() is None or plan_of_last_step().measured is None
    ebb.profile(lambda: job.train(1), steps=1)  # no other is being recorded


@pytest.mark.parametrize("place", [(ebb.Plan, "_for_reports"), (checking, "measured_course")])
def test_error_in_a_report_or_measurement_costs_no_plan(install, monkeypatch, capsys, place):
    def fails(*_):
        raise ArithmeticError

    monkeypatch.setattr(*place, fails)
    install("60%")
    Job().train(CHECKED + 2)

    told = capsys.readouterr().err
    assert "; predicted peak " in told
    assert "no plan" not in told
    plan = plan_of_last_step()
    assert plan is None if place[0] is ebb.Plan else plan.measured is None


def written(decided):
    return dataclasses.replace(decided, regions=decided.regions._to_toml(), reported=None)


def test_ranks_send_all_that_reports_show(install):
    """The rank that plans tells others all that their reports show."""
    budget = install("60%")
    Job().train(PLANNED)
    outcome = budget.job.phase.outcome
    decided = budget_phases.Agree(budget.job, outcome).decide(outcome.measured)

    text = json.dumps(decided.to_json())
    found = type(decided).from_json(json.loads(text))

    assert written(found) == written(decided)
    assert found.reported.to_dict() == decided.reported.to_dict()
    assert len(found.reported.points) > 3
    assert found.reported.regions == decided.reported.regions
    assert len(text) < 500_000


def test_plan_of_another_version_is_refused():
    """The rank then plans alone, see `look`."""
    with pytest.raises(KeyError, match="policies"):
        decided.Decided.from_json({})
    with pytest.raises(ValueError, match="the plan of another rank: regions"):
        decided.Decided.from_json({"policies": "regions = 1", "reported": None})


PROGRAM = f"""
import ebb, torch
from torch import nn
torch.manual_seed(0)
def block():
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
model = nn.Sequential(*(block() for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters())
for step in range({CHECKED + 2}):
    loss = model(torch.randn(256, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    "kind", ["json", *(pytest.param(k, marks=pytest.mark.sweep) for k in ("txt", "html"))]
)
def test_unchanged_job_writes_its_report(tmp_path, kind):
    path = tmp_path / f"r.{kind}"
    run = run_program("-c", PROGRAM, EBB_BUDGET="60%", EBB_REPORT=str(path))
    assert "; report: " in run.stderr, run.stderr

    if kind == "txt":
        text = path.read_text()
        assert "plan for a budget of " in text
        assert "  measured:  " in text
        assert "not measured" not in text
        return
    plan = (json.loads(path.read_text()) if kind == "json" else data_of(path))["plan"]
    assert plan["measured"]["peak"] <= plan["budget"]
    assert abs(plan["deviation"]["peak"]) < 0.03
    assert plan["points"]
    parts = {"budget", "predicted", "measured", "deviation", "plain", "regions", "points", "passes"}
    assert set(plan) == parts


@can_be_shown
def test_page_of_a_job(install, tmp_path):
    install("60%")
    Job().train(CHECKED + 1)

    page = shown(ebb.report(), tmp_path)

    plan = ebb.report().plan
    assert size(plan.measured.peak) in page["plan-figures"].html
    assert page["memory"].line("measured")
    assert page["memory"].line("predicted")


def test_job_may_end_at_any_step(install):
    """Steps of which a profile is made have no report: then it is that of an earlier one."""
    install("60%")
    job = Job()
    for _ in range(CHECKED + 2):
        job.train(1)
        assert latest(reports()).rows
        assert (plan_of_last_step() is None) == (len(job.bits) <= PLANNED)
