"""A model of three blocks with dropout, for tests of ebb.apply."""

from __future__ import annotations

import torch
from torch import nn

import ebb


class Layer(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.2))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + self.mlp(self.norm(x)) * scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return x


def grads(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    model(torch.ones(2, 4)).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def entered() -> set[str]:
    return set(ebb.stats()["regions"])
