"""`EBB_BUDGET=auto` in a job of two ranks: when one has no more room, both make one plan."""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ebb import _C, _testing
from ebb._launch import agreeing
from ebb._launch.memory_limit import Limit
from ebb_tests.ranks import budgets
from ebb_tests.ranks.budgets import STEPS, assert_same, of_both
from ebb_tests.ranks.two_ranks import on_two_ranks

LIMIT = 1 << 30
FULL_AFTER = 2  # steps
# The two ranks are full, ask, and measure.
ALL_STEPS = FULL_AFTER + 2 * agreeing._ASKS + STEPS


def train(room, full=(), steps=ALL_STEPS, used=LIMIT - (1 << 16)):
    """As in test_budgets.py. Ranks that are full have so many bytes in use."""

    def before(number):
        if dist.get_rank() in full and number in (FULL_AFTER, FULL_AFTER + 1):
            _testing.pretend_bytes_in_use(LIMIT + 1 if number == FULL_AFTER else used)

    budget = Limit(LIMIT) if room else None
    try:
        return budgets.train(DistributedDataParallel, budget, steps=steps, before=before)
    finally:
        _testing.pretend_bytes_in_use(0)


def check_one_plan(full):
    expected, *_ = train(False)
    found, chosen, told, plans = train(True, full)

    assert_same(found, expected)
    first, second = of_both(chosen)
    assert first == second != {}, told
    assert of_both(plans) == [1, 1], told
    assert ("memory is too small to save all" in told) == (dist.get_rank() == 0), told


@on_two_ranks
def test_one_rank_that_is_full_makes_both_plan():
    check_one_plan(full=(1,))


@on_two_ranks
def test_both_are_full_at_once():
    check_one_plan(full=(0, 1))


@on_two_ranks
def test_nobody_plans_while_all_have_room():
    expected, *_ = train(False)
    before = _C.room_stats()
    found, _, told, plans = train(True)

    assert_same(found, expected)
    assert plans == 0
    assert _C.room_stats() == before
    assert "measured" not in told


@on_two_ranks
def test_the_rank_that_has_least_decides():
    """Rank 1 is full, and has less than what a step needs; rank 0 has all it needs."""
    *_, chosen, told, plans = train(True, full=(1,), used=LIMIT - 1)

    first, second = of_both(chosen)
    assert first == second
    assert of_both(plans) == [1, 1], told
    if dist.get_rank() == 0:
        assert "too small" in told or "that recompute everything" in told, told


@on_two_ranks
def test_a_rank_that_sees_it_late_gets_the_same_plan():
    """Rank 0 does not ask for some steps."""
    begins = agreeing.Ranks.begins
    late = 3 * agreeing._ASKS

    def begin_late(self, number, is_full):
        return (number >= late or is_full) and begins(self, number, is_full)

    if dist.get_rank() == 0:
        agreeing.Ranks.begins = begin_late
    try:
        expected, *_ = train(False, steps=ALL_STEPS + 32)
        found, chosen, told, plans = train(True, (1,), steps=ALL_STEPS + 32)
    finally:
        agreeing.Ranks.begins = begins

    assert_same(found, expected)
    first, second = of_both(chosen)
    assert first == second != {}, told
    assert of_both(plans) == [1, 1], told
