"""Plans of programs whose kernels take longer than ebb itself, and random policies. Nightly.

Predicted times are compared with measured ones here only: see `test_simulator.py` for bytes.
"""

from __future__ import annotations

import contextlib
import os
import random
import time

import pytest

import ebb
from ebb._plan.choose.memory_budget import BudgetError
from ebb._plan.measure import measure
from ebb._plan.plan import plan_of
from ebb._plan.simulate.choice import EAGER, Choice
from ebb_tests.programs import planned as programs
from ebb_tests.programs.planned import PROGRAMS, built, planning

pytestmark = [pytest.mark.slow, pytest.mark.on_cpu("times and bytes of the CPU")]

TIME_ERROR = 0.10
SHARES = (0.6, 0.0)  # the last one: the lowest budget
LARGER = (programs.pre_ln, programs.dropout_encoder, programs.accumulation)


def plans_of(program):
    measured = measure(program.step, program.model, list(program.blocks))
    plans = {}
    for share in SHARES:
        try:
            plans[share] = plan_of(measured, share or 1)
        except BudgetError as error:
            plans[0.0] = plan_of(measured, error.minimum)
    return plans


def measured_ratios(program, plans):
    """Least times over that of a plain step, in turns, until they are the predicted ones or many
    rounds have run: other processes only make steps slower."""
    least = {}
    ratios = {}
    for rounds in range(40):
        for share, plan in [(None, None), *plans.items()]:
            with contextlib.nullcontext() if plan is None else plan.apply(program.model):
                start = time.perf_counter()
                program.step()
                took = time.perf_counter() - start
            least[share] = min(took, least.get(share, took))
        ratios = {share: least[share] / least[None] for share in plans}
        if rounds >= 5 and all(is_predicted(plan, ratios[share]) for share, plan in plans.items()):
            break
    return ratios


def is_predicted(plan, ratio):
    return abs(ratio * plan.plain_duration / plan.duration - 1) <= TIME_ERROR


@pytest.mark.not_sanitized
@pytest.mark.skipif(os.getloadavg()[0] > (os.cpu_count() or 1), reason="needs an idle machine")
@pytest.mark.parametrize("make", LARGER, ids=lambda make: make.__name__)
def test_times_are_the_predicted_ones(make, monkeypatch):
    """Profiles up to three times, since a profile is of few steps."""
    monkeypatch.setattr(programs, "WIDTH", 128)
    monkeypatch.setattr(programs, "LENGTH", 64)
    program = built(make)
    seen = []
    for _ in range(3):
        plans = plans_of(program)
        ratios = measured_ratios(program, plans)
        seen.append([(p.duration / p.plain_duration, ratios[share]) for share, p in plans.items()])
        if all(is_predicted(plan, ratios[share]) for share, plan in plans.items()):
            break
    else:
        pytest.fail(f"predicted and measured: {seen}")
    for share, plan in plans.items():
        with plan.apply(program.model):
            peak = ebb.profile(program.step, steps=1).peak
        assert peak <= max(share * plan.plain_peak, 1.03 * plan.peak)


def by_hand(found, seed):
    """Choices as a user might write them: the first blocks save all results of some operators."""
    draw = random.Random(seed)
    step = found.simulator.step
    names = sorted({one.func_name for one in found.measured.profile.operators})
    saved = {name for name in names if draw.random() < draw.choice((0.15, 0.5))}
    regions = list(found.chooser.calls)
    count = max(1, round(len(regions) * draw.choice((0.5, 0.75, 1.0))))
    choices = dict.fromkeys(regions, EAGER)
    for region in regions[:count]:
        operators = step.calls[found.chooser.calls[region][0]].operators
        places = [
            place
            for place, number in enumerate(operators)
            if found.measured.profile.operators[number].func_name in saved
        ]
        choices[region] = Choice(frozenset(places))
    return found.chosen(choices)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_no_random_policy_is_faster_than_the_plan_for_its_peak(make, seed):
    found = planning(make)
    hand = found.chooser.estimate(by_hand(found, seed))

    plan = found.chooser.estimate(found.chooser.choose(hand.peak))

    assert plan.peak <= hand.peak
    assert plan.duration <= 1.02 * hand.duration
