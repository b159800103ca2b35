"""Reports of jobs with a budget: steps under the plan are measured, and stand beside it."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest
from torch import nn

import ebb
from ebb._launch import budget_phases, checking, decided, step_memory_monitor, takeover
from ebb._launch import budget_phases as module
from ebb._report.report import latest, reports
from ebb_tests import budget_jobs, fork_server
from ebb_tests.budget_jobs import PLANNED, ROWS, Block, Quiet, assert_same
from ebb_tests.one_step_report import no_reports_yet  # noqa: F401
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


def test_steps_under_the_plan_are_measured(install):
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


def test_the_plan_is_the_one_that_was_told(install, capsys):
    install("60%")
    Job().train(CHECKED + 1)

    plan = plan_of_last_step()
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"predicted peak {ebb._report.text.size(plan.predicted.peak)} (" in line
    assert f"of eager's {ebb._report.text.size(plan.plain.peak)}), " in line


def test_a_batch_of_another_size_does_not_count(install):
    install("60%")
    job = Job(rows=lambda step: ROWS // 2 if PLANNED <= step < PLANNED + 4 else ROWS)
    job.train(PLANNED + 4)
    assert plan_of_last_step().measured is None

    job.train(1 + len(checking._ORDER))

    assert abs(plan_of_last_step().deviation["peak"]) < 0.03


def test_batches_that_never_are_as_large_again(install):
    install("60%")
    job = Job(rows=lambda step: ROWS if step < PLANNED else ROWS // 2)
    job.train(PLANNED + step_memory_monitor._STEPS_BELOW)
    assert plan_of_last_step() is None or plan_of_last_step().measured is None

    job.train(PLANNED + CHECKED)

    assert abs(plan_of_last_step().deviation["peak"]) < 0.03


def test_shapes_that_change_for_good_end_the_plan(install):
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


def test_a_budget_that_is_too_small(install, capsys):
    install("1KiB")
    Job().train(CHECKED + 1)

    assert "is too small" in capsys.readouterr().err
    plan = plan_of_last_step()
    assert plan.measured.peak > plan.budget
    assert abs(plan.deviation["peak"]) < 0.03
    assert next(point for point in plan.points if point.is_plan).peak == plan.predicted.peak
    assert plan.budget < 0  # what is there when the step begins is more
    less = f"{ebb._report.text.size(-plan.budget)} below the memory in use when the step begins"
    assert f"plan for a budget of {less}:" in str(ebb.report())


@can_be_shown
def test_the_page_of_a_budget_that_is_too_small(install, tmp_path):
    install("1KiB")
    Job().train(CHECKED + 1)

    page = shown(ebb.report(), tmp_path)

    assert " below the memory in use when the step begins" in page["plan-note"].text
    for drawing in ("memory", "plan-curve"):
        assert 'data-line="budget"' not in page[drawing].html
        assert "NaN" not in page[drawing].html
    assert all(y <= 226 for _, y in page["memory"].line("measured"))


def test_where_all_was_recomputed_when_it_was_measured(install, monkeypatch):
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


def test_taking_it_away_while_steps_are_measured(install):
    install("60%")
    job = Job().train(PLANNED + 2)
    takeover.remove()

    job.train(3)

    assert plan_of_last_step() is None or plan_of_last_step().measured is None
    ebb.profile(lambda: job.train(1), steps=1)  # no other is being recorded


def test_a_report_that_fails_costs_no_plan(install, monkeypatch, capsys):
    def fails(*_):
        raise ArithmeticError("of reports")

    monkeypatch.setattr(ebb.Plan, "_for_reports", fails)
    install("60%")
    Job().train(CHECKED)
    assert "; predicted peak " in capsys.readouterr().err
    assert plan_of_last_step() is None


def test_a_measurement_that_fails_costs_no_plan(install, monkeypatch, capsys):
    def fails(*_):
        raise ArithmeticError("of measurements")

    monkeypatch.setattr(checking, "measured_course", fails)
    install("60%")
    Job().train(CHECKED + 2)

    assert "no plan" not in capsys.readouterr().err
    assert plan_of_last_step().measured is None


def written(decided):
    return dataclasses.replace(decided, regions=decided.regions._to_toml(), reported=None)


def test_what_ranks_send_to_each_other(install):
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


def test_any_plan_is_the_same_on_another_rank():
    """With settings of OFFLOAD, odd names, a policy for no module, and without a report."""
    mixed = ebb.Policy(
        [ebb.Rule("aten::mm", ebb.OFFLOAD, every=2), ebb.Rule("aten::gelu", ebb.SAVE)],
        default=ebb.RECOMPUTE_EACH_TIME,
        inputs=ebb.OFFLOAD,
    )
    names = ["", "layers.0", 'a"b', "a\\b", "a\x7fb", "[[regions]]\n", "ünï"]
    for policies, ahead in ((dict.fromkeys(names, mixed), False), ({}, True)):
        offload = {"in_flight_bytes": 2**20, "keep_last": 3}
        planned = ebb.ModulePolicies(policies, offload, ahead=ahead)
        plan = decided.Decided(planned, "four regions", 10, 2**60, "too small", None)

        found = decided.Decided.from_json(json.loads(json.dumps(plan.to_json())))

        assert written(found) == written(plan)
        assert found.reported is None


def test_a_plan_of_another_version_is_refused():
    """The rank then plans alone, see `look`."""
    with pytest.raises(KeyError, match="policies"):
        decided.Decided.from_json({})
    with pytest.raises(ValueError, match="the plan of another rank: regions"):
        decided.Decided.from_json({"policies": "regions = 1", "reported": None})


PROGRAM = """
import torch
from torch import nn
torch.manual_seed(0)
def block():
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
model = nn.Sequential(*(block() for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters())
for step in range({steps}):
    loss = model(torch.randn(256, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def run_job(path, steps=CHECKED + 2):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("EBB")}
    environment |= {"EBB_BUDGET": "60%", "EBB_REPORT": str(path)}
    program = "import ebb\n" + PROGRAM.format(steps=steps)
    run = fork_server.run(["-c", program], env=environment)
    assert run.returncode == 0, run.stderr
    assert "; report: " in run.stderr, run.stderr
    return run.stderr


def test_a_job_that_does_not_know_of_it_as_json(tmp_path):
    run_job(tmp_path / "r.json")

    plan = json.loads((tmp_path / "r.json").read_text())["plan"]
    assert plan["measured"]["peak"] <= plan["budget"]
    assert abs(plan["deviation"]["peak"]) < 0.03
    parts = {"budget", "predicted", "measured", "deviation", "plain", "regions", "points", "passes"}
    assert set(plan) == parts


@pytest.mark.sweep
def test_a_job_that_does_not_know_of_it_as_text(tmp_path):
    run_job(tmp_path / "r.txt")

    text = (tmp_path / "r.txt").read_text()
    assert "plan for a budget of " in text
    assert "  measured:  " in text
    assert "not measured" not in text


@pytest.mark.sweep
def test_a_job_that_does_not_know_of_it_as_page(tmp_path):
    run_job(tmp_path / "r.html")

    plan = data_of(tmp_path / "r.html")["plan"]
    assert plan["measured"]["peak"] <= plan["budget"]
    assert plan["points"]


@can_be_shown
def test_the_page_of_a_job(install, tmp_path):
    install("60%")
    Job().train(CHECKED + 1)

    page = shown(ebb.report(), tmp_path)

    plan = ebb.report().plan
    assert ebb._report.text.size(plan.measured.peak) in page["plan-figures"].html
    assert page["memory"].line("measured")
    assert page["memory"].line("predicted")


def test_a_job_may_end_at_any_step(install):
    """Steps of which a profile is made have no report: then it is that of an earlier one."""
    install("60%")
    job = Job()
    for _ in range(CHECKED + 2):
        job.train(1)
        assert latest(reports()).rows
        assert (plan_of_last_step() is None) == (len(job.bits) <= PLANNED)
