"""EBB_BUDGET where values can leave memory: here to a disk, as on an accelerator to the host."""

from __future__ import annotations

import pytest

import ebb
from ebb import _testing
from ebb._launch import budgeted_job, takeover
from ebb._launch.taken import Taken
from ebb._plan.profile import copies, measuring
from ebb._plan.profile.copies import Link
from ebb._plan.simulate.simulator import Simulator
from ebb_tests.budget_jobs import STEPS, Job, Quiet, assert_same, peak_of, regions

PLANNED = budgeted_job.number_of_steps([]) + 2  # steps, after which there is a plan
FAST = Link(out=1e9, back=1e9, least=1, room=1 << 30, is_disk=True)


@pytest.fixture
def disk(tmp_path):
    """Of which nothing is said about its speed."""
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


def test_the_job_tells_how_many_steps_are_measured(disk, install, told):
    install("60%")
    Job().train(1)

    assert told()[0].startswith(f"60%: ebb profiles {PLANNED} steps")


@pytest.mark.parametrize(("budget", "has_room"), [("80%", True), ("25%", False)])
def test_a_step_in_which_all_leaves_is_measured_where_there_is_room(
    fast_disk, install, budget, has_room
):
    """What leaves is there for a moment, so that may take more than recomputing does."""
    install(budget)
    job = Job()

    sent, settings = [], []
    for _ in range(PLANNED if has_room else PLANNED - 2):
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


def test_a_job_has_the_same_bits(disk, trained, told):
    trained("50%", steps=STEPS + 2)

    assert any("; predicted peak " in line for line in told())


@pytest.mark.not_sanitized
def test_a_fast_disk_is_used_and_the_budget_kept(fast_disk, install):
    plain = Quiet().train(3)
    peak_of(plain)
    allowed, _ = peak_of(plain)
    install(0.6)
    job = Quiet().train(PLANNED)
    before = ebb.stats()["offload"]["bytes_sent"]

    peak_of(job)
    found, _ = peak_of(job)

    assert found <= 0.6 * allowed
    assert ebb.stats()["offload"]["bytes_sent"] > before
    assert any("OFFLOAD" in repr(policy) for policy in regions(job.model).values())
    assert ebb.config.offload.keep_last == 0


def test_the_job_has_its_settings_back_when_the_budget_goes(fast_disk, install):
    install(0.6)
    Job().train(STEPS + 2)
    assert ebb.config.to_dict() != fast_disk

    takeover.remove()

    assert ebb.config.to_dict() == fast_disk


def test_it_goes_while_steps_are_measured(fast_disk, install):
    install(0.6)
    Job().train(6)
    assert ebb.config.to_dict() != fast_disk

    takeover.remove()

    assert ebb.config.to_dict() == fast_disk


def test_a_probe_that_fails_ends_no_job(disk, trained, told, monkeypatch):
    def fails(*_):
        raise RuntimeError("no copies today")

    monkeypatch.setattr(copies, "_round", fails)

    trained("60%")

    assert any("; predicted peak " in line for line in told())


def test_a_restart_with_the_plan_in_a_file(fast_disk, start, tmp_path, told):
    expected = Job().train(STEPS)
    start("60%")
    Job().train(STEPS + 2)
    during = ebb.config.to_dict()
    takeover.remove()
    assert during != fast_disk
    told()
    found = start("60%")

    before = ebb.stats()["offload"]["bytes_sent"]
    job = Job().train(1)
    assert ebb.stats()["offload"]["bytes_sent"] > before
    assert ebb.config.to_dict() == during
    job.train(STEPS - 1)

    assert isinstance(found.job.phase, Taken)
    assert len(told()) == 1
    assert_same(job, expected)
    takeover.remove()
    assert ebb.config.to_dict() == fast_disk
