"""`ebb.plan`: budgets, applied plans, errors and texts."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import ebb
from ebb._plan.choose.memory_budget import read_budget
from ebb._plan.plan import plan_of
from ebb._report.text import price, size
from ebb_tests.exactness import same_bits
from ebb_tests.predictions import every_program
from ebb_tests.programs import planned as programs
from ebb_tests.programs.planned import built, planned, planning


def test_plan_is_applied_and_removed():
    program, plan = planned(programs.pre_ln, 0.6)
    forwards = [layer.forward for layer in program.model.layers]

    handle = plan.apply(program.model)

    assert set(handle.names) == set(plan.policies) <= {f"layers.{i}" for i in range(4)}
    with pytest.raises(ValueError, match="is already a region"):
        plan.apply(program.model)
    handle.remove()
    assert [layer.forward for layer in program.model.layers] == forwards
    with plan.apply(program.model) as again:
        assert again.names == handle.names
    plan.apply(program.model).remove()


@every_program
def test_measured_peak_is_in_the_budget(make):
    """At budgets from the least to the peak in eager. A share is one of the predicted peak, which
    may be above the measured one."""
    found = planning(make)
    least = found.chooser.estimate(found.chooser.least()).peak
    whole = max(found.plain_peak, found.simulator.plain.peak)
    for place in range(8):
        share = (least + (whole - least) * place / 7) / whole
        try:
            plan = plan_of(found.measured, min(1.0, share))
        except ebb.BudgetError:
            assert 0.99 * min(1.0, share) * whole < least + 1  # a part is left free
            continue
        with plan.apply(found.program.model):
            peak = ebb.profile(found.program.step, steps=1).peak
        assert peak <= share * whole


@every_program
def test_gradients_and_buffers_are_those_of_eager(make):
    found = planning(make)
    run = programs.repeatable(found.program)
    expected = run()
    seen = set()
    for budget in (1, *(0.3 + 0.06 * place for place in range(12))):
        plan = plan_of(found.measured, budget, at_least=True)
        text = str([(name, policy.to_toml()) for name, policy in plan.policies.items()])
        if text in seen:
            continue
        seen.add(text)
        with plan.apply(found.program.model):
            assert all(map(same_bits, run(), expected))
    least = found.chooser.estimate(found.chooser.least()).peak
    assert len(seen) > 1 or least > 0.99 * found.plain_peak


def test_models_trained_one_after_the_other_in_one_step():
    model = nn.ModuleList(nn.Sequential(*(programs.PreLN() for _ in range(3))) for _ in range(2))
    x = torch.randn(4, programs.LENGTH, programs.WIDTH)

    def step():
        for part in model:
            part(x).square().mean().backward()

    step()
    plan = ebb.plan(model, step, 0.6)

    assert {name.split(".")[0] for name in plan.policies} == {"0", "1"}
    with plan.apply(model):
        assert ebb.profile(step, steps=1).peak <= 0.6 * plan.plain_peak


def test_budget_in_bytes_includes_weights():
    program = built(programs.pre_ln)
    weights = sum(one.nbytes + one.grad.nbytes for one in program.model.parameters())

    plan = ebb.plan(program.model, program.step, weights + 400_000)

    assert plan.budget == int(400_000 * 0.99)
    assert plan.peak <= plan.budget


@pytest.mark.parametrize("budget", ["700 KiB", "1 GiB"])
def test_summary_for_a_budget_in_bytes_names_all_tensors_in_use(budget):
    measured = planning(programs.pre_ln).measured
    budget = read_budget(budget)
    plan = plan_of(measured, budget)

    total = size(plan.peak + measured.base)
    assert f" plus {size(measured.base)} of weights and other tensors: {total} in total" in (
        plan.summary()
    )
    assert measured.base > 100_000
    assert plan.peak + measured.base <= budget
    assert " in total" not in plan_of(measured, 0.6).summary()


@pytest.mark.parametrize("budget", ["1GiB", 1.0])
@pytest.mark.parametrize("make", [programs.pre_ln, programs.dropout_encoder, programs.unet])
def test_budget_above_the_peak_in_eager_recomputes_nothing(make, budget):
    found = planning(make)

    plan = plan_of(found.measured, read_budget(budget))

    assert plan.policies == {}
    assert plan.replays == 0
    assert plan.peak <= plan.plain_peak * 1.01
    assert "fits as it is" in plan.summary()
    assert "nothing is recomputed" in plan.summary()
    assert "left eager" in plan.explain()
    with plan.apply(found.program.model) as handle:
        assert handle.names == ()


def test_error_for_a_budget_below_the_least_says_what_is_possible():
    with pytest.raises(
        ebb.BudgetError, match="is too small; the lowest possible budget is"
    ) as raised:
        planned(programs.pre_ln, 0.1)

    assert isinstance(raised.value, ValueError)
    assert "layers." in str(raised.value)
    assert "are in use when the step begins" in str(raised.value)
    assert f"at {price(raised.value.slowdown)}" in str(raised.value)
    assert "ebb.region" not in str(raised.value)  # there are blocks
    assert raised.value.slowdown > 1
    _, plan = planned(programs.pre_ln, raised.value.share)
    assert plan.policies


@every_program
def test_minimum_and_share_that_an_error_names_can_be_planned(make):
    found = planning(make).measured
    with pytest.raises(ebb.BudgetError) as raised:
        plan_of(found, 1)  # a byte, and no share
    with pytest.raises(ebb.BudgetError) as of_share:
        plan_of(found, 0.01)

    minimum, share = raised.value.minimum, of_share.value.share
    # the text has whole percents
    plans = [plan_of(found, budget) for budget in (minimum, min(1.0, share), round(share, 2))]

    assert all(plan.peak <= plan.budget for plan in plans)
    with pytest.raises(ebb.BudgetError):
        plan_of(found, int(minimum - 0.02 * plans[0].peak))
    assert plan_of(found, 1, at_least=True).peak == plans[0].peak


def test_summary_is_a_line_and_explain_names_what_is_recomputed():
    plan = plan_of(planning(programs.pre_ln).measured, 0.6)

    line = plan.summary()
    assert line.startswith("ebb: ")
    assert "\n" not in line
    assert "layers." in line
    assert "KiB" in line
    text = plan.explain()
    assert "recomputed: " in text
    assert "ms more" in text


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (1.0, "about 0% more time"),
        (1.237, "about 24% more time"),
        (2.0, "about 100% more time"),
        (2.01, "about 2.0 times eager's time"),
        (13.14, "about 13.1 times eager's time"),
    ],
)
def test_price_has_one_unit(ratio, text):
    assert price(ratio) == text


@pytest.mark.parametrize(
    ("spread", "text"),
    [
        (0.09, ", {}"),
        (0.2, ", {} (times of profiled steps vary by 20%)"),
        (0.31, ", more time by an unknown amount (the times of profiled steps vary too much)"),
    ],
)
def test_summary_says_if_measured_times_vary(spread, text):
    plan = plan_of(replace(planning(programs.pre_ln).measured, spread=spread), 0.6)

    assert plan.summary().endswith(text.format(price(plan.duration / plan.plain_duration)))


def test_error_for_a_model_that_is_one_region_advises_smaller_regions():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.LSTMCell(16, 32)

        def forward(self, x):
            state = None
            for at in x:
                state = self.cell(at, state)
            return state[0]

    model, x = Recurrent(), torch.randn(16, 8, 16)

    with pytest.raises(ebb.BudgetError, match="or in place of a plan ebb\\.region around"):
        ebb.plan(model, lambda: model(x).sum().backward(), 0.1)


def test_model_without_repeated_parts_is_one_region():
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.SiLU(), nn.Linear(64, 1))
    x = torch.randn(256, 16)

    plan = ebb.plan(model, lambda: model(x).sum().backward(), 0.95)

    assert set(plan.policies) == {""}
    assert "the model" in plan.summary()
    with plan.apply(model) as handle:
        assert handle.names == ("",)


def step_of(model, x=None):
    x = torch.randn(8, 32, requires_grad=True) if x is None else x
    return lambda: model(x).sum().backward()


def small():
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"step": 3}, TypeError, "step must be a function"),
        ({"model": 3}, TypeError, "model must be a torch.nn.Module"),
        ({"budget": 40}, ValueError, "did you mean '40%'"),
        ({"budget": None}, TypeError, "a budget must be"),
        ({"budget": "much"}, ValueError, "a budget must be"),
        ({"budget": 24.0}, ValueError, "a share must be"),
        ({"modules": "none.*"}, ValueError, "no module matches"),
        (
            {"modules": 3},
            TypeError,
            "ebb: modules must be a string or an iterable of strings; got 3",
        ),
    ],
)
def test_invalid_argument_raises(arguments, error, message):
    model = small()
    given = {"step": step_of(model), "model": model, "budget": 0.5} | arguments

    with pytest.raises(error, match=message):
        ebb.plan(given.pop("model"), given.pop("step"), given.pop("budget"), **given)


@pytest.mark.parametrize("uses_model", [True, False])
def test_step_without_a_backward_of_blocks_raises(uses_model):
    model, x = small(), torch.randn(8, 32, requires_grad=True)
    step = (lambda: model(x)) if uses_model else (lambda: x.exp().sum().backward())

    with pytest.raises(ValueError, match="there is nothing to plan: no block"):
        ebb.plan(model, step, 0.5)


def test_model_with_regions_raises():
    model = small()
    ebb.apply(model, modules="0")

    with pytest.raises(ValueError, match="is already a region"):
        ebb.plan(model, step_of(model), 0.5)


def test_step_with_its_own_regions_raises():
    model = small()
    x = torch.randn(8, 32, requires_grad=True)

    def step():
        with ebb.region(name="mine"):
            y = x.exp()
        model(y).sum().backward()

    with pytest.raises(ValueError, match="already runs a region, 'mine'"):
        ebb.plan(model, step, 0.5)
    ebb.apply(model, modules="0").remove()  # nothing was left behind


@pytest.mark.parametrize("rows", [1, 4, 40])
def test_gradients_are_those_of_eager_for_other_shapes(rows):
    found = planning(programs.residual)
    x = torch.randn(rows, 8, 16, 16)
    model = found.program.model

    def gradients():
        model.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        return [one.grad.clone() for one in model.parameters()]

    expected = gradients()
    with plan_of(found.measured, 0.8).apply(model):
        assert all(map(same_bits, gradients(), expected))


def test_steps_with_different_operators_raise():
    model = small()
    turns = itertools.count()

    def step():
        y = model[0](torch.randn(8, 32))
        for layer in list(model)[1 : 2 + next(turns) % 2]:
            y = layer(y)
        y.sum().backward()

    with pytest.raises(RuntimeError, match="All steps must run the same operators"):
        ebb.plan(model, step, 0.5)
    ebb.apply(model, modules="0").remove()  # nothing was left behind


def test_error_of_the_step_removes_regions_and_hooks():
    model = small()

    def step():
        model(torch.randn(8, 32)).sum().backward()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        ebb.plan(model, step, 0.5)
    assert not any(one._forward_pre_hooks or one._forward_hooks for one in model.modules())
    ebb.apply(model, modules="0").remove()


@pytest.mark.parametrize("clears", [False, True])
def test_minimum_that_an_error_names_is_enough_for_the_same_model(clears):
    program = built(programs.pre_ln)

    def step():
        if clears:
            program.model.zero_grad()
        program.step()

    with pytest.raises(ebb.BudgetError) as raised:
        ebb.plan(program.model, step, "1%")

    plan = ebb.plan(program.model, step, raised.value.minimum)

    assert plan.policies
    assert plan.peak <= plan.budget
    with plan.apply(program.model):
        assert ebb.profile(step, steps=1).peak <= raised.value.minimum


def test_model_is_one_region_if_blocks_leave_too_much_outside():
    program = built(programs.unet)
    named = plan_of(planning(programs.unet).measured, 1, at_least=True)
    share = 0.9 * named.peak / named.plain_peak
    expected = programs.repeatable(program)()

    plan = ebb.plan(program.model, program.step, share)

    assert list(plan.policies) == [""]
    faster = plan.summary().partition("; lowest budget of faster choices of regions: ")[2]
    assert re.match(r"\d+% \(.* in total\) with .*, at about .* time", faster)
    with plan.apply(program.model):
        assert all(map(same_bits, programs.repeatable(program)(), expected))
        assert ebb.profile(program.step, steps=1).peak <= share * plan.plain_peak


def test_error_names_each_choice_of_regions():
    program = built(programs.unet)

    with pytest.raises(ebb.BudgetError, match="Lowest possible budget for each") as e:
        ebb.plan(program.model, program.step, 0.05)

    assert "with the model" in str(e.value)
    weights = sum(one.nbytes + one.grad.nbytes for one in program.model.parameters())
    assert weights < e.value.minimum
    plan = ebb.plan(program.model, program.step, e.value.minimum)
    assert plan.peak <= plan.budget


def test_pareto_curve_has_the_choices_for_budgets():
    measured = planning(programs.llama).measured

    curve = plan_of(measured, 0.6).pareto(points=8)

    assert len(curve) == 8
    for one, other in itertools.pairwise(curve):
        assert one.budget < other.budget
        assert one.duration >= other.duration
    assert all(point.peak <= point.budget for point in curve)
    assert curve[-1].replays == 0
    assert curve[0].peak == plan_of(measured, 0.1, at_least=True).peak
    table = str(curve).splitlines()
    assert len(table) == 9
    assert table[0].split()[:2] == ["budget", "peak"]


@pytest.mark.parametrize(
    ("points", "error"), [(1, ValueError), (0, ValueError), (2.0, TypeError), (True, TypeError)]
)
def test_invalid_number_of_points_raises(points, error):
    plan = plan_of(planning(programs.chain).measured, 0.9)

    with pytest.raises(error, match="ebb: points must be"):
        plan.pareto(points)
