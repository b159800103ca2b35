"""A budget on two ranks: one plan, eager's bits, and no rank waits for another."""

from __future__ import annotations

import contextlib
import io
import time

import pytest
import torch
import torch.distributed as dist
from comparing import plain
from models import Net
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from two_ranks import on_two_ranks

import ebb
from ebb._launch import agreeing, checking, takeover
from ebb._region.modules import marks_of

STEPS = 18  # more than ebb measures
WIDTH = 16
PAUSE = 6  # seconds


def policies(model):
    """The policies of a model's regions under a plan, by module name."""
    return {
        name: inner_marks.region.policy.to_toml()
        for name, inner in model.named_modules()
        if (inner_marks := marks_of(inner)) is not None
        and inner_marks.region is not None
        and inner_marks.region.policy is not None
    }


def train(
    wrap=lambda model: model,
    budget=None,
    rows=lambda rank: 64,
    steps=STEPS,
    prepare=lambda optimizer: None,
    before=lambda number: None,
):
    """Returns losses and parameters, the last policies, stderr, and the number of plans made."""
    planned = None
    told = io.StringIO()
    torch.manual_seed(3)
    with contextlib.redirect_stderr(told):
        if budget is not None:
            planned = takeover.install_budget(budget, "a budget", ())
        try:
            model = wrap(Net(4, WIDTH))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            prepare(optimizer)
            found = []
            for number in range(steps):
                before(number)
                found.append(step(model, optimizer, number, rows))
        finally:
            takeover.remove()
    return found, policies(model), told.getvalue(), planned.job.plans if planned else 0


@contextlib.contextmanager
def patience(seconds):
    """How long a rank waits for others."""
    before = agreeing._PATIENCE
    agreeing._PATIENCE = seconds
    try:
        yield
    finally:
        agreeing._PATIENCE = before


def together(optimizer):
    """From now on no rank is a step ahead of the other."""
    real = optimizer.step

    def step():
        dist.barrier()
        return real()

    optimizer.step = step


def step(model, optimizer, number, rows):
    torch.manual_seed(100 * number + dist.get_rank())
    optimizer.zero_grad()
    loss = model(torch.randn(rows(dist.get_rank()), WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    bits = [plain(loss), *(plain(one) for one in model.parameters())]
    return [one.numpy().tobytes() for one in bits]  # kept tensors would count in the budget


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one == other


def of_both(value):
    values = [None, None]
    dist.all_gather_object(values, value)
    return values


def sharded(model):
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


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
