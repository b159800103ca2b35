"""xformers: selective checkpointing with a list of operators, and with a policy function.

With torch 2.13, xformers 0.0.35 raises an IndexError without ebb, so the tests compare with eager.
"""

from __future__ import annotations

import pytest
import torch

from ebb_tests.frameworks.own_checkpointing import plain, same, stack, taken_over, train

xformers = pytest.importorskip("xformers.checkpoint", reason="needs xformers")


def some_products(ctx, op, *args, **kwargs):
    return op is torch.ops.aten.addmm.default


@pytest.mark.parametrize("policy", [None, ["aten.addmm.default"], some_products])
def test_selective_checkpoint(policy):
    eager = train(stack(plain))

    with taken_over(finds_blocks=True):
        found = train(stack(lambda block, x: xformers.checkpoint(block, x, policy_fn=policy)))

    assert same(found, eager)
    assert found.entered == 4
    assert found.replayed > 0
    assert found.held < eager.held
