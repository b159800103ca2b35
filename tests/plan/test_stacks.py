"""Plans with several blocks in one region, where what blocks hand on is too much."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

import ebb
from ebb._plan.apply.module_policies import ModulePolicies
from ebb._plan.choose.chooser import Chooser
from ebb._plan.choose.stacks import Stacked, find_stacks
from ebb._plan.measure import measure, parent_of
from ebb._plan.plan import plan_of
from ebb._plan.simulate.simulator import Simulator
from ebb_tests.exactness import same_bits
from ebb_tests.programs import planned as programs
from ebb_tests.programs.planned import (
    Chain,
    Llama,
    PreLN,
    Program,
    Residual,
    Stack,
    built,
    measured,
    of_ids,
)

DEPTH = 7


def stack_of(block, kind=Stack, **arguments):
    model = kind(*(block() for _ in range(DEPTH)))
    return Program(model, of_ids(model, **arguments), ("layers.*",))


def pre_ln():
    return stack_of(PreLN)


def llama():
    return stack_of(Llama)


def in_place():
    """Blocks that write into what they were given, and into what they make."""
    model = nn.Sequential(*(Chain() for _ in range(DEPTH)))
    return Program(model, programs.of_rows(model), ("[0-9]",))


def dropout():
    layers = (
        nn.TransformerEncoderLayer(programs.WIDTH, 4, 2 * programs.WIDTH, 0.1, batch_first=True)
        for _ in range(DEPTH)
    )
    model = nn.Sequential(*layers)
    return Program(model, programs.of_rows(model, seed=True), ("[0-9]",))


def pictures():
    """With buffers of batch norm, relu in place."""
    model = nn.Sequential(*(Residual() for _ in range(DEPTH)))
    return Program(model, programs.of_pictures(model, 8), ("[0-9]",))


class Inception(nn.Module):
    """Four branches read the input, one of them through a pooling with two outputs."""

    def __init__(self, channels=8):
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Conv2d(channels, channels // 4, size, padding=size // 2) for size in (1, 3, 5, 1)
        )
        self.pool = nn.MaxPool2d(3, 1, 1)

    def forward(self, x):
        inputs = (x, x, x, self.pool(x))
        return torch.cat(
            [branch(one).relu() for branch, one in zip(self.branches, inputs, strict=True)], 1
        )


def inception():
    model = nn.Sequential(*(Inception() for _ in range(DEPTH)))
    return Program(model, programs.of_pictures(model, 8), ("[0-9]",))


class Cells(nn.Module):
    """A recurrent cell in a Python loop, whose operators write in place over what replays need."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(programs.WIDTH, programs.WIDTH)

    def forward(self, x):
        states = [torch.zeros_like(x[0])]
        for one in x:
            states.append(self.cell(one, states[-1]))
        return torch.stack(states[1:])


def cells():
    model = nn.Sequential(*(Cells() for _ in range(4)))
    x = torch.randn(5, 16, programs.WIDTH)

    def step():
        model(x).square().mean().backward()

    return Program(model, step, ("[0-9]",))


def batches():
    return stack_of(PreLN, batches=2)


class Around(nn.Module):
    """What calls the blocks is a module inside of the model."""

    def __init__(self):
        super().__init__()
        self.body = Stack(*(PreLN() for _ in range(DEPTH)))
        self.last = nn.Linear(50, 50)

    def forward(self, ids):
        return self.last(self.body(ids).relu())


def inside():
    model = Around()
    return Program(model, of_ids(model), ("body.layers.*",))


class Skipping(Stack):
    """Each block's result is read by the two that follow."""

    def forward(self, ids):
        x = before = self.embedding(ids)
        for layer in self.layers:
            x, before = layer(x + before), x
        return self.head(self.norm(x))


def skipping():
    return stack_of(PreLN, Skipping)


class Hoarding(Stack):
    """What blocks return is held by the program until backward."""

    def forward(self, ids):
        self.hidden = [self.embedding(ids)]
        for layer in self.layers:
            self.hidden.append(layer(self.hidden[-1]))
        return self.head(self.norm(self.hidden[-1]))


def hoarding():
    return stack_of(PreLN, Hoarding)


STACKS = (pre_ln, llama, in_place, dropout, pictures, inception, batches, inside)
ALL = (*STACKS, hoarding, cells)
CLOSE = 0.0025  # of the peak, as in test_simulator.py
# Likewise: scratch memory of replays, and gates that each time step makes again.
LOOSE = {dropout: 0.055, cells: 0.145}

every_stack = pytest.mark.parametrize("make", STACKS, ids=lambda make: make.__name__)


@functools.cache
def stacked(make):
    program = built(make)
    found = measured(program)
    names = {one.region for one in found.profile.operators}
    parents = {name: parent_of(program.model, name) for name in names}
    found = replace(found, root=type(program.model).__name__, parents=parents)
    simulator = Simulator(found)
    stacks = find_stacks(simulator.step, parents)
    return program, found, Stacked(found, simulator, stacks) if stacks else None


@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
def test_bytes_replays_and_bits(make):
    """Of each choice that a stack has."""
    program, _, found = stacked(make)
    ((region, choices),) = found.choices.items()
    chooser = Chooser(found.simulator, found)
    run = programs.repeatable(program)
    expected = run()

    for choice in choices:
        estimate = chooser.estimate({region: chooser._point(region, choice)})
        with ModulePolicies(found.policies(region, choice)).apply(program.model):
            gradients = run()
            profile = ebb.profile(program.step, steps=1)
        assert all(map(same_bits, gradients, expected))
        assert estimate.replays == len(profile.replays)
        most = (1 + LOOSE.get(make, CLOSE)) * profile.peak
        assert (1 - CLOSE) * profile.peak <= estimate.peak <= most


def least_and_once(make):
    """The lowest peaks: with a stack, and with a region for each block that replays once."""
    _, measured, found = stacked(make)
    blocks = Chooser(Simulator(measured))
    together = Chooser(found.simulator, found)
    once = blocks.estimate(blocks.least_made_once).peak
    return together.estimate(together.least()).peak, once


@pytest.mark.parametrize("make", [pre_ln, in_place, pictures, batches, inside])
def test_less_is_needed_than_with_a_region_for_each_block(make):
    least, once = least_and_once(make)

    assert least < once


def test_nothing_is_gained_where_the_program_holds_what_blocks_return():
    least, once = least_and_once(hoarding)

    assert least >= once


def test_what_operators_outside_of_blocks_made_is_handed_on_by_nobody():
    assert stacked(skipping)[2] is None


@pytest.mark.sweep
@every_stack
@pytest.mark.parametrize("part", [0.0, 0.5, 0.9])
def test_budgets_below_that_of_a_region_for_each_block(make, part):
    program, measured, _ = stacked(make)
    least, once = least_and_once(make)
    budget = measured.base + int((least + part * (once - least)) / 0.99) + 1

    plan = plan_of(measured, budget)

    with plan.apply(program.model):
        assert ebb.profile(program.step, steps=1).peak <= plan.budget
    alone = plan_of(replace(measured, parents={}), budget, at_least=True)
    assert alone.peak > plan.budget or alone.duration >= plan.duration


def test_a_plan_of_stacks_is_written_and_read(tmp_path):
    program, measured, _ = stacked(in_place)
    plan = plan_of(measured, 1, at_least=True)
    plan.save(tmp_path / "plan.toml")
    expected = [one.clone() for one in program.run()]

    with ebb.ModulePolicies.load(tmp_path / "plan.toml").apply(program.model) as handle:
        gradients = [one.clone() for one in program.run()]
        peak = ebb.profile(program.step, steps=1).peak

    assert set(handle.names) == {"", *(f"{n}" for n in range(DEPTH))}
    assert all(map(same_bits, gradients, expected))
    assert peak <= plan.peak * (1 + CLOSE)
    assert "Sequential: " in plan.explain()
    assert f"{DEPTH + 1} regions (the model, 0-{DEPTH - 1})" in plan.summary()


def test_replays_ahead_need_a_region_for_each_block():
    _, measured, _ = stacked(in_place)
    ebb.config.ahead.regions = 1

    plan = plan_of(measured, 1, at_least=True)

    assert "" in plan.policies
    assert not plan._regions._settings.ahead


def test_lists_and_dictionaries_call_nothing():
    model = nn.Module()
    model.body = nn.Sequential(nn.ModuleList([nn.ModuleDict({"a": nn.Linear(1, 1)})]))

    assert parent_of(model, "body.0.0.a") == "body"
    assert parent_of(model, "body.0.0") == "body"
    assert parent_of(model, "body") == ""


@pytest.mark.sweep
def test_from_the_budget_alone():
    """`ebb.plan` finds out which module calls the blocks."""
    program = built(pre_ln)
    with pytest.raises(ebb.BudgetError) as raised:
        ebb.plan(program.model, program.step, "1B")
    expected = [one.clone() for one in program.run()]

    plan = ebb.plan(program.model, program.step, raised.value.minimum)

    with plan.apply(program.model):
        assert all(map(same_bits, program.run(), expected))


def by_hand():
    """The step calls the blocks itself."""
    model = Stack(*(PreLN() for _ in range(DEPTH)))
    ids = torch.randint(0, 50, (4, programs.LENGTH))

    def step():
        x = model.embedding(ids)
        for layer in model.layers:
            x = layer(x)
        model.head(model.norm(x)).square().mean().backward()

    return Program(model, step, ("layers.*",))


def half_by_hand():
    """Once so, and once by the module around them."""
    found = by_hand()
    ids = torch.randint(0, 50, (4, programs.LENGTH))

    def step():
        found.step()
        found.model(ids).square().mean().backward()

    return replace(found, step=step)


@pytest.mark.parametrize("make", [by_hand, half_by_hand])
def test_a_module_that_does_not_call_the_blocks_is_no_region(make):
    program = built(make)
    found = measure(program.step, program.model, [f"layers.{n}" for n in range(DEPTH)])

    assert found.parents == {}
    assert "" not in plan_of(found, 1, at_least=True).policies
    assert not any(one._forward_pre_hooks for one in program.model.modules())


def test_hooks_are_gone_when_a_step_fails():
    program = built(pre_ln)

    def fails():
        program.step()
        raise KeyError("this step")

    with pytest.raises(KeyError, match="this step"):
        ebb.plan(program.model, fails, 0.5)

    assert not any(one._forward_pre_hooks or one._forward_hooks for one in program.model.modules())
