"""Steps with OFFLOAD that graphs of the test accelerator capture."""

from __future__ import annotations

import functools

import torch

from ebb_tests import device as late
from ebb_tests.device_leaves import assert_gradient, leaf
from ebb_tests.programs import offloaded
from ebb_tests.programs.offloaded import SINES, chain_of_sines


def chain(x):
    return chain_of_sines(x, 4).sum()


forward = functools.partial(offloaded.forward, length=4, policy=SINES)


def step(x):
    return torch.autograd.grad(forward(x), x)[0]


def warm_up(x, stream, steps=2):
    late.synchronize()
    with stream:
        for _ in range(steps):
            step(x)


def warmed_up(device, stream):
    """A leaf with which steps have run on the stream."""
    x = leaf(device)
    warm_up(x, stream)
    return x


def captured(x, stream):
    """A graph of a step, and the gradient that its replays write."""
    with late.Graph().capture(stream) as graph:
        gradient = step(x)
    return graph, gradient


def change(x):
    with torch.no_grad():
        x.copy_(torch.randn(x.shape).to(x.device))
    late.synchronize()


def assert_right(gradient, x):
    assert_gradient(gradient, chain, x)


def assert_replays_are_right(graph, gradient, x, times=1):
    """Replays the graph with new numbers in `x`."""
    for _ in range(times):
        change(x)
        graph.replay()
        assert_right(gradient, x)
