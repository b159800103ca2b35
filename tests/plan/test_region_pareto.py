"""Choices for one region, compared with all choices and with an integer program."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebb._plan.choose.region_pareto import (
    Choices,
    Costs,
    Point,
    choices_of,
    front,
    hull,
    not_beaten,
)
from ebb._plan.simulate.choice import EAGER, Choice
from ebb_tests import best_choices
from ebb_tests.predictions import every_program
from ebb_tests.programs import planned as programs
from ebb_tests.programs.planned import planning


@st.composite
def regions(draw):
    """Choices of a region with drawn costs, without a step."""
    often = st.sampled_from([True, True, True, False])
    return Choices(
        [
            Costs(
                size=draw(st.integers(0, 5)),
                time=draw(st.sampled_from([0.125, 0.5, 1.0, 3.0])),
                needed=draw(st.booleans()),
                free=not draw(often),
                lasting=draw(often),
                reads=sorted(draw(st.sets(st.integers(0, op - 1), max_size=2))) if op else [],
            )
            for op in range(draw(st.integers(1, 7)))
        ]
    )


def all_choices(choices):
    """The costs of each set of results that can be saved."""
    able = [op for op, cost in enumerate(choices.costs) if cost.lasting and not cost.free]
    for count in range(len(able) + 1):
        for saved in itertools.combinations(able, count):
            yield choices.cost(saved)


@given(regions(), st.sampled_from([0.0, 0.05, 0.3, 1.0, 7.0]))
def test_cheapest_choice_at_a_price_is_that_of_all_choices(choices, price):
    saved = choices.cheapest(price)

    held, time = choices.cost(saved)
    assert price * held + time == pytest.approx(min(price * h + t for h, t in all_choices(choices)))


@given(regions())
def test_corners_are_those_of_the_lower_hull_of_all_choices(choices):
    corners = [choices.cost(saved) for saved in choices.corners]
    every = list(all_choices(choices))

    assert corners[0] == min(every)
    assert corners[-1][1] == pytest.approx(min(time for _, time in every))
    for (low, slow), (high, fast) in itertools.pairwise(corners):
        assert low < high
        price = (slow - fast) / (high - low)
        assert price * low + slow == pytest.approx(min(price * h + t for h, t in every))


@given(regions())
def test_corners_save_only_results_that_lower_the_time(choices):
    for saved in choices.corners:
        held, time = choices.cost(saved)
        assert all(choices.costs[op].lasting and not choices.costs[op].free for op in saved)
        for one in saved:
            less, slower = choices.cost(saved - {one})
            assert (slower, -less) > (time, -held) or choices.costs[one].size == 0


@given(regions(), st.integers(0, 20))
def test_integer_program_finds_the_fastest_choice_in_a_budget(choices, budget):
    within = [time for held, time in all_choices(choices) if held <= budget]

    saved = best_choices.optimum(choices, budget)

    held, time = choices.cost(saved)
    assert held <= budget
    assert time == pytest.approx(min(within))


@every_program
def test_integer_program_is_at_most_3_percent_faster(make):
    simulator = planning(make).simulator
    calls = len(simulator.step.calls)
    share = simulator.plain.duration / calls

    for call in range(calls):
        points = front(simulator, call)
        for saved in best_choices.optima(choices_of(simulator, call), points=10):
            best = simulator.of_call(call, Choice(saved))
            added = min(point.added for point in points if point.resident <= best.resident)
            assert share + added <= 1.03 * (share + best.added)


@every_program
def test_points_of_a_front_are_sorted_and_beat_the_corners(make):
    simulator = planning(make).simulator

    for call in range(len(simulator.step.calls)):
        points = front(simulator, call)
        assert all(
            one.resident < other.resident and one.added > other.added
            for one, other in itertools.pairwise(points)
        )
        assert points[-1].choice is EAGER
        assert points[-1].added == 0
        for saved in (frozenset(), *choices_of(simulator, call).corners):
            found = simulator.of_call(call, Choice(saved))
            assert any(p.resident <= found.resident and p.added <= found.added for p in points)


def test_choices_that_need_too_many_rules_are_not_offered():
    found = planning(programs.recurrent)

    for point in found.chooser.fronts["0"]:
        if point.choice is not EAGER:
            policies = found.policies({"0": point})
            names = found.simulator.step.names_of(0)
            assert len(policies.policies["0"].rules) <= 64, len(names)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=12))
def test_corners_of_points_are_those_of_their_lower_hull(pairs):
    best = not_beaten(Point(None, *pair) for pair in pairs)
    corners = hull(best)

    beaten = {(a, b) for a, b in pairs if any(c <= a and d <= b for c, d in {*pairs} - {(a, b)})}
    assert [(one.resident, one.added) for one in best] == sorted({*pairs} - beaten)
    assert (corners[0], corners[-1]) == (best[0], best[-1])
    prices = []
    for low, high in itertools.pairwise(corners):
        price = Fraction(low.added - high.added, high.resident - low.resident)
        prices.append(price)
        least = price * low.resident + low.added
        assert all(price * one.resident + one.added >= least for one in best)
    assert prices == sorted(set(prices), reverse=True)
