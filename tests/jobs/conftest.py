"""Budgets, and calls of torch.utils.checkpoint that are taken over, until the test ends."""

from __future__ import annotations

import pytest
from budget_jobs import STEPS, Job, assert_same

import ebb
from ebb._launch import takeover
from ebb._plan.choose.memory_budget import read_budget


@pytest.fixture
def taken():
    takeover.install(ebb.policies.recompute_all, "1", ())
    ebb.reset_stats()
    yield
    takeover.remove()


@pytest.fixture
def install():
    def with_budget(text, *patterns, calls=None):
        return takeover.install_budget(read_budget(text), str(text), patterns, calls)

    yield with_budget
    takeover.remove()


@pytest.fixture
def trained(install):
    """Trains a job with a budget, and checks that its bits are those without one."""

    def train(budget, make=Job, steps=STEPS, *, plain=None, **arguments):
        expected = (plain or make)().train(steps)
        install(budget, **arguments)
        found = make().train(steps)
        assert_same(found, expected)
        return found

    return train


@pytest.fixture
def told(capsys):
    """What ebb has told about the budget, without how long planning took on a busy machine."""

    def lines():
        return [
            line.removeprefix("ebb: EBB_BUDGET=")
            for line in capsys.readouterr().err.splitlines()
            if line.startswith("ebb: EBB_BUDGET") and ": planning took " not in line
        ]

    return lines
