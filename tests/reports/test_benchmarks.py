"""The benchmarks run, compare gradients, and write what they measured."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SYSTEMS = {
    "eager",
    "AC",
    "AC, reentrant",
    "SAC matmuls",
    "SAC torchtitan",
    "ebb recompute_all",
    "ebb torchtitan",
    "ebb save_matmuls",
    "ebb save_all",
}


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@pytest.fixture
def load(monkeypatch):
    """Imports a file of the benchmarks, which are scripts and not a package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def load_module(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load_module


def run_quickly(script: str, folder: Path) -> str:
    """Runs a benchmark with small sizes. Returns its output."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), "--output", str(folder)],
        env=os.environ | {"EBB_BENCH_QUICK": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    return folder, run_quickly("run.py", folder)


def only_file(folder: Path, kind: str) -> Path:
    (found,) = folder.glob(f"*.{kind}")
    return found


@pytest.mark.sweep
def test_a_quick_run_measures_every_system_on_every_workload(quick_run):
    folder, _ = quick_run
    results = json.loads(only_file(folder, "json").read_text())

    rows = results["steps"]
    by_workload = {row["workload"]: set() for row in rows}
    for row in rows:
        by_workload[row["workload"]].add(row["system"])

    assert len(by_workload) >= 6
    for systems in by_workload.values():
        assert systems >= SYSTEMS
    assert "Llama-shaped model, tiny" in by_workload
    assert all(row["ratio"] > 0 and row["held_bytes"] > 0 for row in rows)


@pytest.mark.sweep
def test_a_quick_run_writes_every_section(quick_run):
    folder, _ = quick_run
    results = json.loads(only_file(folder, "json").read_text())
    text = only_file(folder, "md").read_text()

    ebb_row = next(r for r in results["slopes"] if r["system"] == "ebb recompute_all")
    assert None not in [
        ebb_row[c] for c in ("recording", "replay", "pack", "unpack", "region", "release")
    ]
    assert results["outside"]["ratio"] > 0
    for title in ("Steps", "Slopes", "Outside any region"):
        assert f"## {title}" in text


@pytest.mark.sweep
@pytest.mark.parametrize("column", ["held_bytes", "peak_bytes"])
def test_ebb_needs_no_more_bytes_than_the_best_peer_of_its_family(quick_run, column):
    folder, _ = quick_run
    cases = {}
    for row in json.loads(only_file(folder, "json").read_text())["steps"]:
        who = "ebb" if row["system"].startswith("ebb") else "peer"
        cases.setdefault((row["workload"], row["family"]), {}).setdefault(who, []).append(row)
    found = [case for case in cases.values() if {"ebb", "peer"} <= set(case)]
    assert len(found) >= 18

    for case in found:
        least = min(row[column] for row in case["peer"])
        assert [row for row in case["ebb"] if row[column] > least] == []


def test_figures_of_a_page_in_the_results_are_not_written_beside_it(load, tmp_path, monkeypatch):
    report = load("report")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")

    report.write_results(tmp_path / "results" / "a", {"b": 1}, "# A\n")
    report.write_results(tmp_path / "other" / "a", {"b": 2}, "# A\n")

    written = [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.*")]
    assert sorted(written) == [
        "build/benchmarks/a.json",
        "other/a.json",
        "other/a.md",
        "results/a.md",
    ]


@pytest.mark.sweep
def test_torch_remat_takes_part_where_it_is_installed(quick_run):
    folder, output = quick_run
    if not installed("torch_remat"):
        assert "pip install -e '.[bench]'" in output
        pytest.skip("torch-remat is not installed: pip install -e '.[bench]'")

    rows = json.loads(only_file(folder, "json").read_text())["steps"]

    systems = {row["system"] for row in rows}
    assert {f"torch-remat {p}" for p in ("recompute all", "torchtitan", "matmuls")} <= systems


@pytest.mark.sweep
def test_a_quick_run_draws_a_plot(quick_run):
    folder, output = quick_run
    if not installed("matplotlib"):
        assert "pip install -e '.[bench]'" in output
        pytest.skip("matplotlib is not installed: pip install -e '.[bench]'")

    assert "<svg" in only_file(folder, "svg").read_text()


@pytest.mark.sweep
def test_a_quick_run_compares_plans_with_all_other_ways(tmp_path):
    run_quickly("planner.py", tmp_path)
    results = json.loads(only_file(tmp_path, "json").read_text())
    text = only_file(tmp_path, "md").read_text()

    assert all(row["exact"] for row in results["curves"])
    families = {row["family"] for row in results["curves"]}
    assert {"eager", "ebb.plan", "ebb.plan, ahead", "SAC"} <= families
    assert {"AC of every k-th block", "torch's knapsack, as SAC"} <= families
    for title in ("A transformer in all ways", "Planning", "Goals"):
        assert f"## {title}" in text


def test_a_plan_is_beaten_by_less_memory_in_less_time_only(load):
    curves = load("planner_curves")

    def row(family, peak, ratio):
        return {"name": family, "family": family, "peak": peak, "ratio": ratio}

    ours, other = row(curves.PLANS, 50, 1.10), row(curves.PLANS, 80, 1.00)
    faster, slower = row("AC", 50, 1.05), row("AC", 40, 1.20)
    same = row("AC", 50, 1.09)

    assert curves.beaten([ours, other, slower, same], curves.PLANS) == []
    assert curves.beaten([ours, other, faster], curves.PLANS) == [(ours, faster)]
    assert curves.not_matched([ours, other, same]) == []
    assert curves.not_matched([ours, other, faster, slower]) == [faster, slower]


def test_a_line_is_fitted_by_least_squares(load):
    fit_line = load("analysis").fit_line

    exact = fit_line([1, 2, 4], [5.0, 7.0, 11.0])
    bent = fit_line([0, 1, 2], [0.0, 3.0, 0.0])

    assert (exact.slope, exact.intercept, exact.residual) == (2.0, 3.0, 0.0)
    assert (bent.slope, bent.intercept, bent.residual) == (0.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="two different xs"):
        fit_line([1, 1], [2.0, 3.0])


def test_the_pareto_front_holds_what_nothing_beats(load):
    pareto_front = load("analysis").pareto_front

    front = pareto_front([(3, 1), (1, 3), (2, 2), (2, 3), (3, 2), (1, 3), (4, 1)])

    assert front == [(1, 3), (2, 2), (3, 1)]
    assert pareto_front([]) == []


def test_other_gradients_than_eagers_end_the_benchmark(load):
    workloads, systems, steps = load("workloads"), load("systems"), load("steps")
    wrong = systems.System("wrong", systems.RECOMPUTE_ALL, lambda block, *xs: block(*xs) * 2)

    with pytest.raises(SystemExit, match="wrong gives other gradients than eager"):
        steps.check_exactness(workloads.llama_tiny(), [systems.EAGER, wrong])


def test_a_system_that_updates_buffers_twice_is_noted(load):
    workloads, systems, steps = load("workloads"), load("systems"), load("steps")

    notes = steps.check_exactness(workloads.convolutions(), systems.all_systems())

    assert notes["AC"] == "buffers differ from eager's"
    assert notes["ebb recompute_all"] == ""


def test_selective_checkpointing_saves_what_ebb_saves(load):
    systems = load("systems")

    saved = systems.matmuls()

    assert {torch.ops.aten.mm.default, torch.ops.aten.convolution.default} <= saved
    assert torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default in saved
    assert torch.ops.aten.add.Tensor not in saved


def test_steps_of_a_gpu_are_reported_in_milliseconds_and_with_reserved_bytes(load):
    row = {
        "workload": "w",
        "system": "eager",
        "family": "f",
        "ratio": 1.0,
        "ratio_of_medians": 1.0,
        "seconds": 2.0,
        "host_seconds": 0.5,
        "steps": 1,
        "note": "",
        "held_bytes": 0,
        "peak_bytes": 20,
        "peak_reserved_bytes": 50,
    }
    header, _, line = load("report").steps_table([row]).splitlines()[-3:]

    cells = dict(zip(header.split("|"), line.split("|"), strict=True))
    assert cells[" step ms "] == " 2000.00 "
    assert cells[" peak reserved "] == " 50 "
