"""PAGE where all rows live: then whatever operators do, gradients have the bits of eager."""

from __future__ import annotations

import pytest

from ebb_tests.exactness import assert_tests_of_exactness_pass


@pytest.mark.sweep
def test_the_rules_hold_with_pages():
    """The tests of exactness again, with policies that page."""
    assert_tests_of_exactness_pass(EBB_TEST_PAGING="1")
