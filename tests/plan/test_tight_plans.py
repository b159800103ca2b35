"""Plans below what one region holds: some of its results are made again each time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import nn

import ebb
from ebb._plan.choose import chooser as chooser_module
from ebb._plan.choose.chooser import Chooser
from ebb._plan.choose.region_pareto import recomputed_each_time
from ebb._plan.measure import measure
from ebb._plan.plan import plan_of
from ebb._plan.simulate.choice import Choice
from ebb._plan.simulate.simulator import Simulator
from ebb_tests.exactness import same_bits
from ebb_tests.programs import planned as programs
from ebb_tests.programs.planned import PROGRAMS, planning

every_program = pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)

CLOSE = 0.0025  # of the peak, as in test_simulator.py
# Above the measured peak, as a share of it: see LOOSE there
LOOSE = {programs.recurrent: 0.03, programs.branching: 0.12, programs.dropout_encoder: 0.055}
if programs.HAS_AVX2_ONLY:
    LOOSE[programs.residual] = 0.12
# Programs in which the least is this much less than without.
LESS = {
    programs.pre_ln: 0.2,
    programs.llama: 0.2,
    programs.holding: 0.2,
    programs.frozen: 0.2,
    programs.accumulation: 0.15,
    programs.shared: 0.15,
}


def check(make, chosen):
    found = planning(make)
    predicted, measured = found.chooser.estimate(chosen).peak, found.peak(chosen)
    assert (1 - CLOSE) * measured <= predicted <= (1 + LOOSE.get(make, CLOSE)) * measured


def random_choices(found, seed):
    rng = random.Random(seed)
    choices = {}
    for region, calls in found.chooser.calls.items():
        places = range(len(found.simulator.step.calls[calls[0]].operators))
        saved = frozenset(place for place in places if rng.random() < 0.2)
        again = frozenset(place for place in places if rng.random() < 0.5) - saved
        choices[region] = Choice(saved, each_time=again)
    return found.chosen(choices)


@every_program
@pytest.mark.parametrize("seed", range(6))
def test_any_results_made_each_time(make, seed):
    found = planning(make)
    chosen = random_choices(found, seed)

    check(make, chosen)
    with found.policies(chosen).apply(found.program.model):
        profile = ebb.profile(found.program.step, steps=1)
    assert found.chooser.estimate(chosen).replays == len(profile.replays)


@every_program
def test_the_least(make):
    found = planning(make)
    chooser = found.chooser

    check(make, chooser.least())
    once, least = (
        chooser.estimate(chooser.least_made_once).peak,
        chooser.estimate(chooser.least()).peak,
    )
    assert least <= (1 - LESS.get(make, 0.0)) * once


@every_program
@pytest.mark.parametrize("part", [0.0, 0.3, 0.6, 0.9])
def test_budgets_between_the_least_and_what_is_made_once(make, part):
    found = planning(make)
    chooser = found.chooser
    least, once = chooser.estimate(chooser.least()), chooser.estimate(chooser.least_made_once)
    budget = least.peak + int(part * (once.peak - least.peak))

    chosen = chooser.choose(budget)

    estimate = chooser.estimate(chosen)
    assert estimate.peak <= budget
    assert estimate.duration <= max(least.duration, once.duration) * (1 + 1e-9)
    check(make, chosen)


@every_program
def test_gradients_are_those_of_eager(make):
    found = planning(make)
    run = programs.repeatable(found.program)
    expected = run()
    plan = plan_of(found.measured, 1, at_least=True)

    with plan.apply(found.program.model):
        assert all(map(same_bits, run(), expected))


class Mlp(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x


def lowest_peak(found):
    """The lowest peak of a choice, and if one group of regions alone could lower it."""
    chooser = Chooser(Simulator(replace(found, link=None, pager=None)))
    choices = [chooser.least_made_once, *chooser._tight]
    least = min(choices, key=lambda chosen: chooser.estimate(chosen).peak)
    peak = chooser.estimate(least).peak
    others = [
        {**least, **dict.fromkeys(regions, chooser._point(regions[0], choice))}
        for regions in chooser._groups.values()
        for choice in recomputed_each_time(chooser.simulator, chooser.calls[regions[0]][0])
    ]
    return peak, any(chooser.estimate(other).peak < peak for other in others)


@pytest.mark.parametrize("sizes", [(6, 6, 12, 12), (18, 18, 16, 16), (8, 12, 16)], ids=str)
def test_groups_take_turns_until_none_lowers_the_peak(sizes, monkeypatch):
    """When one group recomputes more, the peak moves to another, or two groups have the same."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Mlp(16, layers) for layers in sizes))
    x = torch.randn(256, 16)
    found = measure(lambda: model(x).square().mean().backward(), model, ["[0-3]"])

    peak, can_be_lower = lowest_peak(found)

    assert not can_be_lower
    monkeypatch.setattr(chooser_module, "_MOST_PASSES", 1)
    assert peak < lowest_peak(found)[0]


def test_words_tell_what_is_made_each_time():
    plan = plan_of(planning(programs.pre_ln).measured, 1, at_least=True)

    assert "recomputed several times" in plan.explain()
    assert any("RECOMPUTE_EACH_TIME" in repr(policy) for policy in plan.policies.values())


def test_nothing_is_made_twice_where_it_need_not_be():
    for share in (0.35, 0.5, 0.8):
        plan = plan_of(planning(programs.pre_ln).measured, share)
        assert not any("EACH_TIME" in repr(policy) for policy in plan.policies.values())


def test_choices_are_few_however_long_a_region_is():
    found = planning(programs.llama)

    choices = list(recomputed_each_time(found.simulator, 0))

    assert 1 < len(choices) <= 16 + 15
    operators = found.simulator.step.calls[0].operators
    stays = {number - operators.start for number in found.simulator.step.always_kept}
    assert not any(choice.each_time & stays for choice in choices)
