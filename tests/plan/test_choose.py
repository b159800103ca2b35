"""What is chosen stays in the budget and takes as little time as it may."""

from __future__ import annotations

import functools
import itertools

import pytest

from ebb._plan.apply.described import users_of_peak
from ebb._plan.simulate.choice import EAGER, Choice
from ebb_tests.programs import planned as programs
from ebb_tests.programs.planned import PROGRAMS, planning

every_program = pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)


def budgets(make, count=12):
    """From below the least to above the need."""
    chooser = planning(make).chooser
    least = chooser.estimate(chooser.least()).peak
    plain = chooser.estimate(chooser.plain()).peak
    return [least + (plain - least) * place // (count - 1) for place in range(-1, count + 1)]


@functools.cache
def choices(make):
    chooser = planning(make).chooser
    return [(budget, chooser.choose(budget)) for budget in budgets(make)]


@every_program
def test_never_above_the_budget(make):
    chooser = planning(make).chooser

    for budget, chosen in choices(make)[1:]:
        assert chooser.estimate(chosen).peak <= budget


@every_program
def test_the_least_is_the_least(make):
    chooser = planning(make).chooser
    least = chooser.estimate(chooser.least()).peak

    assert chooser.choose(least) is not None
    assert chooser.choose(least - 1) is None
    nothing = planning(make).chosen(dict.fromkeys(chooser.calls, Choice()))
    assert least <= chooser.estimate(nothing).peak


@every_program
def test_with_enough_no_region_is_needed(make):
    _, chosen = choices(make)[-1]

    assert all(point.choice is EAGER for point in chosen.values())


@every_program
def test_more_memory_never_costs_time(make):
    chooser = planning(make).chooser
    times = [chooser.estimate(chosen).duration for _, chosen in choices(make)[1:]]

    for before, after in itertools.pairwise(times):
        assert after <= 1.001 * before


@every_program
def test_never_slower_than_all_recomputed(make):
    chooser = planning(make).chooser
    nothing = planning(make).chosen(dict.fromkeys(chooser.calls, Choice()))
    slowest = chooser.estimate(nothing)

    for budget, chosen in choices(make)[1:]:
        if slowest.peak <= budget:
            assert chooser.estimate(chosen).duration <= slowest.duration


@every_program
def test_what_is_left_could_not_be_used_by_one_region(make):
    """No other choice of any single region is faster and still in the budget."""
    chooser = planning(make).chooser
    missed = []

    for budget, chosen in choices(make)[2:-1:3]:
        now = chooser.estimate(chosen).duration
        for region, points in chooser.fronts.items():
            for point in points:
                other = chooser.estimate({**chosen, region: point})
                if other.peak <= budget and other.duration < 0.99 * now:
                    missed.append((budget, region, point))
    assert missed == []


def test_layers_that_do_the_same_share_a_front():
    for make in (programs.pre_ln, programs.llama, programs.accumulation):
        chooser = planning(make).chooser
        assert len(set(chooser.alike.values())) <= 2  # the last one's result is not read by a layer
        regions = list(chooser.fronts)
        assert chooser.fronts[regions[0]] is chooser.fronts[regions[1]]


def test_layers_that_do_not_do_the_same_have_their_own():
    chooser = planning(programs.frozen).chooser

    assert chooser.alike["layers.0"] != chooser.alike["layers.1"] != chooser.alike["layers.2"]


def test_a_region_that_runs_twice_does_the_same_each_time():
    found = planning(programs.shared)
    chooser = found.chooser
    assert {region: len(calls) for region, calls in chooser.calls.items()} == {"0": 2, "1": 2}

    for _, chosen in choices(programs.shared)[1:-2]:
        assert set(chosen) == {"0", "1"}
        assert chooser.estimate(chosen).peak == found.peak(chosen)


def test_time_of_a_region_that_runs_twice_is_that_of_both():
    chooser = planning(programs.shared).chooser

    for region, points in chooser.fronts.items():
        first = chooser.calls[region][0]
        for point in points:
            once = chooser.simulator.of_call(first, point.choice).added
            assert point.added == pytest.approx(2 * once, rel=0.1)


def test_who_holds_adds_up_to_the_peak():
    chooser = planning(programs.pre_ln).chooser
    chosen = chooser.least()

    held = dict(users_of_peak(chooser, chosen))

    assert sum(held.values()) == chooser.estimate(chosen).peak
    assert any(who.startswith("in layers.") for who in held)
