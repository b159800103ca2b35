"""A budget in a job of two ranks: one plan for both, the bits of eager, nobody waits for long."""

from __future__ import annotations

import contextlib
import io
import time

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

STEPS = agreeing.MEETINGS[0] + 2
WIDTH = 16


def policies(model):
    """Of the regions under a plan."""
    return {
        name: inner_marks.region.policy.to_toml()
        for name, inner in model.named_modules()
        if (inner_marks := marks_of(inner)) is not None
        and inner_marks.region is not None
        and inner_marks.region.policy is not None
    }


def train(wrap=lambda model: model, budget=None, rows=lambda rank: 64, steps=STEPS):
    """Losses and parameters; the policies at the end; what was told; how many plans were made."""
    planned = None
    told = io.StringIO()
    torch.manual_seed(3)
    with contextlib.redirect_stderr(told):
        if budget is not None:
            planned = takeover.install_budget(budget, str(budget), ())
        try:
            model = wrap(Net(4, WIDTH))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            found = [step(model, optimizer, number, rows) for number in range(steps)]
        finally:
            takeover.remove()
    return found, policies(model), told.getvalue(), planned._measured if planned else 0


def step(model, optimizer, number, rows):
    torch.manual_seed(100 * number + dist.get_rank())
    optimizer.zero_grad()
    loss = model(torch.randn(rows(dist.get_rank()), WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    bits = [plain(loss), *(plain(one) for one in model.parameters())]
    return [one.numpy().tobytes() for one in bits]  # tensors that are kept count for the budget


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


@on_two_ranks
def test_a_rank_that_trains_nothing_is_not_waited_for():
    begin = time.monotonic()
    if dist.get_rank() == 1:
        *_, plans = train(budget=0.7)
        assert plans == 1
    else:
        next(agreeing._sessions)  # later tests meet under the same number
    dist.barrier()

    assert time.monotonic() - begin < agreeing._WAIT.total_seconds()


@on_two_ranks
def test_stages_of_a_pipeline_plan_for_themselves():
    def stage(model):
        model.layers = model.layers[: 2 + 2 * dist.get_rank()]
        return model

    expected, *_ = train(stage)
    found, chosen, _, plans = train(stage, 0.7)

    assert_same(found, expected)
    first, second = of_both(chosen)
    assert first != second
    assert plans == 1


@on_two_ranks
def test_a_rank_that_leaves_is_waited_for_once():
    waits = agreeing._WAIT
    agreeing._WAIT = waits / 30
    try:
        steps = STEPS if dist.get_rank() == 0 else 5
        *_, plans = train(budget=0.7, steps=steps)
    finally:
        agreeing._WAIT = waits
    dist.barrier()

    assert plans == (dist.get_rank() == 0)


@on_two_ranks
def test_a_rank_whose_steps_differ_keeps_no_other_from_its_plan():
    """Rank 1 has no plan at the last meeting."""
    before = agreeing.MEETINGS
    agreeing.MEETINGS = (16, 20)
    try:
        unsteady = dist.get_rank() == 1

        def shortened(model):
            if unsteady:
                whole, calls = model.layers, []

                def forward(_module, _inputs):
                    calls.append(1)
                    model.layers = whole[: 4 if len(calls) < 3 else 1 + len(calls) % 3]

                model.register_forward_pre_hook(forward)
            return model

        *_, plans = train(shortened, 0.7, steps=23)
    finally:
        agreeing.MEETINGS = before

    assert of_both(plans) == [1, 0]


@on_two_ranks
def test_each_rank_reports_the_one_plan():
    with ebb.record_reports():
        train(DistributedDataParallel, 0.7, steps=STEPS + len(checking._ORDER))
        plan = ebb.report().plan
    told = plan.to_dict()

    assert abs(plan.deviation["peak"]) < 0.05
    assert len(plan.points) > 3
    del told["measured"], told["deviation"]  # of each rank itself
    first, second = of_both(told)
    assert first == second, [(k, first[k], second[k]) for k in first if first[k] != second[k]]
