"""What budgets cost."""

from __future__ import annotations

import itertools

import pytest

import ebb
from ebb._plan.plan import plan_of
from ebb_tests.programs import planned as programs
from ebb_tests.programs.planned import planned, planning


def test_a_curve():
    plan = plan_of(planning(programs.llama).measured, 0.6)

    curve = plan.pareto(points=8)

    assert len(curve) == 8
    for one, other in itertools.pairwise(curve):
        assert one.budget < other.budget
        assert one.duration >= other.duration
    assert all(point.peak <= point.budget for point in curve)
    assert curve[-1].replays == 0
    assert curve[0].peak == plan_of(planning(programs.llama).measured, 0.1, at_least=True).peak
    table = str(curve).splitlines()
    assert len(table) == 9
    assert table[0].split()[:2] == ["budget", "peak"]


def test_the_predicted_timeline_is_what_is_measured():
    program, plan = planned(programs.pre_ln, 0.6)
    with plan.apply(program.model):
        measured = ebb.profile(program.step, steps=1)

    predicted = plan._chooser.simulator.timeline(plan._chooser.of_calls(plan._chosen))

    assert [time for time, _ in predicted] == sorted(time for time, _ in predicted)
    assert max(size for _, size in predicted) == plan.peak
    assert abs(measured.peak - plan.peak) <= plan.peak // 400


@pytest.mark.parametrize(
    ("points", "error"), [(1, ValueError), (0, ValueError), (2.0, TypeError), (True, TypeError)]
)
def test_numbers_of_points_that_make_no_sense(points, error):
    plan = plan_of(planning(programs.chain).measured, 0.9)

    with pytest.raises(error, match="ebb: points must be"):
        plan.pareto(points)
