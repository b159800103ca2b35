"""Runs an unchanged script, with ebb enabled only by environment variables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from unchanged_script import check

pytest.importorskip("lightning")


SCRIPT = Path(__file__).with_name("train.py")


@pytest.mark.sweep
@pytest.mark.not_sanitized
def test_unchanged_script():
    check(SCRIPT, "--checkpoint")


@pytest.mark.sweep
def test_of_two_processes_one_prints_and_each_writes(tmp_path):
    """Lightning starts the second process itself, without setting RANK."""
    settings = {"EBB": "1", "EBB_MODULES": "*layers.*", "EBB_REPORT": f"{tmp_path}/r.txt"}

    done = subprocess.run(
        [sys.executable, SCRIPT, "--ddp"], env=os.environ | settings, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stderr.splitlines() if line.startswith("ebb")]
    assert len(lines) == 3
    assert "EBB_DISABLE=1 turns ebb off" in lines[0]
    assert lines[1] == "ebb: 6 modules are regions: layers.0-5"
    assert "; report: " in lines[2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.rank1.txt", "r.txt"]
