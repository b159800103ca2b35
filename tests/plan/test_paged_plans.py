"""Plans in which rows that live go to page pools: what a step holds is what was said."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace

import pytest
import torch

import ebb
from ebb._plan.measure import measure
from ebb._plan.plan import plan_of
from ebb._plan.profile.copies import has_rows
from ebb._plan.simulate.choice import EAGER, Choice
from ebb_tests.exactness import same_bits
from ebb_tests.programs import planned
from ebb_tests.programs import planned_paging as programs
from ebb_tests.programs.planned import built
from ebb_tests.programs.planned_paging import PAGED, PAGER, paging

CLOSE = 1.0025  # of the peak, as in test_simulator.py
LOOSE = 1.05  # what a replay has fetched counts until backward has asked for it, too
MIXING = 1.11  # copies that Note [Saved by one node] avoids count, too

every_program = pytest.mark.parametrize("make", PAGED, ids=lambda make: make.__name__)


def random_choices(found, seed):
    rng = random.Random(seed)
    choices = {}
    for region, calls in found.chooser.calls.items():
        places = range(len(found.simulator.step.calls[calls[0]].operators))
        saved = frozenset(place for place in places if rng.random() < 0.3)
        paged = frozenset(place for place in places if rng.random() < 0.5) - saved
        choices[region] = Choice(saved, paged=paged, paged_inputs=rng.random() < 0.5)
        if rng.random() < 0.1:
            choices[region] = EAGER
    return choices


def peaks(found, chosen):
    """Predicted; and measured, with what pools have taken before."""
    ebb.experimental.paging.reset()
    with found.policies(chosen).apply(found.program.model):
        measured = ebb.profile(found.program.step, steps=1).peak
        standing = ebb.stats()["paging"]["pool_bytes"]
    return found.chooser.estimate(chosen).peak, measured + standing


@every_program
def test_profiles_tell_which_rows_live(make):
    found = paging(make)
    operators, values = found.simulator.step.operators, found.simulator.step.values
    products = [one for one in operators if one.func_name == "aten::mm.default" and one.reads_rows]

    with_rows = [values[one.outputs[0]] for one in products]
    assert with_rows
    assert all(one.rows == programs.TOKENS for one in with_rows)
    assert all(0 < one.live_rows < one.rows for one in with_rows)
    assert not any(one.live_rows for one in values if one.rows == 0)


@every_program
@pytest.mark.parametrize("seed", range(12))
def test_a_step_holds_what_was_predicted(make, seed):
    found = paging(make)
    chosen = found.chosen(random_choices(found, seed))
    expected = [one.clone() for one in found.program.run()]

    predicted, measured = peaks(found, chosen)
    with found.policies(chosen).apply(found.program.model):
        gradients = found.program.run()

    assert measured <= predicted * CLOSE
    assert predicted <= measured * (MIXING if make.__name__ == "mixing" else LOOSE)
    assert all(map(same_bits, gradients, expected))


@every_program
@pytest.mark.parametrize("share", [0.3, 0.45, 0.6, 0.8])
def test_plans_keep_to_the_budget_and_the_bits(make, share):
    found = paging(make)
    plan = plan_of(found.measured, share, at_least=True)
    expected = [one.clone() for one in found.program.run()]

    with plan.apply(found.program.model):
        gradients = [found.program.run() for _ in range(2)][1]  # the first sizes pools
        gradients = [one.clone() for one in gradients]
        standing = ebb.stats()["paging"]["pool_bytes"]
        peak = ebb.profile(found.program.step, steps=1).peak + standing

    assert peak <= max(plan.peak, plan.budget) * CLOSE
    assert (standing > 0) == (plan.pool_bytes > 0)
    assert standing <= plan.pool_bytes <= standing * CLOSE
    assert all(map(same_bits, gradients, expected))
    assert ebb.stats()["paging"]["pool_bytes"] == 0  # they went with the plan


@every_program
def test_pages_never_make_a_plan_slower(make):
    found = paging(make)
    without = replace(found.measured, pager=None)

    for place in range(6):
        share = 0.3 + 0.12 * place
        with_pages = plan_of(found.measured, share, at_least=True)
        alone = plan_of(without, share, at_least=True)
        assert with_pages.duration <= alone.duration or with_pages.peak < alone.peak
        assert alone.pool_bytes == 0


def test_fast_copies_are_used_and_slow_ones_are_not():
    slow = replace(PAGER, speed=1.0)

    fast_plan = plan_of(paging(programs.experts).measured, 0.6)
    slow_plan = plan_of(paging(programs.experts, slow).measured, 0.6)

    assert "  paged: " in fast_plan.explain()
    assert fast_plan.pool_bytes > 0 == slow_plan.pool_bytes
    assert "page pools" not in slow_plan.explain()
    assert fast_plan.duration < 1.01 * slow_plan.duration  # the search differs, too


def test_pools_that_may_not_be_so_large_are_not_planned():
    small = replace(PAGER, limit=1000)

    assert plan_of(paging(programs.experts, small).measured, 0.6).pool_bytes <= 1000


@pytest.mark.parametrize("make", PAGED, ids=lambda make: make.__name__)
def test_steps_that_are_measured_say_whether_they_may_be_paged(make):
    program = built(make)

    pager = measure(program.step, program.model, program.blocks).pager

    assert pager is not None
    assert pager.fixed_order == (make is programs.fixed_order)
    assert pager.speed > 0
    assert not pager.beside


@pytest.mark.parametrize("how", ["plain", "a part by run_step", "in brackets without run_step"])
def test_steps_that_cannot_be_repeated_are_not_paged(how):
    program = built(programs.experts)
    x = torch.randn(programs.TOKENS, programs.WIDTH)

    def step():
        if how == "a part by run_step":
            program.step()
        in_brackets = how == "in brackets without run_step"
        with (
            ebb.experimental.paging.step(fixed_order=False)
            if in_brackets
            else contextlib.nullcontext()
        ):
            program.model(x).square().mean().backward()

    assert measure(step, program.model, program.blocks).pager is None


def test_steps_without_marks_are_not_paged():
    program = built(planned.pre_ln)

    def step():
        ebb.experimental.paging.run_step(program.step)

    assert measure(step, program.model, program.blocks).pager is None


def test_rows_that_an_operator_mixes_are_not_paged():
    """Softmax over rows saves its result, and reads what is marked."""

    class Mixing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(16, 16, bias=False)

        def forward(self, x, count):
            h = ebb.experimental.mark_rows(self.inner(x), count).exp()
            return h.sin().softmax(0) * h

    model = torch.nn.Sequential(Mixing())
    x = torch.randn(64, 16)

    def step():
        model[0](x, torch.tensor(20)).sum().backward()

    with ebb.apply(model, ebb.policies.recompute_all, "0"):
        profile = ebb.profile(step, steps=1)

    rows = {one.func_name: profile.values[one.outputs[0]] for one in profile.operators}
    assert rows["aten::sin.default"].rows_mixed is False  # softmax saves what it made
    assert rows["aten::_softmax.default"].rows == 0
    assert has_rows(rows["aten::exp.default"]) != rows["aten::exp.default"].rows_mixed


def test_more_rows_than_were_measured_are_no_error():
    """The step is run again, and larger pools follow."""
    found = paging(programs.experts)
    plan = plan_of(found.measured, 0.6)
    assert plan.pool_bytes > 0
    try:
        with plan.apply(found.program.model):
            found.program.run()
            found.program.run()
            for layer in found.program.model:
                layer.share += 0.4
            overflows = ebb.stats()["paging"]["overflows"]
            gradients = [one.clone() for one in found.program.run()]
            assert ebb.stats()["paging"]["overflows"] == overflows + 1
        expected = found.program.run()
    finally:
        for layer in found.program.model:
            layer.share -= 0.4

    assert all(map(same_bits, gradients, expected))


def test_a_file_has_it_too(tmp_path):
    found = paging(programs.experts)
    plan = plan_of(found.measured, 0.6)
    plan.save(tmp_path / "plan.toml")
    expected = [one.clone() for one in found.program.run()]

    with ebb.ModulePolicies.load(tmp_path / "plan.toml").apply(found.program.model):
        found.program.run()
        gradients = found.program.run()
        assert ebb.stats()["paging"]["pool_bytes"] > 0

    assert ebb.stats()["paging"]["pool_bytes"] == 0
    assert 'decision = "page"' in (tmp_path / "plan.toml").read_text(encoding="utf-8")
    assert all(map(same_bits, gradients, expected))


def test_reports_have_what_pools_take():
    found = paging(programs.experts)
    plan = plan_of(found.measured, 0.6)
    with ebb.record_reports(), plan.apply(found.program.model):
        plan.measure(found.program.step)
        found.program.step()
        report = ebb.report()

    assert abs(report.plan.deviation["peak"]) < CLOSE - 1
    cuts = [cut for point in report.plan.points if point.is_plan for cut in point.cuts]
    assert any(cut.paged for cut in cuts)
