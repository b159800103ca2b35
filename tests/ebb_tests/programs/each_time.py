"""Shared by the tests of RECOMPUTE_EACH_TIME."""

from __future__ import annotations

import contextlib

import torch

import ebb
from ebb import RECOMPUTE, RECOMPUTE_EACH_TIME, SAVE, Policy, Rule
from ebb_tests.exactness import replayed, same_bits
from ebb_tests.memory_use import peak_bytes

EACH_TIME = Policy(default=RECOMPUTE_EACH_TIME)
ALL = ebb.policies.recompute_all
COUNT, SIZE = 12, 1 << 14  # values in the chain, and elements of each
NBYTES = SIZE * 8


def each_time(*ops, but=(), default=RECOMPUTE):
    """A policy: RECOMPUTE_EACH_TIME for `ops`, RECOMPUTE for `but`, `default` for others."""
    rules = dict.fromkeys(but, RECOMPUTE) | dict.fromkeys(ops, RECOMPUTE_EACH_TIME)
    return Policy(rules, default=default)


def held_every(k):
    return Policy([Rule("aten::sin", RECOMPUTE, every=k)], default=RECOMPUTE_EACH_TIME)


def chain(region, count=COUNT):
    """A chain of sines in `region`. Autograd saves the input of each."""
    x = torch.linspace(0, 3, SIZE, dtype=torch.float64, requires_grad=True)
    with region:
        h = x
        for _ in range(count):
            h = h.sin()
        loss = h.sum()
    return x, loss


def backward_of_chain(policy):
    """The chain's gradient under `policy`, and the peak of the bytes that backward allocates."""
    x, loss = chain(ebb.region(policy))
    peak = peak_bytes(loss.backward)
    return x.grad, peak


def recipes_run(policy, program, *inputs):
    """The number of replays in the backward of `program`. Compares gradients with eager's."""

    def gradients(region):
        torch.manual_seed(1)
        with region:
            outputs = program(*inputs)
        outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        loss = sum(o.sum() for o in outputs)
        del outputs
        before = replayed()
        found = torch.autograd.grad(loss, inputs, allow_unused=True)
        return found, replayed() - before

    expected, _ = gradients(contextlib.nullcontext())
    found, count = gradients(ebb.region(policy))
    assert all(map(same_bits, found, expected))
    return count


def written(x):
    h = x * 2
    h.add_(1)
    before = (h + 3).sin()
    h.mul_(3).neg_()
    return before + h.sin()


WRITES = {
    "all": EACH_TIME,
    "writes": each_time("aten::*_"),
    "all but writes": each_time("*", but=["aten::*_"]),
    "first": each_time("aten::add_"),
    "last": each_time("aten::neg_"),
    "made": each_time("aten::mul.Tensor"),
    "with saved ones": Policy({"aten::add_": SAVE}, default=RECOMPUTE_EACH_TIME),
    "on saved ones": Policy({"aten::mul.Tensor": SAVE}, default=RECOMPUTE_EACH_TIME),
}
