"""examples/moe_paged.py: equal to eager at every load, through spill and through overflow."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ebb_tests import fork_server
from ebb_tests.time_limits import HANGS

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "moe_paged.py"


def run(tmp_path, *arguments, settings=""):
    figures, file = tmp_path / "figures.json", tmp_path / "ebb.toml"
    file.write_text(f"[paging]\n{settings}\n")
    done = fork_server.run(
        [EXAMPLE, *arguments, "--json", figures],
        env=os.environ | {"OMP_NUM_THREADS": "1", "EBB_CONFIG": str(file)},
        timeout=HANGS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(figures.read_text())


@pytest.mark.sweep
def test_as_it_is(tmp_path):
    found = run(tmp_path)
    assert all(row["identical"] for row in found["steps"])
    assert found["paging"]["recorded_steps"] == 1
    assert all(row["of_padded"] <= 0.3 for row in found["steps"])
    assert found["steps"][0]["least"] < found["steps"][0]["most"]


@pytest.mark.sweep
@pytest.mark.parametrize("skew", ["3", "30"])
def test_loads_from_none_to_all_with_overflow(tmp_path, skew):
    found = run(tmp_path, "--skew", skew, "--steps", "12", "--layers", "3", "--tokens", "300")
    assert min(row["least"] for row in found["steps"]) < 0.01
    assert max(row["most"] for row in found["steps"]) > 0.99
    assert found["paging"]["overflows"] >= 1


@pytest.mark.sweep
def test_spill(tmp_path):
    found = run(
        tmp_path,
        *("--skew", "1", "--steps", "12", "--tokens", "300"),
        settings="host_headroom = 4\npage_rows = 16",
    )
    assert found["paging"]["overflows"] == 0
    assert found["paging"]["spilled_steps"] >= 1


@pytest.mark.sweep
@pytest.mark.parametrize("mode", ["blocking", "deferred"])
def test_capacity_factors(tmp_path, mode):
    for factor in ("1.5", "16"):
        found = run(
            tmp_path,
            *("--capacity-factor", factor, "--steps", "4", "--tokens", "256"),
            settings=f"overflow = '{mode}'\nprefetch = 1",
        )
        assert all(row["identical"] for row in found["steps"])
