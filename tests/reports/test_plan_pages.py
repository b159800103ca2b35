"""Pages of reports of steps under a plan: figures, the picture, and the curve of budgets."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import ebb
from ebb._report.planned import Course
from ebb._report.report import headline
from ebb._report.text import size
from ebb_tests.one_step_report import no_reports_yet, under_a_plan  # noqa: F401
from ebb_tests.programs import planned as programs
from ebb_tests.report_page import can_be_shown, data_of, shown

LEFT, RIGHT, TOP, BOTTOM = 78, 1126, 24, 226  # of the picture

with_and_without_measurement = pytest.mark.parametrize("measured", [True, False])


def report_without_a_plan():
    program = programs.built(programs.pre_ln)
    with ebb.record_reports(), ebb.apply(program.model, ebb.policies.recompute_all, "layers.*"):
        program.step()
    return ebb.report()


@pytest.mark.parametrize("make", [programs.pre_ln, programs.llama], ids=lambda make: make.__name__)
def test_regions_of_a_step_have_times(make):
    _, _, report = under_a_plan(make)

    regions = {row.region for row in report.rows}
    for course in (report.plan.measured, report.plan.predicted, report.plan.plain):
        times = {kind: {} for kind in ("region", "backward")}
        for kind, name, start, took in course.spans:
            assert 0 <= start <= start + took <= course.duration + 1e-3
            times[kind][name] = (start, start + took)
        assert times["region"].keys() == times["backward"].keys()
        # profiles for plans have a region for each block, also for those that the plan leaves eager
        assert times["region"].keys() >= regions
        assert course is not report.plan.measured or times["region"].keys() == regions
        forward = sorted(times["region"], key=times["region"].get)
        assert forward == sorted(times["backward"], key=times["backward"].get, reverse=True)
        last, first = forward[-1], forward[0]
        assert times["region"][last][1] <= times["backward"][last][0]
        # the peak is near the end of forward, where all is saved, and not in the first region
        peak = max(course.timeline, key=lambda point: point[1])[0]
        assert peak >= times["region"][first][1]


def bands(page):
    """The left sides of the regions in the strip, by name and direction."""
    titles = r"<title>([^<]+), (forward|backward)</title><rect x=\"([\d.]+)\""
    return {(name, kind): float(x) for name, kind, x in re.findall(titles, page["memory"].html)}


@can_be_shown
@with_and_without_measurement
def test_strip_has_the_regions_of_the_step_whose_memory_is_drawn(tmp_path, measured):
    _, _, report = under_a_plan(measured=measured)
    plan = report.plan
    course = plan.measured if measured else plan.predicted
    end = max(one.duration for one in (plan.predicted, plan.measured, plan.plain) if one)

    page = shown(report, tmp_path)

    expected = {
        (name, "forward" if kind == "region" else kind): start
        for kind, name, start, _ in course.spans
    }
    found = bands(page)
    assert found.keys() == expected.keys()
    for key, x in found.items():
        assert abs(x - (LEFT + (RIGHT - LEFT) * expected[key] / end)) < 1e-3
    kind = "measured" if measured else "predicted"
    assert f"shows the regions of the {kind} step" in page["memory-note"].text
    # the spans of the report's own step, which is another one, change nothing
    assert bands(shown(replace(report, spans=()), tmp_path)) == found


@can_be_shown
def test_time_after_backward_is_named_optimizer(tmp_path):
    _, _, report = under_a_plan(measured=False)
    end = max(10.0, report.plan.predicted.duration, report.plan.plain.duration)
    spans = (("region", "a", 0.0, 0.4 * end), ("backward", "a", 0.5 * end, 0.2 * end))
    report.plan.measured = Course(100, end, ((0.0, 100), (7.0, 50)), spans)

    found = re.search(r'x="([\d.]+)" y="16">optimizer<', shown(report, tmp_path)["memory"].html)

    assert abs(float(found[1]) - 4 - (LEFT + (RIGHT - LEFT) * 0.7)) < 1e-3


@can_be_shown
@with_and_without_measurement
def test_headline_is_that_of_the_plan(tmp_path, measured):
    _, _, report = under_a_plan(measured=measured)
    plan = report.plan
    course, kind = (plan.measured, "measured") if measured else (plan.predicted, "predicted")

    figures = shown(report, tmp_path)["figures"].html

    assert f"<b>{size(course.peak)}</b><span>peak of the step, {kind}<" in figures
    assert f"<b>{size(plan.plain.peak)}</b><span>in eager, predicted<" in figures
    times = plan.plain.peak / course.peak
    assert headline(report) == (
        f"forward and backward {report.number}, under a plan: {kind} peak {size(course.peak)}; "
        f"{size(plan.plain.peak)} in eager ({times:.1f} times as much)"
    )
    lines = str(report).splitlines()
    saved = (
        f"forward and backward {report.number}: peak saved for backward {size(report.peak_held)}"
    )
    assert any(line.startswith(saved) for line in lines)


@can_be_shown
def test_page_has_the_figures_and_the_lines_of_the_plan(tmp_path):
    _, plan, report = under_a_plan()

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
    most = max(plan.budget, max(nbytes for _, nbytes in report.plan.plain.timeline))
    for name in ("predicted", "measured", "plain"):
        course = getattr(report.plan, name)
        line = drawing.line(name)
        is_area = name == "plain"
        assert len(line) == 2 * len(course.timeline) + 1 + is_area
        highest = BOTTOM - (BOTTOM - TOP) * max(nbytes for _, nbytes in course.timeline) / most
        assert math.isclose(min(y for _, y in line), highest, abs_tol=0.1)
        assert [x for x, _ in line] == sorted(x for x, _ in line)
    (level,) = re.findall(r'data-line="budget"[^>]* y1="([\d.]+)"', drawing.html)
    expected = BOTTOM - (BOTTOM - TOP) * plan.budget / most
    assert math.isclose(float(level), expected, abs_tol=0.1)


@can_be_shown
@pytest.mark.parametrize(("make", "passes"), [(programs.accumulation, 2), (programs.pre_ln, 1)])
def test_page_says_if_a_step_has_several_backwards(tmp_path, make, passes):
    _, _, report = under_a_plan(make)
    assert report.plan.passes == passes

    found = shown(report, tmp_path)

    # the last forward is not stretched over all of them
    assert ("forward</" in found["memory"].html) == (passes == 1)
    note = "The step has 2 forwards and backwards"
    assert (note in found["memory-note"].text) == (passes == 2)
    assert ("forwards and backwards" in str(report)) == (passes == 2)


@can_be_shown
def test_page_shows_the_choices_for_the_selected_budget(tmp_path):
    _, _, report = under_a_plan()
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
def test_page_without_measurement(tmp_path):
    _, _, report = under_a_plan(measured=False)

    page = shown(report, tmp_path)

    assert "No step was measured under this plan" in page["plan-note"].text
    assert 'data-line="measured"' not in page["memory"].html
    assert 'data-line="predicted"' in page["memory"].html


def test_report_without_a_plan_does_not_mention_plans(tmp_path):
    report = report_without_a_plan()
    report.save(tmp_path / "r.html")

    assert report.plan is None
    assert report.to_dict()["plan"] is None
    assert "the plan" not in str(report)
    assert f"peak saved for backward {size(report.peak_held)};" in headline(report)
    assert data_of(tmp_path / "r.html")["plan"] is None


@can_be_shown
def test_page_without_a_plan(tmp_path):
    page = shown(report_without_a_plan(), tmp_path)

    assert "plan" not in page or page["plan"].hidden
    assert page["memory"].html.count("<path") == 2
    assert "with ebb: " in page["memory"].moved
    assert "peak saved for backward<" in page["figures"].html
    assert "without parameters, gradients and the optimizer's" in page["memory-note"].text


@can_be_shown
def test_names_of_modules_stay_text_in_the_page(tmp_path):
    odd = "</script><img src=x onerror=alert(1)>\"'&{}"
    torch.manual_seed(1)
    model = nn.Sequential()
    for number in range(3):
        model.add_module(f"{odd}{number}", programs.PreLN())
    step = programs.of_rows(model)
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
