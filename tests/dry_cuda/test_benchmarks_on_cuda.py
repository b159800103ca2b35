"""What benchmarks measure on a GPU: bytes of torch's CUDA allocator, and times by events."""

from __future__ import annotations

from pathlib import Path

import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_bytes_and_times_of_a_step(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    steps, systems, workloads = map(__import__, ("steps", "systems", "workloads"))
    monkeypatch.setattr(steps, "check_exactness", lambda _, ways: {way.name: "" for way in ways})
    recomputed = next(s for s in systems.ebb_systems() if s.name == "ebb recompute_all")

    eager, ours = steps.measure_steps(
        workloads.pre_norm(64), torch.device("cuda"), [systems.EAGER, recomputed], 0, 2
    )

    assert 0 < ours["held_bytes"] < eager["held_bytes"] / 2
    assert ours["held_bytes"] < ours["peak_bytes"] < eager["peak_bytes"]
    assert eager["peak_bytes"] < eager["peak_reserved_bytes"]
    assert eager["host_seconds"] > 0
    assert eager["seconds"] > 0
