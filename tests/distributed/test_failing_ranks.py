"""A rank that fails: the others end as in eager, and as soon."""

from __future__ import annotations

import functools
import json
import re
import signal
from pathlib import Path

import pytest

from ebb_tests.ranks.launched import run_on_ranks

PROGRAM = Path(__file__).parent / "faulty.py"
LATE = 10  # seconds; a rank that waits for the timeout of its process group ends a minute later


class Ended:
    """How a rank ended.

    Attributes:
        end: the exit status, and the class of the exception that main raised. After an exception,
            torch's own threads sometimes abort the process as it ends: this is status 1 too.
        at: when, in seconds.
        fault: when it failed, if it did.
        losses: of its steps.
    """

    def __init__(self, done, at):
        self.at, self.told = at, done.stderr
        raised = re.findall(r"^(?:\[rank\d\]: )?([\w.]+Error): ", done.stderr, re.M)
        if raised[-1:] == ["torch.distributed.DistNetworkError"]:  # of the store
            raised = ["RuntimeError"]  # its base class, which gloo raises
        aborted = done.returncode == -signal.SIGABRT and "Traceback" in done.stderr
        self.end = 1 if aborted else done.returncode, raised[-1] if raised else ""
        lines = [line.split() for line in done.stdout.splitlines()]
        self.losses = {int(line[1]): line[2] for line in lines if line[0] == "loss"}
        self.fault = next((float(line[1]) for line in lines if line[0] == "fault"), None)


NO_FAULT = {"fault": None, "phase": None, "step": 0, "ranks": (1,), "steps": 3, "folder": None}
FAULT = ("fault", "phase", "step", "ranks", "steps")


def run_job(strategy, policy, *fault, folder=None, **settings):
    """`fault`: values of FAULT."""
    job = NO_FAULT | dict(zip(FAULT, fault, strict=False))
    job |= {"strategy": strategy, "policy": policy, "folder": folder and str(folder)}
    return [Ended(*ended) for ended in run_on_ranks(str(PROGRAM), json.dumps(job), **settings)]


@functools.cache
def run_plain(strategy, *fault, has_agent=True):
    return run_job(strategy, None, *fault, has_agent=has_agent)


def assert_ends_like(expected, found):
    failed = next(rank.fault for rank in found if rank.fault is not None)
    failed_in_plain = next(rank.fault for rank in expected if rank.fault is not None)
    for rank, other in zip(found, expected, strict=True):
        if rank.fault is None:
            assert rank.end == other.end, rank.told
            assert rank.end[0] != 0
        else:
            assert rank.end[0] == other.end[0], rank.told
        assert rank.at - failed < other.at - failed_in_plain + LATE, rank.told


POINTS = {
    "kill": [("forward", 0), ("loss", 0), ("backward", 0), ("backward", 1)],
    "error": [("forward", 1), ("backward", 1)],
    "memory": [("forward", 1), ("backward", 1)],
    "budget": [("start", 1)],
    "terminate": [("forward", 1), ("backward", 1)],
    "mismatch": [("backward", 1)],
}
MEGATRON = "Megatron, plain"
STRATEGIES = ("DDP", "FSDP2", "TP, sequence", MEGATRON, "experts, functional", "1F1B")
FAST = [
    (MEGATRON, "recompute_collectives", "kill", "loss", 0),  # before the ranks have compared
    (MEGATRON, "recompute_collectives", "kill", "backward", 1),  # in a repeated collective
    (MEGATRON, "recompute_all", "mismatch", "backward", 1),
    ("DDP", "recompute_all", "kill", "forward", 0),
    ("DDP", "recompute_all", "error", "forward", 1),
    ("DDP", "recompute_all", "memory", "forward", 1),
    ("DDP", "recompute_all", "budget", "start", 1),
    ("FSDP2", "recompute_all", "memory", "backward", 1),
    ("experts, functional", "recompute_collectives", "terminate", "backward", 1),
]
ALL = [
    (strategy, policy, fault, *point)
    for strategy in STRATEGIES
    for policy in ("recompute_all", "recompute_collectives")
    for fault, points in POINTS.items()
    for point in points
    # A repeated collective would tell the other rank the wrong value.
    if (policy, fault) != ("recompute_collectives", "mismatch")
]
CASES = [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in FAST)]


@pytest.mark.parametrize(("strategy", "policy", "fault", "phase", "step"), CASES)
def test_other_rank_ends_as_in_eager(strategy, policy, fault, phase, step):
    found = run_job(strategy, policy, fault, phase, step)
    assert_ends_like(run_plain(strategy, fault, phase, step), found)


@pytest.mark.sweep
def test_other_rank_ends_if_the_one_with_the_store_is_killed():
    fault = ("kill", "loss", 0, (0,))
    found = run_job(MEGATRON, "recompute_collectives", *fault, has_agent=False)
    assert_ends_like(run_plain(MEGATRON, *fault, has_agent=False), found)


@pytest.mark.parametrize("has_agent", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("phase", "step"), [("start", 4), ("offer", 0)])
def test_other_rank_ends_if_one_is_killed_while_ranks_agree_on_a_budget(phase, step, has_agent):
    """While ranks measure steps, or when rank 0 has told its measurements and should plan."""
    settings = {"has_agent": has_agent, "EBB_BUDGET": "60%"}
    found = run_job("DDP", None, "kill", phase, step, (0,), 60, **settings)
    assert_ends_like(run_plain("DDP", "kill", "start", 4, (0,), 60, has_agent=has_agent), found)


@functools.cache
def uninterrupted():
    return run_job("FSDP2", None, None, None, 0, (), 6)


@pytest.mark.sweep
@pytest.mark.parametrize("fault", ["kill", "terminate"])
def test_restarted_job_continues_from_its_checkpoint(fault, tmp_path):
    """A job that is terminated saves a checkpoint before it ends."""
    ranks = (1,) if fault == "kill" else (0, 1)
    last, resumed = (3, 2) if fault == "kill" else (4, 4)
    expected = uninterrupted()

    first = run_job("FSDP2", "recompute_all", fault, "backward", 3, ranks, 6, folder=tmp_path)
    second = run_job("FSDP2", "recompute_all", None, None, 0, (), 6, folder=tmp_path, attempt=1)

    for rank in range(2):
        assert list(first[rank].losses) == list(range(last))
        assert list(second[rank].losses) == list(range(resumed, 6))
        assert first[rank].losses | second[rank].losses == expected[rank].losses
        assert second[rank].end == (0, "")
        assert fault == "kill" or first[rank].end == (0, "")
