"""Equal blocks get the same policy, also if a router gives them different numbers of rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ebb
from ebb_tests.exactness import same_bits

BLOCKS, WIDTH, ROWS = 8, 16, 2048


class Experts(nn.Module):
    """A mixture of experts: how many rows an expert gets depends on the data and the weights."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)
        self.up = nn.ModuleList(nn.Linear(WIDTH, 4 * width) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(4 * width, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        weight, chosen = self.gate(y).softmax(-1).topk(1, -1)
        for number, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            (rows,) = (chosen[:, 0] == number).nonzero(as_tuple=True)
            made = down(nn.functional.gelu(up(y[rows])))
            x = x.index_add(0, rows, made * weight[rows])
        return x


def built(*blocks: nn.Module):
    model = nn.Sequential(*blocks)
    x = torch.randn(ROWS, WIDTH)

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        model(x).square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    return model, step


@pytest.mark.parametrize("budget", [0.6, 0.8])
def test_eight_blocks_of_experts_have_at_most_three_tables(tmp_path, budget):
    torch.manual_seed(0)
    model, step = built(*(Experts() for _ in range(BLOCKS)))
    expected = step()

    plan = ebb.plan(model, step, budget, modules="[0-9]")
    plan.save(tmp_path / "p.toml")

    assert len(plan.policies) >= BLOCKS // 2
    assert (tmp_path / "p.toml").read_text().count("[[regions]]") == len(plan._regions._groups())
    # at most a table for each front's choice, and one for a block that fills the rest
    assert len(plan._regions._groups()) <= 3
    found = ebb.ModulePolicies.load(tmp_path / "p.toml")
    assert found.policies == plan.policies
    with found.apply(model):
        assert all(map(same_bits, step(), expected))
        profile = ebb.profile(step, steps=1)
    assert profile.peak <= plan.peak * 1.02 <= plan.plain_peak


def test_blocks_of_different_widths_have_different_policies():
    torch.manual_seed(0)
    model, step = built(Experts(), Experts(), Experts(2 * WIDTH), Experts(2 * WIDTH))

    numbers = ebb.plan(model, step, 0.7, modules="[0-9]")._chooser.alike

    assert numbers["0"] == numbers["1"] != numbers["2"] == numbers["3"]
