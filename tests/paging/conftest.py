"""Each test of paging begins and ends without page pools and without unread errors."""

from __future__ import annotations

import pytest

from ebb_tests.programs.paged import Keep, Mlp, fresh


@pytest.fixture(autouse=True)
def _fresh():
    with fresh():
        yield
    Keep.last = None


@pytest.fixture
def net():
    return Mlp()
