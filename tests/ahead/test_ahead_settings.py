"""Whether replays run ahead: settings, the environment, and cores that are busy."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from ahead_programs import WaitInBackward, blocks, counts, replays_ahead

import ebb

CORES = len(os.sched_getaffinity(0))
X = (2, 6, 16)


def program():
    h = torch.randn(X, requires_grad=True)
    for module in blocks(3):
        with ebb.region(ebb.policies.recompute_all):
            h = module(WaitInBackward.apply(h))
    h.sum().backward()


def test_no_idle_core_no_replay_ahead():
    torch.set_num_threads(CORES)
    with replays_ahead():
        ebb.ahead.configure(busy_cores=False)
        did = counts(program)

    assert did["regions_in_time"] == 0
    assert did["regions_stopped"] > 0
    assert did["regions_held"] == 1


@pytest.mark.skipif(CORES < 2, reason="one core has none that is idle")
def test_only_where_cores_are_idle():
    with replays_ahead():
        ebb.ahead.configure(idle_only=True, busy_cores=False)
        torch.set_num_threads(CORES)
        busy = counts(program)
        torch.set_num_threads(1)
        program()  # a worker that has another number of threads ends
        idle = counts(program)

    assert not any(busy.values())
    assert idle["regions_in_time"] == 2
    assert idle["regions_held"] == 1


ASKS = "import torch, json, ebb; print(json.dumps(ebb.ahead.settings()))"


def settings_of_a_job(value):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ASKS],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "EBB": "1", "EBB_AHEAD": value},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize(
    ("value", "regions", "limit", "idle_only"),
    [
        ("", 0, 2**30, False),
        ("0", 0, 2**30, False),
        ("3", 3, 2**30, False),
        ("512MiB", 1, 2**29, False),
        ("auto", 1, 2**30, True),
    ],
)
def test_the_environment_sets_it(value, regions, limit, idle_only):
    found, errors = settings_of_a_job(value)

    assert (found["regions"], found["limit"], found["idle_only"]) == (regions, limit, idle_only)
    assert "EBB_AHEAD" not in errors


@pytest.mark.parametrize("value", ["yes", "-1", "1 mile"])
def test_an_environment_that_makes_no_sense_is_told(value):
    found, errors = settings_of_a_job(value)

    assert found["regions"] == 0
    assert f"EBB_AHEAD={value}" in errors


@pytest.mark.parametrize("name", ["idle_only", "busy_cores", "side_stream"])
def test_a_switch_must_be_a_bool(name):
    before = ebb.ahead.settings()

    with pytest.raises(TypeError, match=f"ebb: {name} must be a bool; got 1"):
        ebb.ahead.configure(regions=7, **{name: 1})

    assert ebb.ahead.settings() == before
