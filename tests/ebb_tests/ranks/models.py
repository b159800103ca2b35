"""Small models for the tests of strategies, and what a training of one gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

WRAPPER = "_checkpoint_wrapped_module."  # in names below torch's checkpoint_wrapper
STEPS = 3
WIDTH = 8


class Block(nn.Module):
    def __init__(self, width=WIDTH, dropout=0.1):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(self.act(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, depth=3, width=WIDTH, last=1, **settings):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(Block(width, **settings) for _ in range(depth))
        self.last = nn.Linear(width, last)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x).tanh()


def batch(step, rows=4, width=WIDTH, same=False):
    """Another one for each rank and step."""
    seed = 100 * step + (0 if same else dist.get_rank())
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def forward_and_backward(model, step, same=False):
    loss = model(batch(step, same=same)).square().mean()
    loss.backward()
    return loss


def with_the_same_batch(model, step):
    """On both ranks."""
    return forward_and_backward(model, step, same=True)


class Training(NamedTuple):
    """What a strategy trains, and how: `step_of(model, step)` gives the loss of a step."""

    model: nn.Module
    step_of: Callable[[nn.Module, int], torch.Tensor] = forward_and_backward
    optimizer: Any = None

    def run(self, steps):
        return train_steps(self.model, steps=steps, step_of=self.step_of, optimizer=self.optimizer)


def train_steps(model, *, steps=STEPS, same=False, optimizer=None, step_of=None):
    """Losses, gradients, parameters and buffers of each step, by name."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.05)
    results = {}

    def add(step, kind, tensors):
        for name, tensor in tensors:
            name = name.replace(WRAPPER, "")
            results[f"{step} {kind} {name}"] = plain(tensor)

    for step in range(steps):
        optimizer.zero_grad()
        loss = step_of(model, step) if step_of else forward_and_backward(model, step, same)
        results[f"{step} loss"] = plain(loss)
        gradients = ((name, parameter.grad) for name, parameter in model.named_parameters())
        add(step, "gradient of", gradients)
        optimizer.step()
        add(step, "parameter", model.named_parameters())
        add(step, "buffer", model.named_buffers())
    return results


def plain(result):
    """A tensor's, or number's, part of this rank, as it is now; None stays None."""
    if hasattr(result, "to_local"):
        result = result.to_local()
    if isinstance(result, funcol.AsyncCollectiveTensor):
        result = result.wait()
    return result if result is None else torch.as_tensor(result).detach().clone()
