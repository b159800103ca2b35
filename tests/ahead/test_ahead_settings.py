"""Whether replays run ahead: settings, the environment, and cores that are busy."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import fork_server
import pytest
import torch
from ahead_programs import X, blocks, chain, counts, replays_ahead

import ebb
from ebb import _testing

CORES = len(os.sched_getaffinity(0))


def program():
    chain(blocks(3), torch.randn(X, requires_grad=True)).sum().backward()


def test_without_an_idle_core_nothing_is_replayed_ahead_but_the_last_region_is_held():
    """No thread is started for it."""
    torch.set_num_threads(CORES)
    ebb._C.stop_ahead()
    with replays_ahead():
        ebb.ahead.configure(busy_cores=False)
        did = counts(program)
        assert ebb.stats()["ahead"]["workers"] == 0

    del did["most_bytes"]
    assert {name for name, count in did.items() if count} == {"regions_held"}


@pytest.mark.skipif(CORES < 2, reason="one core has none that is idle")
def test_where_each_thread_has_two_cores_replays_run_ahead():
    torch.set_num_threads(1)
    with replays_ahead():
        ebb.ahead.configure(busy_cores=False)
        program()  # a worker that has another number of threads ends
        did = counts(program)

    assert did["regions_in_time"] == 2
    assert did["regions_held"] == 1


@pytest.mark.skipif(CORES < 2, reason="one core has none that is idle")
def test_a_backward_that_leaves_a_core_idle_is_measured():
    """Its operators are too small for the threads that they may use."""
    torch.set_num_threads(CORES)
    with replays_ahead():
        ebb.ahead.configure(busy_cores=False)
        did = counts(lambda: [program() for _ in range(40)])

    assert did["regions_in_time"] > 0


@pytest.mark.skipif(CORES < 2, reason="one core is all that there is")
def test_a_main_thread_that_openmp_has_bound_to_one_core_is_not_all_of_the_process():
    program = """
import os, torch, ebb._testing
torch.set_num_threads(1)
ebb.ahead.configure(regions=1)
h = torch.randn(8, 8, requires_grad=True)
for _ in range(3):
    with ebb.region(ebb.policies.recompute_all):
        h = h.sin().exp().sin()
h.sum().backward()
while not ebb._testing.replays_ahead_are_idle():
    pass
tasks = [len(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")]
print([len(os.sched_getaffinity(0)), ebb._testing.count_cores(), max(tasks)])
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_PROC_BIND": "true"},
        stdout=subprocess.PIPE,
        check=True,
    )

    assert json.loads(done.stdout) == [1, CORES, CORES]


def test_ranks_of_a_machine_share_its_cores_unless_each_has_its_own(monkeypatch):
    count_cores = _testing.count_cores
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(CORES))
    assert count_cores() == 1

    all_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(os.getpid(), [min(all_cores)])
    try:
        assert count_cores() == 1
    finally:
        os.sched_setaffinity(os.getpid(), all_cores)

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "none")
    assert count_cores() == CORES


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/", {}, math.inf),
        ("0::/", {"cpu.max": "max 100000"}, math.inf),
        ("0::/", {"cpu.max": "250000 100000"}, 2.5),
        ("0::/a/b", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, 3),
        ("0::/not/mounted", {"cpu.max": "100000 100000"}, 1),
        (
            "5:memory:/m\n4:cpu,cpuacct:/a\n0::/",
            {"cpu/a/cpu.cfs_quota_us": "400000", "cpu/a/cpu.cfs_period_us": "100000"},
            4,
        ),
        (
            "4:cpuacct,cpu:/a/b",
            {
                "cpu/a/b/cpu.cfs_quota_us": "-1",
                "cpu/cpu.cfs_quota_us": "50000",
                "cpu/cpu.cfs_period_us": "100000",
            },
            0.5,
        ),
        ("5:memory:/m", {"m/cpu.max": "100000 100000"}, math.inf),
    ],
)
def test_quotas_of_all_groups_above_the_process_count(groups, files, quota, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    (tmp_path / "groups").write_text(groups + "\n")

    found = _testing.quota_of_cgroups(str(tmp_path / "groups"), str(tmp_path))

    assert found == quota


ASKS = "import torch, json, ebb; print(json.dumps(ebb.ahead.configure()))"


def settings_of_a_job(value):
    done = fork_server.run(
        ["-W", "ignore", "-c", ASKS],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "EBB": "1", "EBB_AHEAD": value},
        check=True,
    )
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize(
    ("value", "regions", "limit"),
    [
        ("512MiB", 1, 2**29),
        *(
            pytest.param(*case, 2**30, marks=pytest.mark.sweep)
            for case in (("", 0), ("0", 0), ("3", 3), ("auto", 1))
        ),
    ],
)
def test_the_environment_sets_it(value, regions, limit):
    found, errors = settings_of_a_job(value)

    assert (found["regions"], found["limit"], found["busy_cores"]) == (regions, limit, False)
    assert "EBB_AHEAD" not in errors


@pytest.mark.parametrize(
    "value", ["yes", *(pytest.param(v, marks=pytest.mark.sweep) for v in ("-1", "1 mile"))]
)
def test_an_environment_that_makes_no_sense_is_told(value):
    found, errors = settings_of_a_job(value)

    assert found["regions"] == 0
    assert f"EBB_AHEAD={value}" in errors


@pytest.mark.parametrize("name", ["busy_cores", "side_stream"])
def test_a_switch_must_be_a_bool(name):
    before = ebb.ahead.configure()

    with pytest.raises(TypeError, match=f"ebb: {name} must be a bool; got 1"):
        ebb.ahead.configure(regions=7, **{name: 1})

    assert ebb.ahead.configure() == before
