"""A region's choices: each corner is the best at some price, and no choice is missed by far."""

from __future__ import annotations

import itertools

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
from ebb_tests.programs import planned as programs
from ebb_tests.programs.planned import PROGRAMS, planning

every_program = pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)


@st.composite
def regions(draw):
    """Choices of a region whose costs the test gives, without running a step."""
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
    """Each set of results that could be kept, with what it costs."""
    able = [op for op, cost in enumerate(choices.costs) if cost.lasting and not cost.free]
    for count in range(len(able) + 1):
        for saved in itertools.combinations(able, count):
            yield choices.cost(saved)


@given(regions(), st.sampled_from([0.0, 0.05, 0.3, 1.0, 7.0]))
def test_the_cheapest_at_a_price(choices, price):
    saved = choices.cheapest(price)

    held, time = choices.cost(saved)
    assert price * held + time == pytest.approx(min(price * h + t for h, t in all_choices(choices)))


@given(regions())
def test_corners_are_those_of_the_hull(choices):
    """No choice lies below the line through them, and its ends are the fewest and the most."""
    corners = [Point(saved, *choices.cost(saved)) for saved in choices.corners]
    every = [Point(None, *cost) for cost in all_choices(choices)]

    expected = hull(not_beaten(every))

    found = [(point.resident, point.added) for point in hull(not_beaten(corners))]
    assert found == [(point.resident, pytest.approx(point.added)) for point in expected]


@given(regions())
def test_what_is_kept_is_of_use(choices):
    for saved in choices.corners:
        held, time = choices.cost(saved)
        assert all(choices.costs[op].lasting and not choices.costs[op].free for op in saved)
        for one in saved:
            less, slower = choices.cost(saved - {one})
            assert (slower, -less) > (time, -held) or choices.costs[one].size == 0


@given(regions())
def test_choices_between_corners_add_and_gain(choices):
    for low, high in itertools.pairwise(choices.corners):
        (least, slowest), (most, fastest) = choices.cost(low), choices.cost(high)
        for saved in choices.between(low, high):
            held, time = choices.cost(saved)
            assert fastest - 1e-9 <= time <= slowest + 1e-9
            assert held <= max(most, least + most)
            assert all(choices.costs[op].lasting for op in saved)


@given(regions(), st.integers(0, 20))
def test_the_exact_solver_finds_the_best(choices, budget):
    within = [time for held, time in all_choices(choices) if held <= budget]

    saved = best_choices.optimum(choices, budget)

    held, time = choices.cost(saved)
    assert held <= budget
    assert time == pytest.approx(min(within))


@every_program
def test_the_exact_solver_is_hardly_better(make):
    """By less than 3 % of the step, in any region at any of ten budgets."""
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
def test_points_go_from_the_fewest_bytes_to_the_least_time(make):
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


def test_a_policy_can_say_each_point():
    """One that would need too many rules is not offered; see the operators of a recurrent cell."""
    found = planning(programs.recurrent)

    for point in found.chooser.fronts["0"]:
        if point.choice is not EAGER:
            policies = found.policies({"0": point})
            names = found.simulator.step.names_of(0)
            assert len(policies.policies["0"].rules) <= 64, len(names)


def points(*pairs):
    return [Point(None, held, added) for held, added in pairs]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=12))
def test_those_not_beaten(pairs):
    found = not_beaten(points(*pairs))

    for held, added in pairs:
        assert any(one.resident <= held and one.added <= added for one in found)
    for one in found:
        assert not any(
            (held, added) != (one.resident, one.added)
            and held <= one.resident
            and added <= one.added
            for held, added in pairs
        )


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=12))
def test_a_hull_lies_below_all(pairs):
    front_ = not_beaten(points(*pairs))
    corners = hull(front_)

    assert (corners[0], corners[-1]) == (front_[0], front_[-1])
    for low, high in itertools.pairwise(corners):
        for one in front_:
            if low.resident <= one.resident <= high.resident:
                share = (one.resident - low.resident) / (high.resident - low.resident)
                assert one.added >= low.added + share * (high.added - low.added) - 1e-9
    slopes = [
        (h.added - lo.added) / (h.resident - lo.resident) for lo, h in itertools.pairwise(corners)
    ]
    assert slopes == sorted(slopes)
