"""The picture, the headline and the plan of a report describe one step."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import ebb
from ebb._plan.plan import plan_of
from ebb._report.planned import Course
from ebb._report.report import headline
from ebb._report.text import size
from ebb_tests.one_step_report import no_reports_yet  # noqa: F401
from ebb_tests.programs import planned as programs
from ebb_tests.programs.planned import planning
from ebb_tests.report_page import can_be_shown, shown

LEFT, RIGHT = 78, 1126  # of the picture


def reported(make=programs.pre_ln, *, measured=True):
    found = planning(make)
    plan = plan_of(found.measured, 0.6)
    with ebb.record_reports(), plan.apply(found.program.model):
        found.program.step()
        if measured:
            plan.measure(found.program.step)
    return ebb.report()


@pytest.mark.parametrize("make", [programs.pre_ln, programs.llama], ids=lambda make: make.__name__)
def test_a_course_has_the_times_of_its_regions(make):
    report = reported(make)

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
    """For each region in the strip: its left side, forward and backward, in milliseconds."""
    return re.findall(
        r"<title>([^<]+), (forward|backward)</title><rect x=\"([\d.]+)\"", page["memory"].html
    )


@can_be_shown
@pytest.mark.parametrize("measured", [True, False])
def test_the_strip_has_the_regions_of_the_step_whose_memory_is_drawn(tmp_path, measured):
    report = reported(measured=measured)
    plan = report.plan
    course = plan.measured if measured else plan.predicted
    end = max(one.duration for one in (plan.predicted, plan.measured, plan.plain) if one)

    page = shown(report, tmp_path)

    expected = {
        (name, "forward" if kind == "region" else kind): start
        for kind, name, start, _ in course.spans
    }
    found = {(name, kind): float(x) for name, kind, x in bands(page)}
    assert found.keys() == expected.keys()
    for key, x in found.items():
        assert abs(x - (LEFT + (RIGHT - LEFT) * expected[key] / end)) < 1e-3
    kind = "measured" if measured else "predicted"
    assert f"shows the regions of the {kind} step" in page["memory-note"].text
    # the spans of the report's own step, which is another one, change nothing
    assert bands(shown(replace(report, spans=()), tmp_path)) == bands(page)


@can_be_shown
def test_the_time_after_backward_is_named(tmp_path):
    report = reported(measured=False)
    spans = (("region", "a", 0.0, 4.0), ("backward", "a", 5.0, 2.0))
    report.plan.measured = Course(100, 10.0, ((0.0, 100), (7.0, 50)), spans)
    end = max(10.0, report.plan.predicted.duration, report.plan.plain.duration)
    report.plan.measured = replace(
        report.plan.measured,
        duration=end,
        spans=tuple(
            (kind, name, start * end / 10, took * end / 10) for kind, name, start, took in spans
        ),
    )

    found = re.search(r'x="([\d.]+)" y="16">optimizer<', shown(report, tmp_path)["memory"].html)

    assert abs(float(found[1]) - 4 - (LEFT + (RIGHT - LEFT) * 0.7)) < 1e-3


@can_be_shown
@pytest.mark.parametrize("measured", [True, False])
def test_the_headline_is_that_of_the_plan(tmp_path, measured):
    report = reported(measured=measured)
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


def test_without_a_plan_the_headline_is_that_of_the_bytes_saved(tmp_path):
    report = replace(reported(measured=False), plan=None)

    assert f"peak saved for backward {size(report.peak_held)};" in headline(report)
    page = shown(report, tmp_path)
    assert "peak saved for backward<" in page["figures"].html
    assert "without parameters, gradients and the optimizer's" in page["memory-note"].text
