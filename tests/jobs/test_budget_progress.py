"""Which step a budget measures: told in a terminal, and nowhere else."""

from __future__ import annotations

import io
import re
import sys

import pytest
from budget_jobs import PLANNED, Job, assert_same


class Terminal(io.StringIO):
    def isatty(self):
        return True


def told_in_terminal(monkeypatch):
    """What a job of which a budget is planned writes there, and the job."""
    with monkeypatch.context() as during:
        during.setattr(sys, "stderr", Terminal())
        job = Job().train(PLANNED)
        return sys.stderr.getvalue(), job


def test_a_line_that_is_written_over(install, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)  # as if rich were not installed
    expected = Job().train(PLANNED)
    install("60%")

    text, found = told_in_terminal(monkeypatch)

    assert_same(found, expected)
    steps = re.findall(r"\r\x1b\[Kebb: EBB_BUDGET=60%: profiling: step (\d+) of (\d+)", text)
    assert steps == [(str(step), str(PLANNED)) for step in range(2, PLANNED + 1)]
    lines = text.rpartition("\r\x1b[K")[2].splitlines()
    assert lines[0].startswith("ebb: EBB_BUDGET=60%: ")
    assert "; predicted peak " in lines[0]


def test_the_bar_of_rich(install, monkeypatch):
    pytest.importorskip("rich")
    install("60%")

    text, _ = told_in_terminal(monkeypatch)

    assert re.findall(rf"(\d)/{PLANNED}", text)[-1] == str(PLANNED)
    assert set(re.findall(rf"(\d)/{PLANNED}", text)) == set(map(str, range(2, PLANNED + 1)))
    assert "; predicted peak " in text.splitlines()[-1]


def test_two_lines_where_there_is_no_terminal(install, capsys):
    install("60%")

    Job().train(PLANNED)

    first, last = capsys.readouterr().err.splitlines()
    assert "ebb profiles 6 steps" in first
    assert "; predicted peak " in last
