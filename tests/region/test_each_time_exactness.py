"""Random programs with RECOMPUTE_EACH_TIME, alone and among other decisions, give eager's bits."""

from __future__ import annotations

import pytest

from ebb_tests.programs.compared_programs import run_random_programs


@pytest.mark.sweep
@pytest.mark.parametrize(
    "under", ["each time", "each time, ahead", "each time, offload", "each time, page"]
)
def test_random_programs(under):
    """Each decision by itself, and all mixed at random."""
    count = 1000 if under == "each time" else 300

    came_to = run_random_programs(count, engine=under)

    assert came_to["replayed"] > 0.2 * count
    assert came_to.get("refused", 0) < 0.05 * count
    assert 0 < came_to["error"] < 0.3 * count
