"""Random programs give the gradients of plain eager, bit for bit, or raise as eager raises.

What is compared: every live tensor, the inputs, their gradients and the random states, after the
forward and at the end; the gradients that autograd returns; the type of each exception. ebb alone
may raise only to refuse: in a backward, after a write to what an ended region may have to read.

On the test device three streams and two devices take turns, kernels run late, and a race that eager
does not have is a difference.

Where allocations fail, what ebb could try again gives the same all the same.

EBB_TEST_PROGRAMS=n runs n programs in place of 2,000, EBB_TEST_SEED=n other ones than CI's,
EBB_TEST_REGIONS=n has n outermost regions in each, one after the other:

    EBB_TEST_SEED=1 EBB_TEST_PROGRAMS=100000 pytest -k give_what_eager_gives test_random_programs.py
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

from ebb_tests.programs.compared_programs import run_random_programs


def check_share(share: int, **options: Any) -> tuple[Counter[str], int]:
    """Runs one in `share` of the programs that EBB_TEST_PROGRAMS asks for. Returns how many."""
    count = int(os.environ.get("EBB_TEST_PROGRAMS", "2000")) // share
    base = os.environ.get("EBB_TEST_SEED")
    options.setdefault("regions", int(os.environ.get("EBB_TEST_REGIONS", "1")))
    came_to = run_random_programs(count, None if base is None else int(base), **options)
    assert came_to.total() >= count
    return came_to, count


def assert_not_vacuous(came_to: Counter[str], count: int) -> None:
    """Hypothesis draws constants of ebb's source too, and variations of programs that it has drawn:
    so numbers of rare outcomes change with the source, and come in groups.
    """
    assert came_to.total() >= count
    assert came_to["replayed"] > 0.5 * count
    assert count // 2_000 <= came_to["overwritten"] < 0.05 * count
    assert came_to["refused"] < 0.01 * count
    assert 0 < came_to["error"] < 0.3 * count
    assert came_to["eager differs"] < 0.01 * count


@pytest.mark.parametrize("share", [4, pytest.param(1, marks=pytest.mark.sweep)])
def test_random_programs_give_what_eager_gives(share):
    assert_not_vacuous(*check_share(share))


@pytest.mark.sweep
def test_random_programs_in_several_regions():
    came_to, count = check_share(8, regions=4)

    assert came_to["replayed"] > 0.4 * count
    assert came_to["overwritten"] < 0.05 * count
    # A later region, too, may write what an ended one has to read.
    assert came_to["refused"] < 0.03 * count


@pytest.mark.sweep
@pytest.mark.parametrize("under", ["plain", "offload prompt", "ahead"])
def test_random_programs_whose_allocations_fail(under):
    """Or for which ebb is only asked for memory. If no region has anything to give up, the program
    raises, and has given what eager gives so far.
    """
    came_to, count = check_share(1 if under == "plain" else 4, engine=under, failing=True)

    assert came_to["failed"] + came_to["failed and replayed"] > 0.4 * count
    assert came_to["failed and replayed"] > 0.1 * count
    assert came_to["out of memory"] < 0.4 * count


@pytest.mark.sweep
@pytest.mark.parametrize("under", ["device, offload", "device, page"])
def test_random_programs_on_the_test_device(under):
    came_to, count = check_share(4, engine=under, device="late")

    assert came_to["replayed"] > 0.1 * count
    assert came_to["error"] < 0.3 * count
    assert came_to["eager races"] < 0.05 * count
    assert came_to["eager differs"] < 0.01 * count


@pytest.mark.slow
@pytest.mark.parametrize("base", range(5))
def test_more_random_programs_give_what_eager_gives(base):
    assert_not_vacuous(run_random_programs(4_000, base), 4_000)
