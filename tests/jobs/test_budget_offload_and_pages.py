"""EBB_BUDGET with a disk for activations, and with pages for the valid rows of padded buffers."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ebb
from ebb import _C, _testing
from ebb._launch import budgeted_job, takeover
from ebb._plan.profile import copies, measuring
from ebb._plan.profile.copies import Link
from ebb._plan.simulate.simulator import Simulator
from ebb_tests.budget_jobs import PLANNED, STEPS, Job, Quiet, assert_same, peak_of, regions

DISK_PLANNED = budgeted_job.number_of_steps([]) + 2  # steps, after which there is a plan
FAST = Link(out=1e9, back=1e9, least=1, room=1 << 30, is_disk=True)


@pytest.fixture
def disk(tmp_path):
    """A disk tier whose speed is not known."""
    before = ebb.config.to_dict()
    _testing.drain_offload()
    ebb.config.update(
        offload_disk=tmp_path, offload_disk_limit="1GiB", offload_min_bytes=1, offload_keep_last=1
    )
    yield ebb.config.to_dict()
    _testing.drain_offload()
    ebb.config.update(before)


@pytest.fixture
def fast_disk(disk, monkeypatch):
    monkeypatch.setattr(measuring, "measure_link", lambda device: FAST)
    monkeypatch.setattr(Simulator, "_fit_copies", lambda self, away: 0.0)
    return disk


@pytest.mark.parametrize(("budget", "has_room"), [("80%", True), ("25%", False)])
def test_step_that_offloads_all_is_profiled_if_there_is_room(fast_disk, install, budget, has_room):
    """Offloaded values stay in memory for a moment, so the step may need more than a replay."""
    install(budget)
    job = Job()

    sent, settings = [], []
    for _ in range(DISK_PLANNED if has_room else DISK_PLANNED - 2):
        before = ebb.stats()["offload"]["bytes_sent"]
        job.train(1)
        sent.append(ebb.stats()["offload"]["bytes_sent"] > before)
        settings.append(ebb.config.to_dict())

    # a step's end is where the next one begins, whose settings are in place then
    away = [True] * 2 if has_room else []
    assert sent == [False] * 6 + away
    assert [one == fast_disk for one in settings[:5]] == [True] * 5
    assert (settings[5] != fast_disk) == has_room
    assert job.bits


@pytest.mark.parametrize("probe_fails", [False, True])
def test_job_with_a_disk_has_a_plan_and_the_same_bits(
    disk, trained, told, monkeypatch, probe_fails
):
    def fails(*_):
        raise RuntimeError("no copies today")

    if probe_fails:
        monkeypatch.setattr(copies, "_round", fails)
    trained("50%", steps=DISK_PLANNED + 3)

    lines = told()
    assert lines[0].startswith(f"50%: ebb profiles {DISK_PLANNED} steps") or probe_fails
    assert any("; predicted peak " in line for line in lines)


@pytest.mark.not_sanitized
def test_fast_disk_is_used_and_the_peak_is_in_the_budget(fast_disk, install):
    plain = Quiet().train(3)
    peak_of(plain)
    allowed, _ = peak_of(plain)
    install(0.6)
    job = Quiet().train(DISK_PLANNED)
    before = ebb.stats()["offload"]["bytes_sent"]

    peak_of(job)
    found, _ = peak_of(job)

    assert found <= 0.6 * allowed
    assert ebb.stats()["offload"]["bytes_sent"] > before
    assert any("OFFLOAD" in repr(policy) for policy in regions(job.model).values())
    assert ebb.config.offload.keep_last == 0


@pytest.mark.parametrize("steps", [6, STEPS + 2])
def test_settings_come_back_when_the_budget_goes(fast_disk, install, steps):
    """While steps are profiled, and under the plan."""
    install(0.6)
    Job().train(steps)
    assert ebb.config.to_dict() != fast_disk

    takeover.remove()

    assert ebb.config.to_dict() == fast_disk


def test_restart_offloads(fast_disk, restarted):
    sent = ebb.stats()["offload"]["bytes_sent"]
    job = restarted("60%", Job, STEPS + 2)

    assert ebb.stats()["offload"]["bytes_sent"] > sent
    assert any("OFFLOAD" in repr(policy) for policy in regions(job.model).values())
    takeover.remove()
    assert ebb.config.to_dict() == fast_disk


# Pages --------------------------------------------------------------------------------------------

COLUMNS, PADDED, VALID = 64, 512, 0.2


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(COLUMNS, 2 * COLUMNS, bias=False)
        self.down = nn.Linear(2 * COLUMNS, COLUMNS, bias=False)

    def forward(self, x, count):
        rows = ebb.experimental.mark_rows(x, count)
        return self.down(torch.tanh(F.silu(self.up(rows)).exp()))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = Experts()

    def forward(self, x):
        count = (torch.rand(()) * 10 + VALID * PADDED).long()
        is_valid = (torch.arange(PADDED) < count).unsqueeze(1)
        made = self.experts(torch.where(is_valid, x, 0), count)
        return x + torch.where(is_valid, made, 0)


def expert_net():
    return nn.Sequential(*(Layer() for _ in range(4)))


class Marked(Quiet):
    """Its steps can be run again."""

    def step(self, step):
        batch = torch.randn(PADDED, COLUMNS)
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
        batch = torch.randn(PADDED, COLUMNS)
        self.optimizer.zero_grad()
        ebb.experimental.paging.run_step(lambda: self.forward_and_backward(batch), fixed_order=True)


class Unmarked(Noting):
    """Nobody would run its steps again."""

    def step(self, step):
        batch = torch.randn(PADDED, COLUMNS)
        self.optimizer.zero_grad()
        self.note(self.forward_and_backward(batch))
        self.optimizer.step()


@pytest.fixture
def free_pages(monkeypatch):
    """Pages cost no time, so that plans do not depend on what else the machine does."""
    monkeypatch.setattr(copies, "_copy_speed", lambda device: 1e12)
    monkeypatch.setattr(copies, "_EACH", 0.0)


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


@pytest.mark.usefixtures("free_pages")
@pytest.mark.parametrize("kind", [Noting, AlsoTheOptimizer])
@pytest.mark.parametrize("budget", ["70%", "50%"])
def test_job_that_marks_rows_is_paged(kind, budget, trained):
    found = trained(budget, lambda: kind(expert_net))

    assert any(map(pages, regions(found.model).values()))
    assert ebb.stats()["paging"]["pool_bytes"] > 0


@pytest.mark.usefixtures("free_pages")
def test_peak_of_a_paged_job_is_in_the_budget(install):
    plain = peak_between_optimizers(Marked(expert_net).train(4))
    install("50%")
    job = Marked(expert_net).train(STEPS)

    found = peak_between_optimizers(job)

    assert any(map(pages, regions(job.model).values()))
    assert found + ebb.stats()["paging"]["pool_bytes"] <= 0.5 * plain


@pytest.mark.usefixtures("free_pages")
def test_job_whose_steps_are_not_repeated_is_not_paged(trained):
    found = trained("50%", lambda: Unmarked(expert_net))

    assert regions(found.model)
    assert not any(map(pages, regions(found.model).values()))


@pytest.mark.usefixtures("free_pages")
def test_more_rows_than_any_profiled_step_had(install, monkeypatch):
    def train():
        monkeypatch.setattr(f"{__name__}.VALID", 0.2)
        job = Noting(expert_net).train(PLANNED + 2)
        monkeypatch.setattr(f"{__name__}.VALID", 0.6)
        return job.train(3)

    expected = train()
    install("50%")
    found = train()

    assert ebb.stats()["paging"]["overflows"] > 0
    assert_same(found, expected)


@pytest.mark.usefixtures("free_pages")
@pytest.mark.parametrize("kind", [Noting, AlsoTheOptimizer])
def test_restart_is_paged(kind, restarted):
    job = restarted("50%", lambda: kind(expert_net), STEPS)

    assert any(map(pages, regions(job.model).values()))
    assert ebb.stats()["paging"]["pool_bytes"] > 0
