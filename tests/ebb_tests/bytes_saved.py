"""Shared by the tests of policies: a count of the bytes that a policy saves, and a module."""

from __future__ import annotations

import torch
from torch import nn

import ebb
from ebb_tests.exactness import same_bits


def saved(rules, function, *args, **region):
    """Bytes that the policy saves of the results of `function`. Also compares gradients."""
    policy = rules if isinstance(rules, ebb.Policy) else ebb.Policy(rules)
    inputs = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    expected = torch.autograd.grad(function(*args).sum(), inputs)
    ebb.reset_stats()
    with ebb.region(policy, **region):
        y = function(*args)
    found = torch.autograd.grad(y.sum(), inputs)
    assert all(same_bits(f, e) for f, e in zip(found, expected, strict=True))
    return ebb.stats()["total"]["bytes_packed"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.act = nn.GELU()
        self.down = nn.Linear(4, 4)

    def forward(self, x):
        return self.down(self.act(self.up(x))).sin() + x
