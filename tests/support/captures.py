"""Steps with OFFLOAD that graphs of the test accelerator capture."""

from __future__ import annotations

import accelerator
import torch
from device_leaves import assert_gradient

import ebb

SINES = ebb.Policy({"aten::sin": ebb.OFFLOAD})


def chain(x, length=4):
    for _ in range(length):
        x = x.sin().cos()
    return x.sum()


def forward(x):
    with ebb.region(SINES):
        return chain(x)


def step(x):
    return torch.autograd.grad(forward(x), x)[0]


def warm_up(x, stream, steps=2):
    accelerator.synchronize()
    with stream:
        for _ in range(steps):
            step(x)


def captured(x, stream):
    """A graph of a step, and the gradient that its replays write."""
    graph = accelerator.Graph()
    with graph.capture(stream):
        gradient = step(x)
    return graph, gradient


def change(x):
    with torch.no_grad():
        x.copy_(torch.randn(x.shape).to(x.device))
    accelerator.synchronize()


def assert_right(gradient, x):
    assert_gradient(gradient, chain, x)


def assert_replays_are_right(graph, gradient, x, times=1):
    """Replays the graph with new numbers in `x`."""
    for _ in range(times):
        change(x)
        graph.replay()
        assert_right(gradient, x)
