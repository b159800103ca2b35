"""Small programs to plan, with padded buffers of which some rows are valid.

They run their steps with ``paging.run_step``, so plans may page. See `planned_programs`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

import ebb
from ebb._plan.choose.chooser import Chooser
from ebb._plan.profile.copies import Pager
from ebb._plan.simulate.simulator import Simulator
from ebb_tests.programs.planned import Planning, Program, built, measured

WIDTH, HIDDEN, TOKENS = 32, 64, 192
PAGER = Pager(speed=1e6)


class Experts(nn.Module):
    """An MLP on padded rows."""

    def __init__(self, gated: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False) if gated else None
        self.norm = nn.LayerNorm(HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, rows: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        rows = ebb.experimental.mark_rows(rows, count)
        hidden = F.silu(self.up(rows))
        if self.gate is not None:
            hidden = hidden * self.gate(rows)
        return self.down(torch.tanh(self.norm(hidden)))


class Layer(nn.Module):
    """Sends a varying part of the tokens to the experts."""

    def __init__(self, share: float, gated: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.score = nn.Linear(WIDTH, 1, bias=False)
        self.experts = Experts(gated)
        self.share = share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        score = self.score(normed).flatten()
        wanted = score > score.detach().quantile(1 - self.share)
        order = (~wanted).to(torch.int64).argsort(stable=True)
        count = wanted.sum()
        lives = (torch.arange(len(x)) < count).unsqueeze(1)
        rows = torch.where(lives, normed.index_select(0, order), 0)
        made = torch.where(lives, self.experts(rows, count), 0)
        weighted = made * score.index_select(0, order).sigmoid().unsqueeze(1)
        return x + torch.zeros_like(x).index_add(0, order, weighted)


class Mixing(nn.Module):
    """Has operators that mix valid rows with padding rows, and writes to parts of values."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lives = (torch.arange(len(x)) < 50).unsqueeze(1)
        rows = ebb.experimental.mark_rows(torch.where(lives, x, 0), torch.tensor(50))
        hidden = torch.tanh(self.up(rows))
        gated = hidden.exp() * torch.linspace(0, 1, len(x)).unsqueeze(1)
        part = hidden.clone()
        part[50:] = 0
        part = part * part.sum(0, keepdim=True).tanh()
        return x + torch.where(lives, self.down(torch.sin(gated) + part), 0)


def in_steps(model: nn.Module, **arguments: bool) -> Callable[[], object]:
    x = torch.randn(TOKENS, WIDTH)

    def forward_and_backward() -> None:
        model(x).square().mean().backward()

    return lambda: ebb.experimental.paging.run_step(forward_and_backward, **arguments)


def experts() -> Program:
    """Each region contains only operators on padded rows."""
    model = nn.Sequential(*(Layer(0.2 + 0.05 * place) for place in range(4)))
    return Program(model, in_steps(model), ("*.experts",))


def layers() -> Program:
    """Each region also contains the operators that create and read padded rows."""
    model = nn.Sequential(*(Layer(0.25, gated=True) for place in range(4)))
    return Program(model, in_steps(model), ("[0-9]",))


def fixed_order() -> Program:
    """Steps with `fixed_order`: ebb does not page the last layer."""
    model = nn.Sequential(*(Layer(0.3) for place in range(3)))
    return Program(model, in_steps(model, fixed_order=True), ("*.experts",))


def mixing() -> Program:
    """A model with marked values that ebb cannot page: operators that may mix rows save them."""
    model = nn.Sequential(*(Mixing() for _ in range(4)))
    return Program(model, in_steps(model), ("[0-9]",))


PAGED = (experts, layers, fixed_order, mixing)


@functools.cache
def paging(make: Callable[[], Program], pager: Pager = PAGER) -> Planning:
    """Like `planned_programs.planning`, for plans that may page."""
    program = built(make)
    if make is fixed_order:
        pager = replace(pager, fixed_order=True)
    found = replace(measured(program), pager=pager)
    return Planning(program, found, Chooser(Simulator(found)))
