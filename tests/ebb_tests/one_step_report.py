"""Shared by the tests of reports: models, and the report of one of their steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import ebb
from ebb import _C, _testing
from ebb._plan.plan import plan_of
from ebb_tests.programs.planned import Program, planning, pre_ln


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


def under_a_plan(
    make: Callable[[], Program] = pre_ln, budget: float = 0.6, *, measured: bool = True
) -> tuple[Program, ebb.Plan, ebb.Report | None]:
    """A program, its plan, and the report of a step under it. No report: the plan has no regions.

    Args:
        measured: True if the plan measures a step, too.
    """
    found = planning(make)
    plan = plan_of(found.measured, budget, at_least=True)
    with ebb.record_reports(), plan.apply(found.program.model):
        found.program.step()
        if measured:
            plan.measure(found.program.step)
    return found.program, plan, ebb.report() if plan.policies else None
