"""Reports of steps under a plan: predicted beside measured, and where other budgets cut."""

from __future__ import annotations

import gc
import itertools
import json
import math
import pickle
import re
from collections import Counter

import pytest
import torch
from torch import nn

import ebb
from ebb._plan.plan import plan_of
from ebb._report import planned
from ebb._report.planned import Course, ReportedPlan, thinned
from ebb_tests.exactness import same_bits
from ebb_tests.one_step_report import no_reports_yet  # noqa: F401
from ebb_tests.programs import planned as programs
from ebb_tests.programs.planned import PROGRAMS, planning
from ebb_tests.report_page import can_be_shown, data_of, shown

every_program = pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)


def reported(make=programs.pre_ln, budget=0.6, *, measured=True):
    """A program, its plan, and the report of a step under it; None if that has no regions."""
    found = planning(make)
    plan = plan_of(found.measured, budget, at_least=True)
    with ebb.record_reports(), plan.apply(found.program.model):
        found.program.step()
        if measured:
            plan.measure(found.program.step)
    return found.program, plan, ebb.report() if plan.policies else None


@pytest.fixture
def pre_ln():
    """A program and its plan."""
    found = planning(programs.pre_ln)
    return found.program, plan_of(found.measured, 0.6)


def report_without_a_plan():
    program = programs.built(programs.pre_ln)
    with ebb.record_reports(), ebb.apply(program.model, ebb.policies.recompute_all, "layers.*"):
        program.step()
    return ebb.report()


def test_a_report_has_the_figures_of_the_plan():
    _, plan, report = reported(measured=False)

    found = report.plan
    assert found.budget == plan.budget
    assert (found.predicted.peak, found.predicted.duration) == (plan.peak, plan.duration)
    assert (found.plain.peak, found.plain.duration) == (plan.plain_peak, plan.plain_duration)
    assert found.measured is None
    assert found.deviation == {"peak": None, "duration": None}
    for course in (found.predicted, found.plain):
        times = [time for time, _ in course.timeline]
        assert times == sorted(times)
        assert times[0] >= 0
        assert times[-1] <= course.duration + 1e-3
    assert max(size for _, size in found.predicted.timeline) == plan.peak
    plain = plan._chooser.estimate(plan._chooser.plain())
    assert max(size for _, size in found.plain.timeline) == plain.peak


@every_program
def test_what_is_measured_stands_beside_it(make):
    program, plan, report = reported(make)
    if report is None:  # there is no room to gain
        assert plan.peak == plan._chooser.estimate(plan._chooser.plain()).peak
        return
    with plan.apply(program.model):
        peak = ebb.profile(program.step, steps=1).peak

    found = report.plan
    assert found.measured.peak == peak
    assert max(size for _, size in found.measured.timeline) == peak
    assert found.deviation["peak"] == peak / plan.peak - 1
    assert found.deviation["duration"] == found.measured.duration / plan.duration - 1
    times = [time for time, _ in found.measured.timeline]
    assert times == sorted(times)
    assert times[-1] <= found.measured.duration + 1e-3


@every_program
def test_budgets_and_where_they_cut(make):
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
def test_cuts_are_what_the_step_did(make, budget):
    """The rows of the report, which know nothing of plans, have the same bytes."""
    _, _, report = reported(make, budget, measured=False)

    (own,) = [point for point in report.plan.points if point.is_plan]
    kept, again = Counter(), Counter()
    for cut in own.cuts:
        for op, size in cut.kept.items():
            kept[op] += cut.count * size
        for op, freed in cut.again.items():
            again[op] += cut.count * freed.bytes
    fates = {"saved": Counter(), "recomputed": Counter()}
    for row in report.rows:
        if row.fate in fates:
            fates[row.fate][row.op.removeprefix("aten::").removesuffix(".default")] += row.bytes
    assert fates["recomputed"] == +again
    assert kept >= fates["saved"]


def test_no_plan_no_section(tmp_path):
    report = report_without_a_plan()

    assert report.plan is None
    assert report.to_dict()["plan"] is None
    assert "the plan" not in str(report)
    report.save(tmp_path / "r.html")
    assert data_of(tmp_path / "r.html")["plan"] is None


def test_steps_before_and_after_a_plan_are_not_under_it(pre_ln):
    program, plan = pre_ln

    def recomputed():
        with ebb.apply(program.model, ebb.policies.recompute_all, "layers.*"):
            program.step()

    with ebb.record_reports():
        recomputed()
        with plan.apply(program.model):
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


def test_regions_of_others_are_not_under_it(pre_ln):
    program, plan = pre_ln
    x = torch.randn(8, 8, requires_grad=True)
    with ebb.record_reports(), plan.apply(program.model):
        with ebb.region(name="other"):
            loss = x.sin().exp().sum()
        loss.backward()
        assert ebb.report().plan is None
        program.step()
    assert ebb.report().plan is not None


def test_of_several_plans_the_last_counts():
    """That knows a region by its name: these have the same ones."""
    one, other = planning(programs.pre_ln), planning(programs.llama)
    first, second = plan_of(one.measured, 0.6), plan_of(other.measured, 0.7)
    with ebb.record_reports(), first.apply(one.program.model), second.apply(other.program.model):
        one.program.step()
        assert ebb.report().plan.budget == second.budget
        other.program.step()
        assert ebb.report().plan.budget == second.budget


def test_a_plan_is_known_after_statistics_begin_anew(pre_ln):
    program, plan = pre_ln
    with ebb.record_reports(), plan.apply(program.model):
        program.step()
        ebb.reset_stats()
        program.step()
        assert ebb.report().plan.budget == plan.budget
        program.step()
        assert ebb.report().plan.budget == plan.budget


def test_plans_do_not_pile_up(pre_ln):
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


def test_measuring_without_the_plan(pre_ln):
    program, plan = pre_ln
    with pytest.raises(RuntimeError, match=r"ebb: Plan.measure needs .* call plan.apply\(model\)"):
        plan.measure(program.step)
    plan.apply(program.model).remove()
    with pytest.raises(RuntimeError, match="needs an applied plan"):
        plan.measure(program.step)


def test_a_step_that_fails_while_it_is_measured(pre_ln):
    program, plan = pre_ln

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

    _, _, report = reported()

    text = str(report)
    found = report.plan.measured
    assert (found.peak, found.timeline) == (None, ())
    assert found.duration > 0
    assert report.plan.deviation["peak"] is None
    (line,) = [line for line in text.splitlines() if line.startswith("  measured:")]
    assert line.split()[2] == "ms"


def test_text():
    _, plan, report = reported()
    size = ebb._report.text.size

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
    assert "  measured:  not measured" in str(reported(measured=False)[2])


def test_json_and_pickle(tmp_path):
    _, plan, report = reported()
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


@can_be_shown
def test_the_page_shows_the_figures_and_the_lines_of_the_plan(tmp_path):
    _, plan, report = reported()
    size = ebb._report.text.size

    found = shown(report, tmp_path)

    assert not found["plan"].hidden
    assert not found["plan-budgets"].hidden
    measured = report.plan.measured
    share = measured.peak / plan.peak - 1
    sign = "\N{MINUS SIGN}" if share < 0 else "+"
    for text in (
        f"{size(plan.peak)}<",
        f"{plan.duration:.2f} ms",
        f"{size(measured.peak)} ({sign}{abs(share) * 100:.1f} %)",
        f"{size(plan.plain_peak)}<",
    ):
        assert text in found["plan-figures"].html
    assert f"Budget: {size(plan.budget)} " in found["plan-note"].text
    assert "measured: " in found["memory"].moved

    drawing = found["memory"]
    top, bottom = 24, 226
    most = max(plan.budget, max(size for _, size in report.plan.plain.timeline))
    for name in ("predicted", "measured", "plain"):
        course = getattr(report.plan, name)
        line = drawing.line(name)
        highest = max(size for _, size in course.timeline)
        is_area = name == "plain"
        assert len(line) == 2 * len(course.timeline) + 1 + is_area
        assert math.isclose(
            min(y for _, y in line), bottom - (bottom - top) * highest / most, abs_tol=0.1
        )
        assert [x for x, _ in line] == sorted(x for x, _ in line)
    (level,) = re.findall(r'data-line="budget"[^>]* y1="([\d.]+)"', drawing.html)
    assert math.isclose(float(level), bottom - (bottom - top) * plan.budget / most, abs_tol=0.1)


@can_be_shown
def test_a_report_of_a_step_that_accumulates_gradients_says_which_lines_cover_the_step(tmp_path):
    _, _, report = reported(programs.accumulation)
    assert report.plan.passes == 2

    found = shown(report, tmp_path)

    assert "a step has 2 forwards and backwards" in str(report)
    assert "forward</" not in found["memory"].html  # the last of them is not stretched over both
    assert "The step has 2 forwards and backwards" in found["memory-note"].text


def test_a_report_of_a_step_with_one_backward_has_its_regions_in_the_picture(tmp_path):
    _, _, report = reported()
    assert report.plan.passes == 1

    found = shown(report, tmp_path)

    assert "forwards and backwards" not in str(report)
    assert "forward</" in found["memory"].html
    assert "forwards and backwards" not in found["memory-note"].text


def test_the_page_shows_where_the_chosen_budget_cuts(tmp_path):
    _, _, report = reported()
    points = report.plan.points

    for place in (None, 0, len(points) - 1):
        page = shown(report, tmp_path, place)
        point = next(p for p in points if p.is_plan) if place is None else points[place]
        assert page["plan-curve"].html.count('class="point"') == len(points)
        rows = page["plan-cuts"].html.split("<tr>")[1:]
        assert len(rows) == len(point.cuts)
        for row, cut in zip(rows, point.cuts, strict=True):
            assert f">{cut.modules}<" in row
            assert all(op in row for op in (*cut.kept, *cut.again))
            assert ("everything (left eager)" in row) == (not cut.is_region)
    assert page["plan-budget"].html.count("<option") == len(points)
    assert page["plan-budget"].html.count("selected>") == 1
    assert ", the plan</option>" in page["plan-budget"].html


@can_be_shown
def test_a_page_without_measurement_or_without_a_plan(tmp_path):
    _, _, report = reported(measured=False)
    page = shown(report, tmp_path)
    assert "No step was measured under this plan" in page["plan-note"].text
    assert 'data-line="measured"' not in page["memory"].html
    assert 'data-line="predicted"' in page["memory"].html

    page = shown(report_without_a_plan(), tmp_path)
    assert "plan" not in page or page["plan"].hidden
    assert page["memory"].html.count("<path") == 2
    assert "with ebb: " in page["memory"].moved


@can_be_shown
def test_odd_names_stay_text(tmp_path):
    odd = "</script><img src=x onerror=alert(1)>\"'&{}"
    torch.manual_seed(1)
    model = nn.Sequential()
    for number in range(3):
        model.add_module(f"{odd}{number}", programs.PreLN())
    x = torch.randn(4, programs.LENGTH, programs.WIDTH)

    def step():
        model(x).square().mean().backward()

    step()
    plan = ebb.plan(model, step, 0.6)
    with ebb.record_reports(), plan.apply(model):
        step()
    report = ebb.report()

    page = shown(report, tmp_path)

    assert report.plan is not None
    everything = "".join(one.html for one in page.values())
    assert "<img" not in everything
    assert "&#60;img" in page["plan-cuts"].html
    assert "<img" not in (tmp_path / "page.html").read_text()


def test_a_long_timeline_keeps_what_matters():
    line = [(float(place), (place * 7919) % 1000) for place in range(10_000)]
    line[777] = (777.0, 5000)

    found = thinned(line, 600)

    assert len(found) <= 600
    assert max(size for _, size in found) == 5000
    assert found[-1] == line[-1]
    assert found == sorted(found)
    assert set(found) <= set(line)
    assert thinned(line[:600], 600) == line[:600]
    assert thinned([]) == []


def test_a_plan_goes_with_its_model():
    """Whose handle nobody asked to remove anything. Another model has regions of the same names."""
    program, plan = programs.planned(programs.pre_ln, 0.6)
    plan.apply(program.model)
    other = programs.built(programs.pre_ln)
    del program
    gc.collect()

    with ebb.record_reports(), ebb.apply(other.model, ebb.policies.recompute_all, other.blocks):
        other.step()

    assert ebb.report().plan is None


def test_a_plan_is_found_although_the_models_of_other_plans_are_freed_meanwhile():
    course = Course(None, None)
    plans = {name: ReportedPlan(1, course, course, [name], tuple) for name in "abcd"}

    class Step(int):
        def __ge__(self, other):
            planned.forget(plans["a"])
            planned.forget(plans["b"])
            return int(self) >= other

    for plan in plans.values():
        planned.begins(plan)
    found = planned.plan_of_step(Step(ebb.stats()["step"]), {"c"})
    for plan in plans.values():
        planned.forget(plan)

    assert found is plans["c"]
