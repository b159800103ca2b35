"""EBB_BUDGET below what a region for each block needs: the module around the blocks is one too."""

from __future__ import annotations

import pytest
from torch import nn

import ebb
from ebb._launch import budgeted, takeover
from ebb._plan.plan import plan_of
from ebb_tests.budget_jobs import PLANNED, STEPS, WIDTH, Job, Quiet, assert_same, peak_of, regions

DEPTH = 16


class Block(nn.Module):
    """Hands on more than it keeps."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x):
        return self.dropout(self.linear(x).sin())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture
def tight(install, monkeypatch):
    """The least that there is a plan for."""
    plans = []

    def least(measured, budget, **arguments):
        plans.append(plan_of(measured, 1, at_least=True))
        return plans[-1]

    monkeypatch.setattr("ebb._launch.budget_phases.plan_of", least)
    budget = install("60%")
    return plans, budget


def test_a_job_has_the_same_bits(tight, told):
    found = Job(Net).train()

    ((plan,), _) = tight
    assert set(plan.policies) == {"Net", *(f"layers.{n}" for n in range(DEPTH))}
    assert set(regions(found.model)) == {"", *(f"layers.{n}" for n in range(DEPTH))}
    assert any("regions (Net, layers.0-15)" in line for line in told())
    takeover.remove()
    assert_same(found, Job(Net).train())


@pytest.mark.not_sanitized
def test_the_peak_is_the_plans(tight):
    job = Quiet(Net).train(PLANNED)

    peak_of(job)
    found, _ = peak_of(job)

    assert found <= tight[0][0].peak * 1.0025


def test_when_it_is_measured_again_the_region_around_is_gone(tight):
    job = Job(Net).train()
    assert "" in regions(job.model)
    _, budget = tight

    budget.blocks.put(ebb.policies.recompute_all)

    assert set(regions(job.model)) == {f"layers.{n}" for n in range(DEPTH)}
    budget.blocks.follow({"Net": ebb.policies.save_all})
    assert set(regions(job.model)) == {""}


def test_two_models_of_one_kind(tight):
    """Of two modules with one name the second is no region around others."""
    one, two = Job(Net), Job(Net)
    for step in range(STEPS):
        one.train(1)
        two.step(step)

    takeover.remove()
    again, other = Job(Net), Job(Net)
    for step in range(STEPS):
        again.train(1)
        other.step(step)
    assert_same(one, again)


def test_a_process_among_others_has_a_region_for_each_block(tight, monkeypatch):
    monkeypatch.setattr(budgeted, "has_ranks", lambda: True)
    job = Job(Net).train()

    assert "" not in regions(job.model)
    assert regions(job.model)


class Around(nn.Module):
    """Calls the blocks of a module that does not run itself."""

    def __init__(self):
        super().__init__()
        self.inner = Net()

    def forward(self, x):
        for layer in self.inner.layers:
            x = layer(x)
        return self.inner.head(x)


def test_a_module_that_does_not_call_the_blocks_is_no_region(tight):
    job = Job(Around).train()

    assert set(regions(job.model)) <= {f"inner.layers.{n}" for n in range(DEPTH)}
    assert regions(job.model)
    assert not any(one._forward_pre_hooks for one in job.model.modules())
