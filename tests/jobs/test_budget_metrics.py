"""`ebb.metrics()` in a job with EBB_BUDGET."""

from __future__ import annotations

import gc

import pytest

from ebb import _C
from ebb._plan.profile.measuring import base_bytes
from ebb._report.metrics import Metrics
from ebb_tests.budget_jobs import PLANNED, Quiet


def tensor_bytes():
    gc.collect()
    return _C.tensor_bytes()[0]


class Logged(Quiet):
    """Asks at one place of the step."""

    def __init__(self, place, **settings):
        super().__init__(**settings)
        self.place, self.measured, self.found = place, Metrics(), []

    def step(self, step):
        super().step(step)
        if self.place == "after zero_grad":
            self.optimizer.zero_grad()
        self.found.append(self.measured.read())


@pytest.mark.not_sanitized
@pytest.mark.parametrize("place", ["after step", "after zero_grad"])
@pytest.mark.parametrize("share", [0.6, None])
def test_the_peak_the_plan_and_the_budget(install, share, place):
    outside = tensor_bytes()
    plain = Logged(place).train(5)
    base = base_bytes([plain.model], [plain.optimizer])
    eager = plain.found[-1]["ebb/peak_bytes"] - outside
    budget = share if share is not None else eager - (eager - base) // 3
    del plain
    outside = tensor_bytes()
    install(budget)
    job = Logged(place).train(PLANNED + 4)

    before, planned = job.found[: PLANNED - 1], job.found[PLANNED:]
    assert not any("ebb/budget_bytes" in found for found in before)
    assert [found["ebb/plan_age"] for found in planned] == [1, 2, 3, 4]
    for found in planned:
        assert found["ebb/peak_bytes"] <= found["ebb/budget_bytes"] < eager + outside
        assert abs((found["ebb/eager_peak_bytes"] - outside) / eager - 1) < 0.03
        if share is None:
            assert abs((found["ebb/budget_bytes"] - outside) / budget - 1) < 0.03
