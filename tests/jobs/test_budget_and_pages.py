"""EBB_BUDGET in jobs that say which rows of padded buffers live."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ebb
from ebb import _C
from ebb._launch import takeover
from ebb._launch.taken import Taken
from ebb_tests.budget_jobs import PLANNED, STEPS, Job, Quiet, assert_same, regions

WIDTH, ROWS, LIVE = 64, 512, 0.2


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x, count):
        rows = ebb.experimental.mark_rows(x, count)
        return self.down(torch.tanh(F.silu(self.up(rows)).exp()))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = Experts()

    def forward(self, x):
        count = (torch.rand(()) * 10 + LIVE * ROWS).long()
        lives = (torch.arange(ROWS) < count).unsqueeze(1)
        made = self.experts(torch.where(lives, x, 0), count)
        return x + torch.where(lives, made, 0)


class Net(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Marked(Quiet):
    """Its steps can be run again."""

    def step(self, step):
        batch = torch.randn(ROWS, WIDTH)
        self.optimizer.zero_grad()
        self.loss = ebb.experimental.paging.run_step(lambda: self.forward_and_backward(batch))
        self.note(self.loss)
        self.optimizer.step()

    def forward_and_backward(self, batch):
        loss = self.model(batch).square().mean()
        loss.backward()
        return loss


class Noting(Marked):
    note = Job.note


class AlsoTheOptimizer(Noting):
    """The optimizer steps in what can be run again, so plans begin inside of it."""

    def forward_and_backward(self, batch):
        loss = super().forward_and_backward(batch)
        self.note(loss)
        self.optimizer.step()
        return loss

    def step(self, step):
        batch = torch.randn(ROWS, WIDTH)
        self.optimizer.zero_grad()
        ebb.experimental.paging.run_step(lambda: self.forward_and_backward(batch), fixed_order=True)


class Unmarked(Noting):
    """Nobody would run its steps again."""

    def step(self, step):
        batch = torch.randn(ROWS, WIDTH)
        self.optimizer.zero_grad()
        self.note(self.forward_and_backward(batch))
        self.optimizer.step()


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Pages cost no time, so that plans do not depend on what else the machine does."""
    monkeypatch.setattr(ebb._plan.profile.copies, "_copy_speed", lambda device: 1e12)
    monkeypatch.setattr(ebb._plan.profile.copies, "_EACH", 0.0)


def peak_between_optimizers(job):
    """Bytes of the next step, as it is planned: the batch of the one before goes in it."""
    found = []

    def boundary(*_):
        if found:
            found[-1] = _C.end_profile()["allocations"]
        found.append(None)
        _C.begin_profile()

    handle = job.optimizer.register_step_post_hook(boundary)
    job.train(3)
    handle.remove()
    _C.end_profile()
    sums = itertools.accumulate(taken for _, _, taken in found[-2])
    return max(sums)


def pages(policy):
    return "PAGE" in repr(policy)


@pytest.mark.parametrize("kind", [Noting, AlsoTheOptimizer])
@pytest.mark.parametrize("budget", ["70%", "50%"])
def test_a_job_that_marks_rows_is_paged(kind, budget, trained):
    found = trained(budget, lambda: kind(Net))

    assert any(map(pages, regions(found.model).values()))
    assert ebb.stats()["paging"]["pool_bytes"] > 0


def test_the_budget_holds(install):
    plain = peak_between_optimizers(Marked(Net).train(4))
    install("50%")
    job = Marked(Net).train(STEPS)

    found = peak_between_optimizers(job)

    assert any(map(pages, regions(job.model).values()))
    assert found + ebb.stats()["paging"]["pool_bytes"] <= 0.5 * plain


def test_a_job_whose_steps_are_not_repeated_is_not(trained):
    found = trained("50%", lambda: Unmarked(Net))

    assert regions(found.model)
    assert not any(map(pages, regions(found.model).values()))


def test_more_rows_than_any_measured_step_had(install, monkeypatch):
    def train():
        monkeypatch.setattr(f"{__name__}.LIVE", 0.2)
        job = Noting(Net).train(PLANNED + 2)
        monkeypatch.setattr(f"{__name__}.LIVE", 0.6)
        return job.train(3)

    expected = train()
    install("50%")
    found = train()

    assert ebb.stats()["paging"]["overflows"] > 0
    assert_same(found, expected)


@pytest.mark.parametrize("kind", [Noting, AlsoTheOptimizer])
def test_a_restart_with_the_plan_in_a_file(kind, start, told):
    expected = kind(Net).train(STEPS)
    start("50%")
    kind(Net).train(STEPS)
    takeover.remove()
    told()
    found = start("50%")

    job = kind(Net).train(1)
    assert any(map(pages, regions(job.model).values()))
    job.train(STEPS - 1)

    assert isinstance(found.job.phase, Taken)
    assert len(told()) == 1
    assert ebb.stats()["paging"]["pool_bytes"] > 0
    assert_same(job, expected)
