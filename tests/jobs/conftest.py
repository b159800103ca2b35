"""Budgets, and calls of torch.utils.checkpoint that are taken over, until the test ends."""

from __future__ import annotations

import re

import pytest

import ebb
from ebb._launch import takeover
from ebb._launch.memory_limit import limit_of
from ebb._launch.taken import Taken
from ebb._plan.choose.memory_budget import read_budget
from ebb_tests.budget_jobs import PLANNED, STEPS, Job, assert_same, regions


@pytest.fixture
def take_over():
    """Makes regions of calls of torch.utils.checkpoint, and of modules with these names."""

    def install(*patterns, policy=ebb.policies.recompute_all, text="1", **settings):
        takeover.install(policy, text, patterns, **settings)
        ebb.reset_stats()

    yield install
    takeover.remove()


@pytest.fixture
def taken(take_over):
    take_over()


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
def restarted(start, told):
    """Trains a job with a budget and a file, then one from the plan in the file. The plan and its
    settings must apply from the first step on, with the bits of a job without them.
    """

    def train(budget, make, steps=PLANNED, says=""):
        expected = make().train(STEPS)
        start(budget)
        make().train(steps)
        settings = ebb.config.to_dict()
        takeover.remove()
        assert any("the next start of the job takes this plan from" in line for line in told())
        found = start(budget)
        job = make().train(1)
        assert isinstance(found.job.phase, Taken)
        assert ebb.config.to_dict() == settings
        planned = regions(job.model)
        job.train(STEPS - 1)

        (line,) = told()
        assert re.match(rf"{budget}: the plan from plan.toml, without profiling: {says}", line)
        assert isinstance(found.job.phase, Taken)
        assert regions(job.model) == planned
        assert_same(job, expected)
        return job

    return train
