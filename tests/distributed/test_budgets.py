"""A budget on two ranks: one plan, eager's bits, and no rank waits for another.

The plan is measured from the start, or from when a rank has no more room (`EBB_BUDGET=auto`), or
comes from files.
"""

from __future__ import annotations

import os
import tempfile
import time
from unittest import mock

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ebb
from ebb import _C, _testing
from ebb._launch import agreeing, checking, taken
from ebb._launch.memory_limit import Limit
from ebb_tests.ranks.budgets import (
    STEPS,
    assert_one_plan,
    assert_told_on_first,
    in_step,
    of_both,
    patience,
    sharded,
    stage,
    train,
)
from ebb_tests.ranks.collectives import rank
from ebb_tests.ranks.two_ranks import on_two_ranks

PAUSE = 6  # seconds


def skip_a_step(optimizer):
    """On rank 1, as if its gradients overflowed."""
    if rank() == 1:
        calls, real = [], optimizer.step

        def step():
            calls.append(1)
            return None if len(calls) == 3 else real()

        optimizer.step = step


@pytest.mark.parametrize(
    ("wrap", "settings"),
    [
        (DistributedDataParallel, {}),
        (sharded, {}),
        (DistributedDataParallel, {"prepare": skip_a_step}),
    ],
)
@on_two_ranks
def test_ranks_get_one_plan(wrap, settings):
    expected = train(wrap, **settings)
    found = train(wrap, 0.7, **settings)

    assert_one_plan(found, expected)
    assert_told_on_first("; predicted peak ", found.told)


@on_two_ranks
def test_rank_that_needs_most_decides():
    def rows(rank):
        return 64 if rank == 0 else 512

    expected = train(DistributedDataParallel, rows=rows)
    alone = train(DistributedDataParallel, 1 << 18, rows=lambda _: 64)
    found = train(DistributedDataParallel, 1 << 18, rows=rows)

    assert_one_plan(found, expected)
    assert len(found.policies) > len(alone.policies)


@on_two_ranks
def test_lowest_budget_counts_and_ranks_with_a_higher_one_are_told():
    found = train(DistributedDataParallel, 0.9 if rank() == 0 else 0.7)

    line = "EBB_BUDGET=a budget: another rank has a lower budget, 70%; the plan keeps to the lowest"
    assert found.told.count(line) == (rank() == 0), found.told
    assert_one_plan(found)


def seconds_of(train):
    begin = time.monotonic()
    found = train()
    return time.monotonic() - begin, found


@on_two_ranks
def test_no_rank_waits_for_one_that_trains_nothing():
    if rank() == 1:
        seconds, found = seconds_of(lambda: train(budget=0.7))
        assert found.plans == 1
        assert seconds < PAUSE
    else:
        next(agreeing._sessions)  # session numbers of both ranks stay equal
    dist.barrier()


@pytest.mark.sweep
@on_two_ranks
def test_no_rank_waits_for_one_that_is_busy():
    """Rank 0 pauses before each of its steps. Rank 1 trains on, and then plans alone."""
    is_busy = rank() == 0

    def paused(model):
        model.register_forward_pre_hook(lambda *_: time.sleep(PAUSE / STEPS if is_busy else 0))
        return model

    with patience(8):
        seconds, found = seconds_of(lambda: train(paused, 0.7, steps=2 * STEPS))

    assert found.plans == 1, found.told
    assert (seconds > 2 * PAUSE) == is_busy


@on_two_ranks
def test_no_rank_waits_for_another_ones_second_model():
    seconds, found = seconds_of(lambda: train(budget=0.7, prepare=in_step))
    second = found
    if rank() == 1:
        second = train(budget=0.7)
    else:
        next(agreeing._sessions)

    assert seconds < PAUSE
    assert second.plans == 1
    dist.barrier()


@on_two_ranks
def test_rank_plans_alone_after_others_have_ended():
    """Rank 0 ends its training before it has a plan."""
    with patience(4):
        found = train(budget=0.7, steps=3 * STEPS if rank() == 1 else 5)
    dist.barrier()

    assert found.plans == rank()


@on_two_ranks
def test_rank_plans_alone_if_steps_of_another_differ():
    """Rank 1 never has an offer."""

    def shortened(model):
        if rank() == 1:
            whole, calls = model.layers, []

            def forward(_module, _inputs):
                calls.append(1)
                model.layers = whole[: 4 if len(calls) < 3 else 1 + len(calls) % 3]

            model.register_forward_pre_hook(forward)
        return model

    with patience(4):
        found = train(shortened, 0.7, steps=23)

    assert of_both(found.plans) == [1, 0]


@on_two_ranks
def test_stages_of_a_pipeline_plan_for_themselves():
    expected = train(stage)
    found = train(stage, 0.7, prepare=in_step)

    assert found.steps == expected.steps
    first, second = of_both(found.policies)
    assert first != second
    assert found.plans == 1


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


# EBB_BUDGET=auto: ranks plan when one of them has no more room

LIMIT = 1 << 30
FULL_AFTER = 2  # steps
# The two ranks are full, ask, and measure.
ALL_STEPS = FULL_AFTER + 2 * agreeing._ASKS + STEPS


def train_until_full(full, steps=ALL_STEPS, used=LIMIT - (1 << 16)):
    """Ranks in `full` reach the limit, and have so many bytes in use then."""

    def before(number):
        if rank() in full and number in (FULL_AFTER, FULL_AFTER + 1):
            _testing.pretend_bytes_in_use(LIMIT + 1 if number == FULL_AFTER else used)

    try:
        return train(DistributedDataParallel, Limit(LIMIT), steps=steps, before=before)
    finally:
        _testing.pretend_bytes_in_use(0)


@pytest.mark.parametrize("full", [(1,), (0, 1)])
@on_two_ranks
def test_full_ranks_make_both_plan(full):
    expected = train(DistributedDataParallel, steps=ALL_STEPS)
    found = train_until_full(full)

    assert_one_plan(found, expected)
    assert_told_on_first("memory is too small to save all", found.told)


@on_two_ranks
def test_no_rank_plans_while_all_have_room():
    expected = train(DistributedDataParallel, steps=ALL_STEPS)
    before = _C.room_stats()
    found = train_until_full(())

    assert found.steps == expected.steps
    assert found.plans == 0
    assert _C.room_stats() == before
    assert "measured" not in found.told


@on_two_ranks
def test_full_rank_with_least_room_decides():
    """Rank 1 is full, and has less than what a step needs; rank 0 has all it needs."""
    found = train_until_full((1,), used=LIMIT - 1)

    assert_one_plan(found)
    if rank() == 0:
        assert "too small" in found.told or "that recompute everything" in found.told, found.told


@on_two_ranks
def test_rank_that_asks_late_gets_the_same_plan():
    """Rank 0 does not ask for some steps."""
    begins = agreeing.Ranks.begins
    late = 3 * agreeing._ASKS

    def begin_late(self, number, is_full):
        return (number >= late or is_full) and begins(self, number, is_full)

    expected = train(DistributedDataParallel, steps=ALL_STEPS + 32)
    with pytest.MonkeyPatch.context() as monkeypatch:
        if rank() == 0:
            monkeypatch.setattr(agreeing.Ranks, "begins", begin_late)
        found = train_until_full((1,), steps=ALL_STEPS + 32)

    assert_one_plan(found, expected)


# Plans from files: all ranks take them, or none does


def folder():
    """A folder of both ranks."""
    return of_both(tempfile.mkdtemp() if rank() == 0 else None)[0]


def start(file, wrap=DistributedDataParallel, **settings):
    """As `train`, and how often this rank has taken a plan. Plans made do not include these.

    The other rank has read and written its file too when this returns.
    """
    begin = taken.Taken.begin
    with mock.patch.object(taken.Taken, "begin", autospec=True, side_effect=begin) as begun:
        found = train(wrap, 0.7, file=file, **settings)
    phases = [call.args[0] for call in begun.call_args_list]
    assert all(phase.job.ranks is None for phase in phases)
    dist.barrier()
    return found, len(phases)


def text_of(path):
    with open(path) as file:
        return file.read()


@pytest.mark.parametrize(
    ("wrap", "files", "settings"),
    [
        (DistributedDataParallel, ["plan.toml"], {}),
        (sharded, ["plan.toml"], {}),
        (stage, ["plan.rank1.toml", "plan.toml"], {"prepare": in_step}),
    ],
)
@on_two_ranks
def test_restart_takes_plans_from_files(wrap, files, settings):
    expected = train(wrap)
    path = os.path.join(folder(), "plan.toml")
    first, _ = start(path, wrap, **settings)
    assert first.steps == expected.steps
    assert sorted(os.listdir(os.path.dirname(path))) == files

    found, times = start(path, wrap, **settings)

    assert (found.plans, times) == (0, 1), found.told
    assert found.policies == first.policies != {}
    assert found.steps == expected.steps
    assert_told_on_first("the plan from plan.toml, without profiling", found.told)
    assert "profiles" not in found.told


def missing_on_second(shared):
    start(f"{shared}/plan.toml")
    return [f"{shared}/plan.toml", f"{shared}/none.toml"]


def missing_on_first(shared):
    start(f"{shared}/plan.toml")
    return [f"{shared}/none.toml", f"{shared}/plan.toml"]


def shared_by_both(shared):
    start(f"{shared}/plan.toml")
    return [f"{shared}/plan.toml"] * 2


def damaged_on_second(shared):
    start(f"{shared}/plan.toml")
    if rank() == 1:
        with open(f"{shared}/other.toml", "w") as file:
            file.write(text_of(f"{shared}/plan.toml")[:-40])
    return [f"{shared}/plan.toml", f"{shared}/other.toml"]


def of_different_starts(shared):
    """Each node has a folder of its own."""
    paths = [os.path.join(shared, name, "plan.toml") for name in "ab"]
    for path in paths:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        start(path)
    assert text_of(paths[0]) != text_of(paths[1])  # their times differ
    return paths


REFUSED_FILES = {
    missing_on_second: "plan.toml: rank 1: there is no file; ebb profiles steps again",
    missing_on_first: "ebb profiles 6 steps",
    shared_by_both: "plan.toml: rank 1: the inputs of the first block were layers.0: "
    "float32[64, 16], and are layers.0: float32[512, 16]; ebb profiles steps again",
    damaged_on_second: "plan.toml: rank 1: it ",
    of_different_starts: ": files of ranks have different plans; ebb profiles steps again",
}


@pytest.mark.parametrize("files", REFUSED_FILES)
@on_two_ranks
def test_both_ranks_measure_if_one_cannot_take_its_file(files):
    def rows(rank):
        return 512 if rank == 1 and files is shared_by_both else 64

    expected = train(DistributedDataParallel, rows=rows, steps=2 * STEPS)
    path = files(folder())[rank()]
    found, _ = start(path, rows=rows, steps=2 * STEPS)

    assert_one_plan(found, expected)
    assert_told_on_first(REFUSED_FILES[files], found.told)
    assert files is not missing_on_first or "none.toml" in os.listdir(os.path.dirname(path))


@on_two_ranks
def test_ranks_measure_if_one_stage_has_changed():
    def other(model):
        model.layers = model.layers[: 2 + rank()]
        return model

    path = os.path.join(folder(), "plan.toml")
    start(path, stage, prepare=in_step)
    expected = train(other)

    found, _ = start(path, other, prepare=in_step)

    assert found.plans == 1, found.told
    assert found.steps == expected.steps
    assert_told_on_first("rank 1: the model has changed", found.told)


@on_two_ranks
def test_rank_takes_its_plan_if_another_trains_nothing():
    path = os.path.join(folder(), "plan.toml")
    start(path, lambda model: model, prepare=in_step)
    if rank() == 1:
        with patience(4):
            found, times = start(path, lambda model: model)
        assert (found.plans, times) == (0, 1), found.told
    else:
        next(agreeing._sessions)  # session numbers of both ranks stay equal
        dist.barrier()
