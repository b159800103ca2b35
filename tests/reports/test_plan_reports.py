"""Reports of steps under a plan: the plan's figures, measured figures, and curves of budgets."""

from __future__ import annotations

import gc
import itertools
import json
import pickle
from collections import Counter

import pytest
import torch

import ebb
from ebb._plan.plan import plan_of
from ebb._report import planned
from ebb._report.planned import Course, ReportedPlan, thinned
from ebb._report.text import size
from ebb_tests.exactness import same_bits
from ebb_tests.one_step_report import no_reports_yet, under_a_plan  # noqa: F401
from ebb_tests.predictions import every_program
from ebb_tests.programs import planned as programs
from ebb_tests.programs.planned import planning


@pytest.fixture
def pre_ln():
    """A program and its plan."""
    found = planning(programs.pre_ln)
    return found.program, plan_of(found.measured, 0.6)


@every_program
def test_report_has_the_predicted_measured_and_eager_step(make):
    program, plan, report = under_a_plan(make)
    plain = plan._chooser.estimate(plan._chooser.plain())
    if report is None:  # recomputation cannot lower the peak
        assert plan.peak == plain.peak
        return
    with plan.apply(program.model):
        peak = ebb.profile(program.step, steps=1).peak

    found = report.plan
    assert found.budget == plan.budget
    assert (found.predicted.peak, found.predicted.duration) == (plan.peak, plan.duration)
    assert (found.plain.peak, found.plain.duration) == (plan.plain_peak, plan.plain_duration)
    assert found.measured.peak == peak
    assert found.deviation["peak"] == peak / plan.peak - 1
    assert found.deviation["duration"] == found.measured.duration / plan.duration - 1
    courses = ((found.predicted, plan.peak), (found.plain, plain.peak), (found.measured, peak))
    for course, most in courses:
        times = [time for time, _ in course.timeline]
        assert times == sorted(times)
        assert times[0] >= 0
        assert times[-1] <= course.duration + 1e-3
        assert max(nbytes for _, nbytes in course.timeline) == most


@every_program
def test_curve_has_the_choices_for_budgets(make):
    plan = plan_of(planning(make).measured, 0.6, at_least=True)

    points = plan._for_reports().points
    (own,) = [point for point in points if point.is_plan]
    assert (own.budget, own.peak, own.duration) == (plan.budget, plan.peak, plan.duration)
    assert own.replays == plan.replays
    for one, other in itertools.pairwise(points):
        assert one.budget < other.budget
    others = [point for point in points if not point.is_plan]
    for one, other in itertools.pairwise(others):
        assert one.duration >= other.duration
    curve = {point.budget: point for point in plan.pareto(points=12)}
    for point in others:
        same = curve[point.budget]
        assert point.peak <= point.budget
        assert (point.peak, point.replays) == (same.peak, same.replays)
    calls = plan._chooser.calls
    for point in points:
        assert sum(cut.count for cut in point.cuts) == len(calls)
        for cut in point.cuts:
            assert cut.is_region or not (cut.kept or cut.again)
    assert sum(cut.count for cut in own.cuts if cut.is_region) == len(plan.policies)
    assert not any(cut.again for cut in points[-1].cuts)


@pytest.mark.parametrize("budget", [0.5, 0.6, 0.8])
@pytest.mark.parametrize("make", [programs.pre_ln, programs.llama], ids=lambda make: make.__name__)
def test_bytes_of_the_plan_are_those_of_the_rows(make, budget):
    _, _, report = under_a_plan(make, budget, measured=False)

    (own,) = [point for point in report.plan.points if point.is_plan]
    kept, again = Counter(), Counter()
    for cut in own.cuts:
        for op, nbytes in cut.kept.items():
            kept[op] += cut.count * nbytes
        for op, freed in cut.again.items():
            again[op] += cut.count * freed.bytes
    fates = {"saved": Counter(), "recomputed": Counter()}
    for row in report.rows:
        if row.fate in fates:
            fates[row.fate][row.op.removeprefix("aten::").removesuffix(".default")] += row.bytes
    assert fates["recomputed"] == +again
    assert kept >= fates["saved"]


def test_steps_before_and_after_a_plan_and_other_regions_are_not_under_it(pre_ln):
    program, plan = pre_ln
    x = torch.randn(8, 8, requires_grad=True)

    def recomputed():
        with ebb.apply(program.model, ebb.policies.recompute_all, "layers.*"):
            program.step()

    with ebb.record_reports():
        recomputed()
        with plan.apply(program.model):
            assert ebb.report().plan is None
            with ebb.region(name="other"):
                loss = x.sin().exp().sum()
            loss.backward()
            assert ebb.report().plan is None
            program.step()
            assert ebb.report().plan.budget == plan.budget
        assert ebb.report().plan.budget == plan.budget
        recomputed()
        assert ebb.report().plan is None
        with plan.apply(program.model):
            pass
        assert ebb.report().plan is None
    with plan.apply(program.model):
        program.step()  # not recorded
    assert ebb.report().plan is None


def test_last_plan_with_a_region_of_the_name_counts():
    one, other = planning(programs.pre_ln), planning(programs.llama)
    first, second = plan_of(one.measured, 0.6), plan_of(other.measured, 0.7)
    with ebb.record_reports(), first.apply(one.program.model), second.apply(other.program.model):
        one.program.step()
        assert ebb.report().plan.budget == second.budget
        other.program.step()
        assert ebb.report().plan.budget == second.budget


def test_plan_is_known_after_a_reset_of_statistics(pre_ln):
    program, plan = pre_ln
    with ebb.record_reports(), plan.apply(program.model):
        program.step()
        ebb.reset_stats()
        program.step()
        assert ebb.report().plan.budget == plan.budget
        program.step()
        assert ebb.report().plan.budget == plan.budget


def test_removed_plans_are_forgotten(pre_ln):
    program, plan = pre_ln
    with ebb.record_reports():
        for _ in range(5):
            with plan.apply(program.model):
                program.step()
    assert len(planned._known) <= 3


def test_measuring_changes_nothing(pre_ln):
    program, plan = pre_ln
    expected = [None if one is None else one.clone() for one in program.run()]
    with ebb.record_reports(steps=3), plan.apply(program.model):
        program.step()
        profile = plan.measure(program.step)
        recorded = [one for one in ebb._report.report.reports() if one.rows]
        assert ebb._C.is_reporting()
        assert all(map(same_bits, program.run(), expected))
    assert profile.peak == ebb.report().plan.measured.peak
    assert len(recorded) == 1  # those that are measured are not recorded


def test_measuring_without_the_plan_or_with_a_failing_step_raises(pre_ln):
    program, plan = pre_ln
    with pytest.raises(RuntimeError, match=r"ebb: Plan.measure needs .* call plan.apply\(model\)"):
        plan.measure(program.step)
    plan.apply(program.model).remove()
    with pytest.raises(RuntimeError, match="needs an applied plan"):
        plan.measure(program.step)

    def fails():
        raise KeyError("no data")

    with ebb.record_reports(), plan.apply(program.model):
        with pytest.raises(KeyError):
            plan.measure(fails)
        assert ebb._C.is_reporting()
        program.step()
    assert ebb.report().plan.measured is None


def test_bytes_are_not_measured_while_replays_run_ahead(monkeypatch):
    monkeypatch.setattr(ebb._plan.plan, "ahead_is_on", lambda: False)  # a plan leaves them on
    ebb.config.ahead.regions = 1

    _, _, report = under_a_plan()

    text = str(report)
    found = report.plan.measured
    assert (found.peak, found.timeline) == (None, ())
    assert found.duration > 0
    assert report.plan.deviation["peak"] is None
    (line,) = [line for line in text.splitlines() if line.startswith("  measured:")]
    assert line.split()[2] == "ms"


def test_text_has_the_figures():
    _, plan, report = under_a_plan()

    lines = str(report).splitlines()

    place = lines.index(
        f"plan for a budget of {size(plan.budget)} above the memory in use when the step begins:"
    )
    peak, duration = report.plan.measured.peak, report.plan.measured.duration
    assert lines[place + 1 : place + 4] == [
        f"  predicted: peak {size(plan.peak)}, {plan.duration:.2f} ms",
        f"  measured:  peak {size(peak)} ({peak / plan.peak - 1:+.1%}), "
        f"{duration:.2f} ms ({duration / plan.duration - 1:+.1%})",
        f"  eager:     peak {size(plan.plain_peak)}, {plan.plain_duration:.2f} ms",
    ]
    _, _, report = under_a_plan(measured=False)
    assert report.plan.measured is None
    assert report.plan.deviation == {"peak": None, "duration": None}
    assert "  measured:  not measured" in str(report)
    _, _, report = under_a_plan(programs.accumulation)
    assert report.plan.passes == 2
    assert "a step has 2 forwards and backwards" in str(report)


def test_json_and_pickle_have_the_figures(tmp_path):
    _, plan, report = under_a_plan()
    report.save(tmp_path / "r.json")

    found = json.loads((tmp_path / "r.json").read_text())["plan"]

    assert found["budget"] == plan.budget
    assert found["predicted"]["peak"] == plan.peak
    assert found["predicted"]["duration"] == plan.duration
    assert found["deviation"]["peak"] == found["measured"]["peak"] / plan.peak - 1
    assert found["plain"]["peak"] == plan.plain_peak
    assert len(found["points"]) == len(report.plan.points)
    (own,) = [point for point in found["points"] if point["is_plan"]]
    assert {cut["modules"] for cut in own["cuts"]} == {
        line.partition(":")[0] for line in plan.explain().splitlines()[2:] if line[0] != " "
    }
    again = next(iter(own["cuts"][0]["again"].values()))
    assert set(again) == {"bytes", "duration"}

    unpickled = pickle.loads(pickle.dumps(report))
    assert unpickled == report
    assert unpickled.to_dict() == report.to_dict()
    assert unpickled.plan.points == report.plan.points


def test_thinned_timeline_keeps_its_peak_and_its_end():
    line = [(float(place), (place * 7919) % 1000) for place in range(10_000)]
    line[777] = (777.0, 5000)

    found = thinned(line, 600)

    assert len(found) <= 600
    assert max(nbytes for _, nbytes in found) == 5000
    assert found[-1] == line[-1]
    assert found == sorted(found)
    assert set(found) <= set(line)
    assert thinned(line[:600], 600) == line[:600]
    assert thinned([]) == []


def test_plan_is_forgotten_when_its_model_is_freed():
    """Another model has regions of the same names."""
    program, plan = programs.planned(programs.pre_ln, 0.6)
    plan.apply(program.model)
    other = programs.built(programs.pre_ln)
    del program
    gc.collect()

    with ebb.record_reports(), ebb.apply(other.model, ebb.policies.recompute_all, other.blocks):
        other.step()

    assert ebb.report().plan is None


def test_plan_is_found_while_other_plans_are_forgotten():
    course = Course(None, None)
    plans = {name: ReportedPlan(1, course, course, [name], tuple) for name in "abcd"}

    class Step(int):
        def __ge__(self, other):
            planned.forget(plans["a"])
            planned.forget(plans["b"])
            return int(self) >= other

    for plan in plans.values():
        planned.begins(plan)
    found = planned.plan_of_step(Step(ebb.stats()["passes"]), {"c"})
    for plan in plans.values():
        planned.forget(plan)

    assert found is plans["c"]
