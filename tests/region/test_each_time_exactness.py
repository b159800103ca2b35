"""RECOMPUTE_EACH_TIME, alone and among other decisions: gradients have the bits of eager."""

from __future__ import annotations

import pytest

from ebb_tests.exactness import (
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
# In each of the others the same tests take minutes; random programs run there in any case.
RULES = [
    pytest.param(environment, id=name, marks=pytest.mark.slow if environment else pytest.mark.sweep)
    for name, environment in WITH.items()
]


@pytest.mark.parametrize("environment", RULES)
def test_the_rules_hold(environment):
    """The tests of exactness again, with policies that make values each time."""
    assert_tests_of_exactness_pass(EBB_TEST_EACH_TIME="1", **environment)


@pytest.mark.slow
def test_the_rules_hold_in_verify_mode():
    assert_rules_hold_in_verify_mode(EBB_TEST_EACH_TIME="1")


@pytest.mark.sweep
@pytest.mark.parametrize("environment", WITH.values(), ids=WITH)
def test_random_programs(environment):
    """Each decision by itself, and all mixed at random."""
    count = 1000 if not environment else 300

    came_to = run_random_programs(count, EBB_TEST_EACH_TIME="1", **environment)

    assert came_to["replayed"] > 0.2 * count
    assert came_to.get("refused", 0) < 0.05 * count
    assert 0 < came_to["error"] < 0.3 * count
