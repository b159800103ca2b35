"""Jobs under EBB_BUDGET, as torch's CUDA allocator counts."""

from __future__ import annotations

import functools
import json

import pytest

from ebb_tests import dry_cuda

MIB = 1 << 20
SEGMENT = 20 * MIB  # the allocator reserves so many bytes at a time
STEPS = 14  # eight are profiled


@functools.cache
def rows_of(*arguments: object, **variables: str) -> list[dict[str, int]]:
    done = dry_cuda.run("training_job.py", *arguments, variables=variables)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def reserved_ratio(*arguments: object) -> float:
    """How many bytes eager reserves for each that it allocates."""
    last = rows_of(STEPS, *arguments)[-1]
    return last["reserved_peak"] / last["allocated_peak"]


@pytest.mark.parametrize("budget", ["80%", "60%", "40%"])
def test_job_under_a_budget_reserves_no_more_than_eager_for_what_it_allocates(budget):
    rows = rows_of(STEPS, "GPT", 16, EBB_BUDGET=budget, EBB_STRICT="1")

    allowed = 1.1 * reserved_ratio("GPT", 16) * rows[-1]["allocated_peak"] + SEGMENT
    assert max(row["reserved_peak"] for row in rows) <= allowed


def test_measuring_copies_keeps_no_memory():
    """Of a model of 3 MiB, which nothing but the probe of the link could make large."""
    rows = rows_of(STEPS, "attention", 1, EBB_BUDGET="60%")
    eager = rows_of(STEPS, "attention", 1)

    assert rows[-1]["reserved"] <= 1.1 * eager[-1]["reserved"]


@pytest.mark.parametrize("budget", ["60%", "250MiB", "auto:300MiB"])
def test_peak_statistics_are_never_reset(budget):
    rows = rows_of(STEPS, EBB_BUDGET=budget)

    for name in ("allocated_peak", "reserved_peak"):
        peaks = [row[name] for row in rows]
        assert peaks == sorted(peaks)


@pytest.mark.parametrize("budget", [230, 270, 330])
def test_job_stays_below_a_budget_in_bytes(budget):
    rows = rows_of(STEPS, EBB_BUDGET=f"{budget}MiB", EBB_STRICT="1")

    assert rows[-1]["allocated_peak"] <= 1.01 * budget * MIB


@functools.cache
def least_device(kind: str, **variables: str) -> int:
    """The smallest device on which a job ends, in steps of 10 MiB; bytes."""

    def lives(mebibytes: int) -> bool:
        done = dry_cuda.run(
            "training_job.py", STEPS, kind, 8, variables=variables, memory=mebibytes * MIB
        )
        assert done.returncode == 0 or "CUDA out of memory" in done.stderr, done.stderr[-3000:]
        return done.returncode == 0

    low, high = 0, 640  # it dies on the first, and lives on the second
    assert lives(high)
    while high - low > 10:
        middle = (low + high) // 20 * 10
        low, high = (low, middle) if lives(middle) else (middle, high)
    return high * MIB


@pytest.mark.parametrize("kind", ["GPT", "MLP", "residual"])
def test_auto_lives_on_each_device_on_which_recomputing_everything_lives(kind):
    """The allocator asks for memory wherever it runs short: in backward and the optimizer too."""
    assert least_device(kind, EBB_BUDGET="auto") <= 1.05 * least_device(kind, EBB="1")


def test_auto_lives_where_eager_dies():
    least = least_device("GPT", EBB_BUDGET="auto")

    assert least < 0.6 * least_device("GPT")


def test_auto_launches_what_eager_launches_while_memory_suffices():
    """From the second step on: the first one shows ebb how much the allocator takes at a time."""
    eager, auto = rows_of(4), rows_of(4, EBB_BUDGET="auto")

    assert auto[0]["launches"] > eager[0]["launches"]
    assert [row["launches"] for row in auto[1:]] == [row["launches"] for row in eager[1:]]
