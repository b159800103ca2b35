"""EBB_BUDGET trains real models as eager does: every loss, gradient, parameter and buffer. Nightly.

`test_real_models.py` trains them under policies; here ebb finds the blocks and plans.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from ebb_tests.budget_jobs import PLANNED
from ebb_tests.programs.real_models import FAMILIES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def digest(tensors):
    """A hash of the tensors' bytes, without a new tensor, which would count as the step's."""
    found = hashlib.sha1()
    for one in tensors:
        found.update(b"none" if one is None else np.ascontiguousarray(one.detach().numpy()))
    return found.hexdigest()


def train(name, steps=PLANNED + 3):
    """Trains a model; for each step a digest of its loss, gradients, parameters and buffers."""
    torch.manual_seed(0)
    family = FAMILIES[name]
    model = family.build().train()
    optimizer = family.optimizer([p for p in model.parameters() if p.requires_grad])
    bits = []
    for _ in range(steps):
        optimizer.zero_grad()
        output = model(**family.batch())
        loss = output if isinstance(output, torch.Tensor) else output.loss
        loss.backward()
        gradients = [p.grad for p in model.parameters()]
        state = [*gradients, *model.parameters(), *model.buffers(), torch.get_rng_state()]
        bits.append(digest([loss, *state]))
        optimizer.step()
        del output, loss, gradients, state
    return bits


@pytest.mark.parametrize("name", FAMILIES)
def test_bits_are_those_without_a_budget(install, told, name):
    expected = train(name)
    install("80%")

    found = train(name)

    lines = told()
    assert found == expected
    assert any("; predicted peak " in line or "is too small" in line for line in lines), lines
