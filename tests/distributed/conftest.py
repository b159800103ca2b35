"""Two processes for all tests of a session."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from ebb_tests.ranks import two_ranks


def pytest_collection_modifyitems(items):
    if not dist.is_available() or not dist.is_gloo_available():
        for item in items:
            if "distributed" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason="torch was built without gloo"))


@pytest.fixture(scope="session", autouse=True)
def _no_process_is_left():
    yield
    two_ranks.pair().kill()
