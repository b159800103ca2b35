"""A budget on two ranks: one plan, eager's bits, and no rank waits for another."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ebb
from ebb._launch import agreeing, checking
from ebb_tests.ranks.budgets import STEPS, assert_same, of_both, patience, sharded, together, train
from ebb_tests.ranks.two_ranks import on_two_ranks

PAUSE = 6  # seconds


def check_one_plan(wrap, budget=0.7):
    expected, *_ = train(wrap)
    found, chosen, told, plans = train(wrap, budget)

    assert_same(found, expected)
    first, second = of_both(chosen)
    assert first == second != {}
    assert plans == 1
    assert ("; predicted peak " in told) == (dist.get_rank() == 0), told


@on_two_ranks
def test_data_parallel():
    check_one_plan(DistributedDataParallel)


@on_two_ranks
def test_fully_sharded():
    check_one_plan(sharded)


@on_two_ranks
def test_the_rank_that_needs_most_decides():
    def rows(rank):
        return 64 if rank == 0 else 512

    expected, *_ = train(DistributedDataParallel, rows=rows)
    _, alone, *_ = train(DistributedDataParallel, 1 << 18, rows=lambda _: 64)
    found, chosen, *_ = train(DistributedDataParallel, 1 << 18, rows=rows)

    assert_same(found, expected)
    first, second = of_both(chosen)
    assert first == second, [(k, first[k], second[k]) for k in first if first[k] != second[k]]
    assert len(chosen) > len(alone)


@on_two_ranks
def test_a_rank_with_a_higher_budget_is_told_which_budget_counts():
    budget = 0.9 if dist.get_rank() == 0 else 0.7

    _, chosen, told, _ = train(DistributedDataParallel, budget)

    line = "EBB_BUDGET=a budget: another rank has a lower budget, 70%; the plan keeps to the lowest"
    assert told.count(line) == (dist.get_rank() == 0), told
    first, second = of_both(chosen)
    assert first == second != {}


def seconds_of(train):
    begin = time.monotonic()
    found = train()
    return time.monotonic() - begin, found


@on_two_ranks
def test_no_rank_waits_for_one_that_trains_nothing():
    if dist.get_rank() == 1:
        seconds, (*_, plans) = seconds_of(lambda: train(budget=0.7))
        assert plans == 1
        assert seconds < PAUSE
    else:
        next(agreeing._sessions)  # session numbers of both ranks stay equal
    dist.barrier()


@pytest.mark.sweep
@on_two_ranks
def test_no_rank_waits_for_one_that_is_busy():
    """Rank 0 pauses before each of its steps. Rank 1 trains on, and then plans alone."""
    is_busy = dist.get_rank() == 0

    def paused(model):
        model.register_forward_pre_hook(lambda *_: time.sleep(PAUSE / STEPS if is_busy else 0))
        return model

    with patience(8):
        seconds, (*_, told, plans) = seconds_of(lambda: train(paused, 0.7, steps=2 * STEPS))

    assert plans == 1, told
    assert (seconds > 2 * PAUSE) == is_busy


@on_two_ranks
def test_a_rank_that_skips_steps_of_its_optimizer_gets_the_same_plan():
    """For example, a rank whose gradients overflow counts fewer steps."""

    def skips(optimizer):
        if dist.get_rank() == 1:
            calls, real = [], optimizer.step

            def step():
                calls.append(1)
                return None if len(calls) == 3 else real()

            optimizer.step = step

    _, chosen, told, plans = train(DistributedDataParallel, 0.7, prepare=skips)

    first, second = of_both(chosen)
    assert first == second != {}
    assert of_both(plans) == [1, 1], told


@on_two_ranks
def test_a_second_model_on_one_rank_stops_no_other():
    seconds, (*_, plans) = seconds_of(lambda: train(budget=0.7, prepare=together))
    if dist.get_rank() == 1:
        *_, plans = train(budget=0.7)
    else:
        next(agreeing._sessions)

    assert seconds < PAUSE
    assert plans == 1
    dist.barrier()


@on_two_ranks
def test_a_rank_that_leaves_before_its_plan_stops_no_other():
    """Rank 0 ends its training before it has a plan; rank 1 then plans alone."""
    with patience(4):
        *_, plans = train(budget=0.7, steps=3 * STEPS if dist.get_rank() == 1 else 5)
    dist.barrier()

    assert plans == dist.get_rank()


@on_two_ranks
def test_stages_of_a_pipeline_plan_for_themselves():
    def stage(model):
        model.layers = model.layers[: 2 + 2 * dist.get_rank()]
        return model

    expected, *_ = train(stage)
    found, chosen, _, plans = train(stage, 0.7, prepare=together)

    assert_same(found, expected)
    first, second = of_both(chosen)
    assert first != second
    assert plans == 1


@on_two_ranks
def test_a_rank_whose_steps_differ_keeps_no_other_from_its_plan():
    """Rank 1 never has an offer."""

    def shortened(model):
        if dist.get_rank() == 1:
            whole, calls = model.layers, []

            def forward(_module, _inputs):
                calls.append(1)
                model.layers = whole[: 4 if len(calls) < 3 else 1 + len(calls) % 3]

            model.register_forward_pre_hook(forward)
        return model

    with patience(4):
        *_, plans = train(shortened, 0.7, steps=23)

    assert of_both(plans) == [1, 0]


@on_two_ranks
def test_each_rank_reports_the_one_plan():
    with ebb.record_reports():
        train(DistributedDataParallel, 0.7, steps=STEPS + len(checking._ORDER))
        plan = ebb.report().plan
    told = plan.to_dict()

    assert abs(plan.deviation["peak"]) < 0.05
    assert len(plan.points) > 3
    del told["measured"], told["deviation"]  # each rank's own
    first, second = of_both(told)
    assert first == second, [(k, first[k], second[k]) for k in first if first[k] != second[k]]
