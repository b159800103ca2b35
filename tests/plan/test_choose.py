"""Choices for a budget: within the budget, and as fast as possible."""

from __future__ import annotations

import functools
import itertools

import pytest

from ebb._plan.apply.described import users_of_peak
from ebb._plan.simulate.choice import EAGER, Choice
from ebb_tests.predictions import every_program
from ebb_tests.programs import planned as programs
from ebb_tests.programs.planned import planning


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
def test_choices_fit_and_larger_budgets_are_never_slower(make):
    chooser = planning(make).chooser
    all_recomputed = chooser.estimate(planning(make).chosen(dict.fromkeys(chooser.calls, Choice())))
    found = [(budget, chooser.estimate(chosen)) for budget, chosen in choices(make)[1:]]

    for budget, estimate in found:
        assert estimate.peak <= budget
        if all_recomputed.peak <= budget:
            assert estimate.duration <= all_recomputed.duration
    for (_, before), (_, after) in itertools.pairwise(found):
        assert after.duration <= 1.001 * before.duration
    _, chosen = choices(make)[-1]
    assert all(point.choice is EAGER for point in chosen.values())


@every_program
def test_least_is_the_lowest_peak_of_a_choice(make):
    chooser = planning(make).chooser
    least = chooser.estimate(chooser.least()).peak
    all_recomputed = planning(make).chosen(dict.fromkeys(chooser.calls, Choice()))

    assert chooser.choose(least) is not None
    assert chooser.choose(least - 1) is None
    assert least <= chooser.estimate(all_recomputed).peak
    assert least <= planning(make).simulator.plain.peak


@every_program
def test_no_other_choice_of_one_region_is_faster_and_fits(make):
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


def test_equal_layers_share_a_front():
    for make in (programs.pre_ln, programs.llama, programs.accumulation):
        chooser = planning(make).chooser
        assert len(set(chooser.alike.values())) <= 2  # the last one's result is not read by a layer
        regions = list(chooser.fronts)
        assert chooser.fronts[regions[0]] is chooser.fronts[regions[1]]
    alike = planning(programs.frozen).chooser.alike
    assert alike["layers.0"] != alike["layers.1"] != alike["layers.2"]


def test_region_that_runs_twice_has_one_choice_and_the_time_of_both():
    found = planning(programs.shared)
    chooser = found.chooser
    assert {region: len(calls) for region, calls in chooser.calls.items()} == {"0": 2, "1": 2}

    for _, chosen in choices(programs.shared)[1:-2]:
        assert set(chosen) == {"0", "1"}
        assert chooser.estimate(chosen).peak == found.peak(chosen)
    for region, points in chooser.fronts.items():
        first = chooser.calls[region][0]
        for point in points:
            once = chooser.simulator.of_call(first, point.choice).added
            assert point.added == pytest.approx(2 * once, rel=0.1)


def test_users_of_the_peak_add_up_to_it():
    chooser = planning(programs.pre_ln).chooser
    chosen = chooser.least()

    held = dict(users_of_peak(chooser, chosen))

    assert sum(held.values()) == chooser.estimate(chosen).peak
    assert any(who.startswith("in layers.") for who in held)
