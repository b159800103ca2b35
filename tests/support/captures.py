"""Steps with OFFLOAD that graphs of the test accelerator capture."""

from __future__ import annotations

import accelerator
import torch

import ebb

SINES = ebb.Policy({"aten::sin": ebb.OFFLOAD})


def chain(x, length=4):
    for _ in range(length):
        x = x.sin().cos()
    return x.sum()


def random(device, size=32):
    return torch.randn(8, size).to(device).requires_grad_()


def forward(x, length=4):
    with ebb.region(SINES):
        return chain(x, length)


def step(x, length=4):
    return torch.autograd.grad(forward(x, length), x)[0]


def expected(x, length=4):
    x = x.detach().cpu().requires_grad_()
    return torch.autograd.grad(chain(x, length), x)[0]


def warm_up(x, stream, length=4, steps=2):
    accelerator.synchronize()
    with stream:
        for _ in range(steps):
            step(x, length)


def captured(x, stream, length=4):
    graph = accelerator.Graph()
    with graph.capture(stream):
        gradient = step(x, length)
    return graph, gradient


def change(x):
    with torch.no_grad():
        x.copy_(torch.randn(x.shape).to(x.device))
    accelerator.synchronize()
