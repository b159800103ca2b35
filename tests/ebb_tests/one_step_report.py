"""Shared by the tests of reports: a small model, and the report of one of its steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ebb
from ebb import _C, _testing


@pytest.fixture(autouse=True)
def no_reports_yet():
    _testing.clear_reports()
    yield
    assert not _C.is_reporting()
    _testing.clear_reports()


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.SiLU()
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


def blocks(count: int = 4) -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(count)))


def step(model: nn.Module) -> torch.Tensor:
    x = torch.randn(8, 16)
    model(x).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def recorded(policy: ebb.Policy, model: nn.Module | None = None) -> ebb.Report:
    model = blocks() if model is None else model
    with ebb.record_reports(), ebb.apply(model, policy, "?"):
        step(model)
    return ebb.report()
