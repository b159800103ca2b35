"""ebb.plan, from a budget to regions: what a user writes, reads and saves."""

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
from ebb_tests.programs import planned as programs
from ebb_tests.programs.planned import PROGRAMS, built, planned, planning

every_program = pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)


def test_a_plan_is_applied_and_taken_back():
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


def test_nothing_is_changed_by_planning():
    program = programs.built(programs.pre_ln)
    weights = [one.detach().clone() for one in program.model.parameters()]
    classes = [type(module) for module in program.model.modules()]
    ahead = ebb.config.to_dict()

    ebb.plan(program.model, program.step, 0.6)

    assert [type(module) for module in program.model.modules()] == classes
    assert ebb.config.to_dict() == ahead
    for one, other in zip(weights, program.model.parameters(), strict=True):
        assert torch.equal(one, other)


@every_program
def test_the_step_stays_in_the_budget(make):
    """Measured, at budgets from the least to the need. A share is one of what is predicted of a
    plain step, which may be more than it takes: see `test_simulator.LOOSE`.
    """
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
def test_gradients_are_those_of_eager(make):
    """Bit for bit, and buffers, at many budgets."""
    found = planning(make)
    run = programs.repeatable(found.program)
    expected = run()
    seen = set()
    for place in range(12):
        plan = plan_of(found.measured, 0.3 + 0.06 * place, at_least=True)
        text = str([(name, policy.to_toml()) for name, policy in plan.policies.items()])
        if text in seen:
            continue
        seen.add(text)
        with plan.apply(found.program.model):
            assert all(map(same_bits, run(), expected))
    least = found.chooser.estimate(found.chooser.least()).peak
    assert len(seen) > 1 or least > 0.99 * found.plain_peak


def test_models_that_train_one_after_the_other_in_one_step():
    """Blocks that run when other blocks' backward is over are regions as well."""
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


def test_a_budget_of_bytes_counts_weights_too():
    program = programs.built(programs.pre_ln)
    weights = sum(one.nbytes + one.grad.nbytes for one in program.model.parameters())

    plan = ebb.plan(program.model, program.step, weights + 400_000)

    assert plan.budget == int(400_000 * 0.99)
    assert plan.peak <= plan.budget


@pytest.mark.parametrize("budget", ["700 KiB", "1 GiB"])
def test_with_a_budget_of_bytes_the_line_names_all_that_counts(budget):
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


def test_budgets_in_bytes_and_as_text_are_the_same():
    _, one = planned(programs.pre_ln, "800 KiB")
    _, other = planned(programs.pre_ln, 800 * 1024)

    assert one.budget == other.budget


def test_a_budget_above_the_need():
    program, plan = planned(programs.pre_ln, "1GiB")

    assert plan.policies == {}
    assert plan.replays == 0
    assert plan.peak <= plan.plain_peak * 1.01
    assert "fits as it is" in plan.summary()
    assert "nothing is recomputed" in plan.summary()
    with plan.apply(program.model) as handle:
        assert handle.names == ()


def test_a_budget_below_the_least():
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


def test_a_plan_for_the_named_minimum():
    program = programs.built(programs.pre_ln)
    with pytest.raises(ebb.BudgetError) as raised:
        ebb.plan(program.model, program.step, "1B")

    plan = ebb.plan(program.model, program.step, raised.value.minimum)

    assert plan.peak <= plan.budget
    with plan.apply(program.model):
        assert ebb.profile(program.step, steps=1).peak <= raised.value.minimum


@every_program
def test_the_minimum_can_be_planned_and_less_cannot(make):
    found = planning(make).measured
    with pytest.raises(ebb.BudgetError) as raised:
        plan_of(found, 1)

    plan = plan_of(found, raised.value.minimum)

    assert plan.peak <= plan.budget
    with pytest.raises(ebb.BudgetError):
        plan_of(found, int(raised.value.minimum - 0.02 * plan.peak))
    assert plan_of(found, 1, at_least=True).peak == plan.peak


@every_program
def test_the_share_that_an_error_names_can_be_planned(make):
    found = planning(make).measured
    with pytest.raises(ebb.BudgetError) as raised:
        plan_of(found, 0.01)

    for share in (raised.value.share, round(raised.value.share, 2)):  # the text has whole percents
        plan = plan_of(found, min(1.0, share))
        assert plan.peak <= plan.budget


def test_in_words():
    found = planning(programs.pre_ln)
    plan = plan_of(found.measured, 0.6)

    line = plan.summary()
    assert line.startswith("ebb: ")
    assert "\n" not in line
    assert "layers." in line
    assert "KiB" in line
    text = plan.explain()
    assert "recomputed: " in text
    assert "ms more" in text
    assert plan_of(found.measured, 1.0).explain().count("left eager") >= 1


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
def test_a_price_has_one_unit(ratio, text):
    assert price(ratio) == text


@pytest.mark.parametrize(
    ("spread", "text"),
    [
        (0.09, ", {}"),
        (0.2, ", {} (times of profiled steps vary by 20%)"),
        (0.31, ", more time by an unknown amount (the times of profiled steps vary too much)"),
    ],
)
def test_a_plan_says_when_measured_times_vary(spread, text):
    plan = plan_of(replace(planning(programs.pre_ln).measured, spread=spread), 0.6)

    assert plan.summary().endswith(text.format(price(plan.duration / plan.plain_duration)))


def test_a_model_that_is_one_region_may_be_divided():
    """Blocks are not found in a loop over time steps in one forward."""

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


@pytest.mark.parametrize("make", [programs.pre_ln, programs.dropout_encoder, programs.unet])
def test_the_whole_is_enough(make):
    plan = plan_of(planning(make).measured, 1.0)

    assert plan.policies == {}
    assert plan.replays == 0
    assert "fits as it is" in plan.summary()


def test_a_byte_is_no_share():
    """1 is a number of bytes, and 1.0 all that there is."""
    with pytest.raises(ebb.BudgetError):
        plan_of(planning(programs.pre_ln).measured, 1)


def test_a_model_that_is_one_region():
    """Nothing in it repeats: the model itself is what can be planned."""
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
def test_arguments_that_make_no_sense(arguments, error, message):
    model = small()
    given = {"step": step_of(model), "model": model, "budget": 0.5} | arguments

    with pytest.raises(error, match=message):
        ebb.plan(given.pop("model"), given.pop("step"), given.pop("budget"), **given)


def test_a_step_without_backward():
    model = small()

    with pytest.raises(ValueError, match="there is nothing to plan: no block"):
        ebb.plan(model, lambda: model(torch.randn(8, 32)), 0.5)


def test_a_model_whose_blocks_never_run():
    model = small()
    x = torch.randn(8, 32, requires_grad=True)

    with pytest.raises(ValueError, match="there is nothing to plan: no block"):
        ebb.plan(model, lambda: x.exp().sum().backward(), 0.5)


def test_a_model_with_regions():
    model = small()
    ebb.apply(model, modules="0")

    with pytest.raises(ValueError, match="is already a region"):
        ebb.plan(model, step_of(model), 0.5)


def test_a_step_with_regions_of_its_own():
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
def test_shapes_that_change(rows):
    """A plan was made for others: it may hold more than was planned, and nothing else is wrong."""
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


def test_steps_that_do_not_do_the_same():
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


def test_an_error_of_the_step_leaves_nothing_behind():
    model = small()

    def step():
        model(torch.randn(8, 32))
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        ebb.plan(model, step, 0.5)
    ebb.apply(model, modules="0").remove()


@pytest.mark.parametrize("clears", [False, True])
def test_the_least_that_an_error_names_is_enough_for_the_same_model(clears):
    """Which has gradients by then, that the first step made."""
    program = built(programs.pre_ln)

    def step():
        if clears:
            program.model.zero_grad()
        program.step()

    with pytest.raises(ebb.BudgetError) as raised:
        ebb.plan(program.model, step, "1%")

    plan = ebb.plan(program.model, step, raised.value.minimum)

    assert plan.policies


def test_where_blocks_leave_too_much_outside_the_model_itself_is_tried():
    program = programs.built(programs.unet)
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


def test_all_that_was_tried_is_named():
    program = programs.built(programs.unet)

    with pytest.raises(ebb.BudgetError, match="Lowest possible budget for each") as e:
        ebb.plan(program.model, program.step, 0.05)

    assert "with the model" in str(e.value)
    weights = sum(one.nbytes + one.grad.nbytes for one in program.model.parameters())
    assert weights < e.value.minimum
    plan = ebb.plan(program.model, program.step, e.value.minimum)
    assert plan.peak <= plan.budget


@every_program
def test_the_least_is_never_more_than_without_regions(make):
    found = planning(make)
    least = found.chooser.estimate(found.chooser.least())
    assert least.peak <= found.simulator.plain.peak
