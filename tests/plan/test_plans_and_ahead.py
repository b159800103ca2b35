"""Plans with replays ahead of backward: on where they fit, off where they do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

import ebb
from ebb._plan.choose.memory_budget import BudgetError
from ebb._plan.plan import plan_of
from ebb._plan.simulate.choice import Choice
from ebb._plan.simulate.simulator import Simulator
from ebb_tests.exactness import same_bits
from ebb_tests.programs import planned as programs
from ebb_tests.programs.planned import planning


@pytest.fixture
def ahead():
    ebb.config.ahead.regions = 1


def is_on():
    return ebb.config.ahead.regions > 0


def test_replays_run_ahead_where_they_fit(ahead):
    program, measured = planning(programs.pre_ln).program, planning(programs.pre_ln).measured
    plan = plan_of(measured, 0.8)

    assert plan._regions._settings.ahead
    assert "replays ahead" not in plan.explain()
    with plan.apply(program.model):
        assert is_on()


def test_replays_do_not_run_ahead_where_they_do_not_fit(ahead, tmp_path):
    found = planning(programs.pre_ln)
    program, plan = found.program, plan_of(found.measured, 1, at_least=True)
    expected = [one.clone() for one in program.run()]

    assert not plan._regions._settings.ahead
    assert ", without replays ahead of backward" in plan.explain()
    assert plan.summary() == f"ebb: {plan.explain().splitlines()[0]}"
    plan.save(tmp_path / "plan.toml")
    for policies in (plan, ebb.ModulePolicies.load(tmp_path / "plan.toml")):
        with policies.apply(program.model):
            assert not is_on()
            gradients = program.run()
        assert is_on()
        assert all(map(same_bits, gradients, expected))


def test_lowest_budget_is_that_without_replays_ahead(ahead):
    measured = planning(programs.llama).measured
    with pytest.raises(BudgetError) as ahead_too:
        plan_of(measured, 1)
    ebb.config.ahead.regions = 0
    with pytest.raises(BudgetError) as alone:
        plan_of(measured, 1)

    assert ahead_too.value.minimum == alone.value.minimum


@pytest.mark.parametrize("share", [0.3, 0.4, 0.5, 0.6, 0.8])
def test_replays_ahead_never_make_a_plan_slower(share, ahead):
    measured = planning(programs.pre_ln).measured
    plan = plan_of(measured, share, at_least=True)
    ebb.config.ahead.regions = 0
    alone = plan_of(measured, share, at_least=True)

    assert plan.duration <= alone.duration or plan.peak < alone.peak


@pytest.mark.parametrize("first", [0, 1])
def test_settings_of_overlapping_plans_end_in_any_order(first, ahead):
    handles = []
    for place in range(2):
        found = planning((programs.pre_ln, programs.llama)[place])
        policies = ebb.ModulePolicies({}, {"min_bytes": 1000 + place}, ahead=False)
        handles.append(policies.apply(found.program.model))
    before = 1 << 20
    assert (is_on(), ebb.config.offload.min_bytes) == (False, 1001)

    handles[first].remove()
    assert (is_on(), ebb.config.offload.min_bytes) == (False, 1001 - first)
    handles[1 - first].remove()
    assert (is_on(), ebb.config.offload.min_bytes) == (True, before)


def test_plan_without_regions_does_not_change_the_setting(ahead):
    plan = plan_of(planning(programs.pre_ln).measured, 1.0)

    assert not plan.policies
    assert plan._regions._settings.ahead


def test_results_recomputed_each_time_are_not_recomputed_ahead():
    found = planning(programs.pre_ln)
    simulator = Simulator(found.measured, ahead=True)
    calls = range(len(simulator.step.calls))
    each_time = [
        Choice(each_time=frozenset(range(0, len(simulator.step.calls[call].operators), 2)))
        for call in calls
    ]
    once = [Choice()] * len(calls)

    first, made_once = simulator.of_call(0, each_time[0]), simulator.of_call(0, Choice())
    assert made_once.early == pytest.approx(made_once.replaying)
    assert 0 < first.early < first.replaying
    assert simulator.estimate(each_time).duration > simulator.estimate(once).duration


def test_replays_ahead_take_as_long_as_others():
    """The measured step has no replays ahead, so the simulator is fitted to all of its replays."""
    measured = planning(programs.pre_ln).measured
    profile = measured.profile
    operators = tuple(replace(operator, runtime=0.01) for operator in profile.operators)
    replays = tuple((name, start, 0.03) for name, start, _ in profile.replays)
    measured = replace(measured, profile=replace(profile, operators=operators, replays=replays))

    simulator = Simulator(measured, ahead=True)

    assert simulator.replay_time(0) == pytest.approx(0.03)
