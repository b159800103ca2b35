"""Runs an unchanged script under EBB_BUDGET: ebb makes a plan, and all bits are eager's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

SCRIPT = Path(__file__).with_name("train.py")
STEPS = 17
# Runs the script without regions, and prints the peak of the bytes that its last step allocates.
MEASURED = """
import runpy, sys, torch
from torch.optim.optimizer import register_optimizer_step_post_hook
import ebb
from ebb import _C

peaks = []

def step_ended(*_):
    if len(peaks) > 13:
        now = most = 0
        for _, _, taken in _C.end_profile()["allocations"]:
            now += taken
            most = max(most, now)
        peaks.append(most)
    else:
        peaks.append(0)
    if len(peaks) > 13:
        _C.begin_profile()

register_optimizer_step_post_hook(step_ended)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
print(peaks[-1])
"""


def run(*arguments, **environment):
    env = {key: value for key, value in os.environ.items() if not key.startswith("EBB")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments, "--steps", str(STEPS), "--length", "64"],
        env=env | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stderr.splitlines() if line.startswith("ebb")]
    return done.stdout.splitlines(), lines


@pytest.mark.sweep
@pytest.mark.not_sanitized
def test_unchanged_script_in_half_of_its_memory():
    (*_, plain, plain_peak), _ = run("-c", MEASURED, SCRIPT)

    (*_, found, peak), lines = run("-c", MEASURED, SCRIPT, EBB_BUDGET="50%")

    plain, found = json.loads(plain), json.loads(found)
    assert (found["losses"], found["norms"]) == (plain["losses"], plain["norms"])
    assert len(lines) == 2
    assert "model.layers.0-5" in lines[0]
    assert "; predicted peak " in lines[1]
    assert int(peak) <= 0.5 * int(plain_peak)


@pytest.mark.sweep
@pytest.mark.not_sanitized
def test_its_own_checkpointing_is_planned_too():
    (*_, plain), _ = run(SCRIPT)

    (*_, found), lines = run(SCRIPT, "--gradient-checkpointing", EBB_BUDGET="24GiB")

    plain, found = json.loads(plain), json.loads(found)
    assert (found["losses"], found["norms"]) == (plain["losses"], plain["norms"])
    assert "fits as it is" in lines[-1]
