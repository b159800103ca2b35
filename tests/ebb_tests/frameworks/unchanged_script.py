"""Shared by the tests of integrations: runs a script as it is, with and without ebb."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

MODULES = {"EBB": "recompute_all", "EBB_MODULES": "*layers.*"}
CHECKPOINTS = {"EBB": "1"}


def run(script: Path, *arguments: str, **environment: str) -> dict:
    """Runs the script and returns the JSON in its last line.

    malloc maps large blocks one by one, so that freed memory leaves resident memory at once.
    Otherwise glibc keeps a varying part of it.
    """
    env = {key: value for key, value in os.environ.items() if not key.startswith("EBB")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, *arguments],
        env=env | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert ("EBB_DISABLE=1 turns ebb off" in done.stderr) == bool(environment)
    found: dict = json.loads(done.stdout.splitlines()[-1])
    return found


def check(script: Path, checkpoint: str) -> None:
    """Checks that losses and gradient norms are eager's, and that peak memory is low enough."""
    plain = run(script)
    modules = run(script, **MODULES)
    checkpointed = run(script, checkpoint)
    regions = run(script, checkpoint, **CHECKPOINTS)
    for found in (modules, checkpointed, regions):
        assert (found["losses"], found["norms"]) == (plain["losses"], plain["norms"])
    assert checkpointed["peak_mib"] < 0.8 * plain["peak_mib"]
    assert modules["peak_mib"] <= 1.03 * checkpointed["peak_mib"]
    assert regions["peak_mib"] <= 1.03 * checkpointed["peak_mib"]
