"""RECOMPUTE_EACH_TIME, alone and among other decisions: gradients have the bits of eager."""

from __future__ import annotations

import pytest
from exactness import (
    assert_rules_hold_in_verify_mode,
    assert_tests_of_exactness_pass,
    run_random_programs,
)

WITH = {
    "alone": {},
    "ahead at once": {"EBB_TEST_AHEAD": "at once"},
    "offload": {"EBB_TEST_OFFLOAD": "late"},
    "page": {"EBB_TEST_PAGING": "1"},
}


@pytest.mark.parametrize("environment", WITH.values(), ids=WITH)
def test_the_rules_hold(environment):
    """The tests of exactness again, with policies that make values each time."""
    assert_tests_of_exactness_pass(EBB_TEST_EACH_TIME="1", **environment)


def test_the_rules_hold_in_verify_mode():
    assert_rules_hold_in_verify_mode(EBB_TEST_EACH_TIME="1")


@pytest.mark.parametrize("environment", WITH.values(), ids=WITH)
def test_random_programs(environment):
    """Each decision by itself, and all mixed at random."""
    count = 2000 if not environment else 500

    came_to = run_random_programs(count, EBB_TEST_EACH_TIME="1", **environment)

    assert came_to["replayed"] > 0.2 * count
    assert came_to.get("refused", 0) < 0.05 * count
    assert came_to["error"] < 0.3 * count
