"""`EBB_BUDGET=auto` in an unchanged job, and jobs with little memory."""

from __future__ import annotations

import json
import subprocess

import pytest

from ebb_tests.programs_apart import run_program

SCRIPT = """
import json, resource, sys, torch
from torch import nn

depth, hidden, full_at, limit = map(int, sys.argv[1:])
torch.manual_seed(0)
torch.set_num_threads(1)
block = lambda: nn.Sequential(
    nn.Linear(64, hidden), nn.GELU(), nn.Dropout(0.1), nn.Linear(hidden, 64)
)
net = nn.Sequential(*(block() for _ in range(depth)))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
x = torch.randn(hidden, 64)
losses = []
for step in range(18):
    if step == full_at:
        import ebb._testing
        ebb._testing.pretend_bytes_in_use(2**40)
    if step == 2 and limit:
        pages = int(open("/proc/self/statm").read().split()[0])
        bytes = pages * resource.getpagesize() + limit
        resource.setrlimit(resource.RLIMIT_AS, (bytes, bytes))
    loss = net(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
found = {"losses": losses}
if "ebb" in sys.modules:
    import ebb
    found |= ebb._C.room_stats()
    found["replayed"] = ebb.stats()["total"]["ops_replayed"]
print(json.dumps(found))
"""


@pytest.fixture
def job(tmp_path):
    """Runs the job; gives what it found and printed."""
    (tmp_path / "train.py").write_text(SCRIPT)

    def run(budget="", depth=4, hidden=256, full_at=-1, limit=0):
        variables = {"EBB_BUDGET": budget} if budget else {}
        sizes = (depth, hidden, full_at, limit)
        done = run_program("train.py", *sizes, cwd=tmp_path, **variables)
        return json.loads(done.stdout), done.stderr

    return run


def assert_all_is_saved(found, expected):
    assert found["losses"] == expected["losses"]
    assert (found["regions_given_up"], found["replayed"]) == (0, 0)


@pytest.mark.sweep
def test_nothing_is_recomputed_while_there_is_memory(job):
    expected, _ = job()
    found, errors = job("auto:100GiB")

    assert_all_is_saved(found, expected)
    assert "ebb saves all activations while less than 100.0 GiB of memory is in use" in errors
    assert "0-3" in errors


@pytest.mark.sweep
def test_full_memory_gives_a_plan_and_costs_no_step(job):
    expected, _ = job()
    found, errors = job("auto:100GiB", full_at=2)

    assert found["losses"] == expected["losses"]
    assert found["regions_given_up"] == 3  # in the one step, after which there is a plan
    assert found["replayed"] > 0
    assert "memory is too small to save all activations: ebb profiles steps" in errors
    assert "the memory limit is too small; the job needs at least 1.0 TiB. " in errors
    assert "is too small" in errors  # all that there is is in use: what needs least was planned


def test_restart_takes_the_plan_unless_the_limit_is_another(job, tmp_path):
    expected, _ = job()
    _, errors = job("auto:100GiB@plan.toml")
    assert not (tmp_path / "plan.toml").exists()  # there was no plan
    assert "no plan from" not in errors

    job("auto:100GiB@plan.toml", full_at=2)
    found, errors = job("auto:100GiB@plan.toml")

    assert found["losses"] == expected["losses"]
    assert found["regions_given_up"] == 0
    assert found["replayed"] > 0
    assert "the plan from plan.toml, without profiling: " in errors
    assert "ebb saves all activations" not in errors

    found, errors = job("auto:200GiB@plan.toml")

    assert_all_is_saved(found, expected)
    assert "no plan from plan.toml: the budget was auto:107374182400, and is auto:2147" in errors
    assert "ebb saves all activations while less than 200.0 GiB of memory is in use" in errors


@pytest.mark.sweep
@pytest.mark.parametrize(("mebibytes", "budget"), [(70, "auto:100GiB"), (85, "40%"), (85, "60MiB")])
def test_job_that_fails_without_a_budget_loses_no_step(job, monkeypatch, mebibytes, budget):
    """Each block saves 13 MiB. A budget other than auto profiles no step that saves more than there
    is memory for, and auto recomputes after an allocation has failed.
    """
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # freed memory goes back to the system
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    size = {"depth": 8, "hidden": 1024}
    expected, _ = job(**size)
    with pytest.raises(subprocess.CalledProcessError) as raised:
        job(**size, limit=mebibytes << 20)
    assert "can't allocate memory" in raised.value.stderr

    found, errors = job(budget, **size, limit=mebibytes << 20)

    assert found["losses"] == expected["losses"]
    assert bool(found["shortages"]) == bool(found["regions_given_up"]) == (budget[:4] == "auto")
    assert "; predicted peak " in errors
