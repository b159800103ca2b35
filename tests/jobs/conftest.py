"""Budgets, and calls of torch.utils.checkpoint that are taken over, until the test ends."""

from __future__ import annotations

import re

import pytest

import ebb
from ebb._launch import takeover
from ebb._launch.budget_phases import Planned
from ebb._launch.memory_limit import limit_of
from ebb._launch.taken import Taken
from ebb._plan.choose.memory_budget import read_budget
from ebb_tests.budget_jobs import PLANNED, STEPS, Job, assert_same


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


@pytest.fixture
def start(tmp_path):
    """Starts of one job, each with a budget and the file `plan.toml`."""

    def with_file(budget="60%", *patterns, path=None):
        given = limit_of(budget) or read_budget(budget)
        file = str(path or tmp_path / "plan.toml")
        return takeover.install_budget(given, budget, patterns, None, file)

    yield with_file
    takeover.remove()


@pytest.fixture
def first(start, tmp_path, told):
    """The text of the file after a first start."""

    def run(budget="60%", make=Job, steps=PLANNED):
        start(budget)
        make().train(steps)
        assert f"{budget}: the next start of the job takes this plan from {path}" in told()
        takeover.remove()
        return path.read_text()

    path = tmp_path / "plan.toml"
    return run


@pytest.fixture
def measures(start, told):
    """Checks a start that takes no plan from its file."""

    def measures(why, budget="60%", make=Job, patterns=()):
        """The next start says why it takes no plan, and writes another."""
        expected = make().train()
        found = start(budget, *patterns)
        job = make().train()
        lines = told()
        assert re.match(rf"{re.escape(budget)}: no plan from plan.toml: {why}", lines[0]), lines
        assert "ebb profiles 6 steps" in lines[1]
        assert any("the next start of the job takes this plan from" in line for line in lines)
        assert_same(job, expected)
        assert type(found.job.phase) is Planned
        takeover.remove()

        found = start(budget, *patterns)
        make().train(2)
        assert isinstance(found.job.phase, Taken)

    return measures
