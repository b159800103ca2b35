"""Budgets that end with their test."""

from __future__ import annotations

import pytest

from ebb._launch import takeover
from ebb._plan.budget import read_budget


@pytest.fixture
def install():
    def with_budget(text, *patterns, calls=None):
        return takeover.install_budget(read_budget(text), str(text), patterns, calls)

    yield with_budget
    takeover.remove()


@pytest.fixture
def told(capsys):
    def lines():
        return [
            line.removeprefix("ebb: EBB_BUDGET=")
            for line in capsys.readouterr().err.splitlines()
            if line.startswith("ebb: EBB_BUDGET")
        ]

    return lines
