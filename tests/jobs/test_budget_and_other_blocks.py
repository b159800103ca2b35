"""Budgets that are too small for the blocks that are found: jobs measure coarser ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ebb import _C
from ebb._launch import budgeted_job, takeover
from ebb._launch.taken import Taken
from ebb_tests.budget_jobs import STEPS, Job, assert_same, regions
from ebb_tests.programs.planned import UNet, double

MORE = STEPS + 3 * budgeted_job.number_of_steps([])  # steps, for all candidates


class Pictures(Job):
    def batch(self, step):
        return torch.randn(2, 3, 16, 16)

    def note(self, loss):
        super().note(loss)
        self.bits[-1].append(_C.tensor_bytes()[1])


class Bare(nn.Module):
    """Calls what is in its part, and never the part, which looks as if it could be a region."""

    def __init__(self):
        super().__init__()
        self.part = nn.Sequential(*(double(4, 4) for _ in range(4)))

    def forward(self, x):
        x = torch.cat([x, x[:, :1]], 1)
        for block in self.part:
            pictures = F.interpolate(x, scale_factor=2)
            x = block(F.max_pool2d(torch.cat([pictures, pictures.exp()], 2).tanh(), (4, 2)))
        return x


def train(model, budget=None, install=None):
    if budget is not None:
        install(budget)
    job = Pictures(model)
    peaks = []
    for step in range(MORE):
        _C.reset_most_tensor_bytes()
        before = _C.tensor_bytes()[0]
        job.step(step)
        peaks.append(job.bits[-1].pop() - before)
    return job, peaks


@pytest.mark.parametrize("model", [UNet, Bare])
def test_coarser_blocks_keep_a_budget_that_finer_ones_cannot(install, told, model):
    _C.use_counting_allocator()
    expected, plain = train(model)

    found, peaks = train(model, "55%", install)

    assert_same(found, expected)
    lines = told()
    assert "too small" in lines[1], lines
    assert (
        f"ebb profiles again with other modules as regions: {'UNet' if model is UNet else ''}"
        in lines[1]
    )
    assert "too small" not in lines[-1]
    assert set(regions(found.model)) == {""}
    # A step frees the gradients of the one before first, and a share counts from there.
    gradients = sum(parameter.nbytes for parameter in found.model.parameters())
    assert peaks[-1] + gradients <= 0.56 * (plain[-1] + gradients) + 4096


def test_without_free_memory_no_other_blocks_are_measured(install, told, monkeypatch):
    monkeypatch.setattr(budgeted_job, "free", lambda device: 1 << 10)
    _C.use_counting_allocator()
    expected, _ = train(UNet)

    found, peaks = train(UNet, "60%", install)

    assert_same(found, expected)
    assert [line for line in told() if "other modules as regions" in line] == []
    assert "" not in regions(found.model)
    assert max(peaks[2:]) <= 1.02 * peaks[1]


def test_where_none_keeps_the_budget_those_that_need_least_are_taken(install, told):
    _C.use_counting_allocator()
    expected, plain = train(UNet)

    found, peaks = train(UNet, "5%", install)

    assert_same(found, expected)
    lines = told()
    assert sum("other modules as regions" in line for line in lines) in (1, 2)
    assert "the plan with the lowest peak" in lines[-1]
    assert peaks[-1] <= min(peaks) + 4096
    assert peaks[-1] < 0.6 * plain[-1]


def test_named_blocks_stay(install, told):
    found = Pictures(UNet)
    install("50%", "down.*", "up.*")
    found.train(MORE)
    assert [line for line in told() if "other modules as regions" in line] == []


@pytest.mark.parametrize("model", [UNet, Bare])
def test_a_restart_with_the_plan_in_a_file(start, told, model):
    """Other modules are the blocks from the first step on."""
    _C.use_counting_allocator()
    expected, plain = train(model)
    train(model, "55%", start)
    takeover.remove()
    told()
    found = start("55%")

    job, peaks = train(model)

    (line,) = told()
    assert "the plan from plan.toml, without profiling" in line
    assert isinstance(found.job.phase, Taken)
    assert set(regions(job.model)) == {""}
    assert_same(job, expected)
    gradients = sum(parameter.nbytes for parameter in job.model.parameters())
    assert max(peaks[1:]) + gradients <= 0.56 * (plain[-1] + gradients) + 4096


def test_a_restart_of_another_job_has_the_usual_blocks(start, told):
    train(UNet, "55%", start)
    takeover.remove()
    told()
    start("60%")

    job = Pictures(UNet).train(1)

    assert "no plan from plan.toml: the budget was" in told()[0]
    assert "" not in regions(job.model)
    assert len(regions(job.model)) > 1
