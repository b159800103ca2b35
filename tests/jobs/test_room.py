"""`EBB_BUDGET=auto` in a job that does not know of it."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from ebb_tests import fork_server

SCRIPT = """
import json, sys, torch
from torch import nn

torch.manual_seed(0)
block = lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))
net = nn.Sequential(*(block() for _ in range(4)))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
losses = []
for step in range(18):
    if step == int(sys.argv[1]):
        import ebb._testing
        ebb._testing.pretend_bytes_in_use(2**40)
    loss = net(torch.ones(256, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
found = {"losses": losses}
if "ebb" in sys.modules:
    import ebb
    found["given_up"] = ebb._C.room_stats()["regions_given_up"]
    found["replayed"] = ebb.stats()["total"]["ops_replayed"]
print(json.dumps(found))
"""


def job(path, full_at, budget):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("EBB_BUDGET")}
    if budget:
        environment["EBB_BUDGET"] = budget
    done = fork_server.run([path, str(full_at)], env=environment, timeout=120, check=True)
    return json.loads(done.stdout), done.stderr


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.sweep
def test_nothing_is_recomputed_while_there_is_room(script):
    expected, _ = job(script, -1, "")
    found, errors = job(script, -1, "auto:100GiB")

    assert found == expected | {"given_up": 0, "replayed": 0}
    assert "ebb saves all activations while less than 100.0 GiB of memory is in use" in errors
    assert "0-3" in errors


@pytest.mark.sweep
def test_without_room_a_plan_is_made_and_no_step_is_lost(script):
    expected, _ = job(script, -1, "")
    found, errors = job(script, 2, "auto:100GiB")

    assert found["losses"] == expected["losses"]
    assert found["given_up"] == 3  # in the one step, after which there is a plan
    assert found["replayed"] > 0
    assert "memory is too small to save all activations: ebb profiles steps" in errors
    assert "the memory limit is too small; the job needs at least 1.0 TiB. " in errors
    assert "is too small" in errors  # all that there is is in use: what needs least was planned


def test_a_restart_takes_the_plan_that_was_made(script, tmp_path):
    expected, _ = job(script, -1, "")
    budget = f"auto:100GiB@{tmp_path / 'plan.toml'}"
    _, errors = job(script, -1, budget)
    assert not (tmp_path / "plan.toml").exists()  # there was no plan
    assert "no plan from" not in errors

    job(script, 2, budget)
    found, errors = job(script, -1, budget)

    assert found["losses"] == expected["losses"]
    assert found["given_up"] == 0
    assert found["replayed"] > 0
    assert "the plan from plan.toml, without profiling: " in errors
    assert "ebb saves all activations" not in errors


def test_a_restart_with_another_limit_saves_all(script, tmp_path):
    expected, _ = job(script, -1, "")
    job(script, 2, f"auto:100GiB@{tmp_path / 'plan.toml'}")

    found, errors = job(script, -1, f"auto:200GiB@{tmp_path / 'plan.toml'}")

    assert found == expected | {"given_up": 0, "replayed": 0}
    assert "no plan from plan.toml: the budget was auto:107374182400, and is auto:2147" in errors
    assert "ebb saves all activations while less than 200.0 GiB of memory is in use" in errors


@pytest.mark.sweep
def test_a_senseless_limit_is_ignored(script):
    expected, _ = job(script, -1, "")
    found, errors = job(script, -1, "auto:banana")

    assert found["losses"] == expected["losses"]
    assert "EBB_BUDGET=auto:banana is ignored" in errors


LIMITED = """
import json, resource, sys, torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
block = lambda: nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 64))
net = nn.Sequential(*(block() for _ in range(8)))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
x = torch.randn(1024, 64)
losses = []
for step in range(14):
    if step == 2 and sys.argv[1] != "-1":
        pages = int(open("/proc/self/statm").read().split()[0])
        limit = pages * resource.getpagesize() + int(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    loss = net(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
found = {"losses": losses}
if "ebb" in sys.modules:
    import ebb
    found |= ebb._C.room_stats()
print(json.dumps(found))
"""


@pytest.fixture
def limited(tmp_path, monkeypatch):
    """Runs the job in so much memory, where it fails without a budget. Each block keeps 13 MiB.
    Memory goes back to the system when it is freed. Gives the losses without a limit, and what the
    job found and printed with the budget.
    """
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    path = tmp_path / "train.py"
    path.write_text(LIMITED)

    def run(most, budget):
        expected, _ = job(path, -1, "")
        with pytest.raises(subprocess.CalledProcessError) as raised:
            job(path, most, "")
        assert "can't allocate memory" in raised.value.stderr
        return expected, *job(path, most, budget)

    return run


@pytest.mark.sweep
def test_an_allocation_that_fails_costs_no_step(limited):
    expected, found, errors = limited(70 << 20, "auto:100GiB")

    assert found["losses"] == expected["losses"]
    assert found["shortages"] > 0
    assert found["regions_given_up"] > 0
    assert "; predicted peak " in errors


@pytest.mark.sweep
@pytest.mark.parametrize("budget", ["40%", "60MiB"])
def test_what_lives_recomputed_lives_while_it_is_measured(limited, budget):
    """No measured step keeps what there is no room for."""
    expected, found, errors = limited(85 << 20, budget)

    assert found["losses"] == expected["losses"]
    assert found["shortages"] == 0
    assert "; predicted peak " in errors
