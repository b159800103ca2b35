"""A job that trains one model of the table `MODELS`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from budget_jobs.job import Job

Loss = Callable[[], Tensor]
Made = tuple[nn.Module, Loss]
W = 32  # width


class ModelJob(Job):
    """Trains the model that `made` builds."""

    steps = 32  # enough if ebb measures a second time with other regions
    expected = "any"
    made: Callable[[], Made]

    def build(self) -> nn.Module:
        module, self.of_batch = type(self).made()
        return module.train()

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-3)

    def loss(self, step: int) -> Tensor:
        return self.of_batch()


class SparseJob(ModelJob):
    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-2)

    def note(self, *losses: Tensor) -> None:
        self._digests["losses"].update(repr([loss.item() for loss in losses]).encode())


MODELS: dict[str, tuple[Callable[[], Made], type[ModelJob]]] = {}


def model(name: str, job: type[ModelJob] = ModelJob) -> Callable[[Any], Any]:
    """Decorator that adds a model to MODELS.

    Decorates a function that returns a module and a function of its loss; or a module's class,
    whose attribute `shape` is the shape of a batch, (256, W) by default.
    """

    def put(made: Any) -> Any:
        def of_class() -> Made:
            module = made()
            shape = getattr(made, "shape", (256, W))
            return module, lambda: module(torch.randn(shape)).square().mean()

        MODELS[name] = of_class if isinstance(made, type) else made, job
        return made

    return put


class Stack(nn.Module):
    """Blocks, one after the other."""

    def __init__(self, depth: int, block: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(number) for number in range(depth))

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


class Perceptron(nn.Module):
    def __init__(self, width: int = W, activation: Callable[[Tensor], Tensor] = F.gelu) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.activation(self.up(self.norm(x))))
        return y


def stack(name: str, depth: int, block: Callable[[int], nn.Module], *shape: int) -> None:
    def made() -> Made:
        module = Stack(depth, block)
        return module, lambda: module(torch.randn(shape)).square().mean()

    model(name)(made)
