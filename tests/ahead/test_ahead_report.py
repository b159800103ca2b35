"""What reports tell of replays ahead of backward."""

from __future__ import annotations

import json

import torch

import ebb
from ebb import _testing
from ebb_tests.programs.ahead import WaitInBackward, X, blocks
from ebb_tests.replays import replays_ahead


def report_of(regions):
    """Of a step of five blocks."""
    modules, h = blocks(5), torch.randn(X, requires_grad=True)
    with replays_ahead(regions), ebb.record_reports():
        for i, module in enumerate(modules):
            with ebb.region(ebb.policies.recompute_all, name=f"blocks.{i}"):
                h = module(WaitInBackward.apply(h))
        h.sum().backward()
        return ebb.report()


def test_a_report_tells_what_ran_ahead(tmp_path):
    report = report_of(1)

    assert report.ahead.keys() == set(_testing.fields()["ReportAhead"])
    assert report.ahead == {"in_time": 4, "late": 0, "in_vain": 0, "held": 1, "stopped": 0}
    again = [row for row in report.rows if row.replays]
    assert sum(row.ahead_seconds for row in again) > 0
    for row in again:
        assert row.replays_ahead == row.replays
        assert row.ahead_seconds == row.replay_seconds
    assert {row.region for row in again} == {"blocks.0", "blocks.1", "blocks.2", "blocks.3"}
    assert "regions: 4 in time, 1 not freed\n" in report.text()
    (line,) = [line for line in report.text().splitlines() if line.startswith("replayed ahead")]
    first, second = (
        line.partition("; ")[0].removeprefix("replayed ahead of backward: ").split(" of ")
    )
    assert first == second

    together = report.collapsed()  # rows that are put together add up
    assert len(together) < len(report.rows)
    for figure in ("replays_ahead", "ahead_seconds"):
        one, other = (sum(getattr(row, figure) for row in rows) for rows in (report.rows, together))
        assert abs(one - other) < 1e-9

    report.save(tmp_path / "report.json")
    report.save(tmp_path / "report.html")
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["ahead"]["in_time"] == 4
    assert sum(row["replays_ahead"] for row in data["rows"]) > 0
    assert '"in_time": 4' in (tmp_path / "report.html").read_text()


def test_without_it_nothing_ran_ahead():
    report = report_of(0)

    assert not any(report.ahead.values())
    assert sum(row.replays for row in report.rows) > 0
    assert all(row.replays_ahead == 0 and row.ahead_seconds == 0 for row in report.rows)
    assert "replayed ahead" not in report.text()
