"""Backward may write to a value that the policy keeps and that only autograd holds: as in eager."""

from __future__ import annotations

import pytest
import torch
from exactness import same_bits

import ebb

KEEPS_CLONES = ebb.Policy({"aten::clone": ebb.SAVE})


class Zeroing(torch.autograd.Function):
    """Its backward writes to what it has saved."""

    @staticmethod
    def forward(ctx, x, write):
        ctx.save_for_backward(x)
        ctx.write = write
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        result = gradient * x
        ctx.write(x)
        return result, None


def program(x, write):
    kept = x.exp().clone()  # saved by sin, and by the function whose backward runs first
    return Zeroing.apply(kept, write).sum() + kept.sin().sum()


def outcome(policy, write):
    """The gradient, or what backward raises."""
    x = torch.linspace(-1, 1, 64).requires_grad_()
    if policy is None:
        loss = program(x, write)
    else:
        with ebb.region(policy):
            loss = program(x, write)
    try:
        loss.backward()
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)
    return x.grad


@pytest.mark.parametrize("policy", [KEEPS_CLONES, ebb.policies.save_all], ids=["clones", "all"])
@pytest.mark.parametrize(
    "write",
    [lambda x: x.zero_(), lambda x: x.data.zero_(), lambda x: None],
    ids=["seen", "unseen", "none"],
)
def test_a_write_by_backward_is_eagers(write, policy):
    expected, found = outcome(None, write), outcome(policy, write)

    if isinstance(expected, bool):
        assert found is expected is True
    else:
        assert same_bits(found, expected)
