"""Plans that two ranks take from files: all ranks take them, or none does."""

from __future__ import annotations

import os
import tempfile

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ebb._launch import agreeing, taken
from ebb_tests.ranks.budgets import STEPS, assert_same, of_both, patience, sharded, together, train
from ebb_tests.ranks.two_ranks import on_two_ranks


def folder():
    """A folder of both ranks."""
    return of_both(tempfile.mkdtemp() if dist.get_rank() == 0 else None)[0]


def start(file, wrap=DistributedDataParallel, budget=0.7, **settings):
    """As `train`, and how often this rank has taken a plan. Plans made do not include these."""
    phases = []
    begin = taken.Taken.begin

    def began(phase):
        phases.append(phase)
        begin(phase)

    taken.Taken.begin = began
    try:
        found, chosen, told, plans = train(wrap, budget, file=file, **settings)
    finally:
        taken.Taken.begin = begin
    assert all(phase.job.ranks is None for phase in phases)
    return found, chosen, told, plans, len(phases)


def text_of(path):
    with open(path) as file:
        return file.read()


def check_restart(wrap, files, **settings):
    expected, *_ = train(wrap)
    path = os.path.join(folder(), "plan.toml")
    found, chosen, *_ = start(path, wrap, **settings)
    assert_same(found, expected)
    dist.barrier()
    assert sorted(os.listdir(os.path.dirname(path))) == files

    found, again, told, plans, times = start(path, wrap, **settings)

    assert (plans, times) == (0, 1), told
    assert again == chosen != {}
    assert_same(found, expected)
    assert ("the plan from plan.toml, without profiling" in told) == (dist.get_rank() == 0)
    assert "profiles" not in told


@on_two_ranks
def test_data_parallel():
    check_restart(DistributedDataParallel, ["plan.toml"])


@on_two_ranks
def test_fully_sharded():
    check_restart(sharded, ["plan.toml"])


def stage(model):
    model.layers = model.layers[: 2 + 2 * dist.get_rank()]
    return model


@on_two_ranks
def test_stages_of_a_pipeline_have_files_of_their_own():
    check_restart(stage, ["plan.rank1.toml", "plan.toml"], prepare=together)


def check_measured(paths, why, wrap=DistributedDataParallel, **settings):
    """Both ranks measure, and have one plan then."""
    expected, *_ = train(wrap, rows=settings.get("rows", lambda rank: 64), steps=2 * STEPS)
    path = paths[dist.get_rank()]
    found, chosen, told, plans, _ = start(path, wrap, steps=2 * STEPS, **settings)
    assert plans == 1, told
    assert (why in told) == (dist.get_rank() == 0), told
    first, second = of_both(chosen)
    assert first == second
    assert_same(found, expected)
    return chosen


@on_two_ranks
def test_a_rank_whose_file_is_missing():
    shared = folder()
    paths = [os.path.join(shared, "plan.toml"), os.path.join(shared, "none.toml")]
    start(paths[0])
    dist.barrier()
    check_measured(paths, "plan.toml: rank 1: there is no file; ebb profiles steps again")


@on_two_ranks
def test_the_first_rank_whose_file_is_missing():
    shared = folder()
    paths = [os.path.join(shared, "none.toml"), os.path.join(shared, "plan.toml")]
    start(paths[1])
    dist.barrier()
    check_measured(paths, "ebb profiles 6 steps")
    dist.barrier()
    assert "none.toml" in os.listdir(shared)


@on_two_ranks
def test_a_rank_whose_batch_has_another_size():
    path = os.path.join(folder(), "plan.toml")
    start(path)
    dist.barrier()
    check_measured(
        [path] * 2,
        "plan.toml: rank 1: the inputs of the first block were layers.0: float32[64, 16], and are "
        "layers.0: float32[512, 16]; ebb profiles steps again",
        rows=lambda rank: 512 if rank == 1 else 64,
    )


@on_two_ranks
def test_a_rank_whose_file_is_damaged():
    shared = folder()
    path = os.path.join(shared, "plan.toml")
    other = os.path.join(shared, "other.toml")
    start(path)
    dist.barrier()
    if dist.get_rank() == 1:
        with open(other, "w") as file:
            file.write(text_of(path)[:-40])
    check_measured([path, other], "plan.toml: rank 1: it ")


@on_two_ranks
def test_ranks_with_different_plans_for_one_model():
    """Each node has a folder of its own, with files of different starts."""
    shared = folder()
    paths = [os.path.join(shared, name, "plan.toml") for name in "ab"]
    if dist.get_rank() == 0:
        for path in paths:
            os.mkdir(os.path.dirname(path))
    dist.barrier()
    for path in paths:
        start(path)
        dist.barrier()
    assert text_of(paths[0]) != text_of(paths[1])  # their times differ

    check_measured(paths, ": files of ranks have different plans; ebb profiles steps again")


@on_two_ranks
def test_a_stage_that_has_changed():
    def other(model):
        model.layers = model.layers[: 2 + dist.get_rank()]
        return model

    path = os.path.join(folder(), "plan.toml")
    start(path, stage, prepare=together)
    dist.barrier()
    expected, *_ = train(other)

    found, _, told, plans, _ = start(path, other, prepare=together)

    assert plans == 1, told
    assert_same(found, expected)
    assert ("rank 1: the model has changed" in told) == (dist.get_rank() == 0), told


@on_two_ranks
def test_a_rank_that_trains_nothing_keeps_no_other_from_its_plan():
    def alone(model):
        return model

    path = os.path.join(folder(), "plan.toml")
    start(path, alone, prepare=together)
    dist.barrier()
    if dist.get_rank() == 1:
        with patience(4):
            *_, told, plans, times = start(path, alone)
        assert (plans, times) == (0, 1), told
    else:
        next(agreeing._sessions)  # session numbers of both ranks stay equal
    dist.barrier()
