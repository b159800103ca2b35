"""EBB_BUDGET trains real models as eager does: every loss, gradient, parameter and buffer. Nightly.

`test_real_models.py` trains them under policies; here ebb finds the blocks and plans.
"""

from __future__ import annotations

import pytest
import torch
from ebb_tests.budget_jobs import PLANNED, assert_same
from ebb_tests.programs.real_models import FAMILIES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

STEPS = PLANNED + 3


class Training:
    """A job that trains a model of `FAMILIES`; `bits`: of each step."""

    def __init__(self, name):
        torch.manual_seed(0)
        self.family = FAMILIES[name]
        self.model = self.family.build().train()
        self.optimizer = self.family.optimizer(
            [p for p in self.model.parameters() if p.requires_grad]
        )
        self.bits = []

    def train(self):
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            output = self.model(**self.family.batch())
            loss = output if isinstance(output, torch.Tensor) else output.loss
            loss.backward()
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            state = [*gradients, *self.model.parameters(), *self.model.buffers()]
            self.bits.append([one.detach().clone() for one in (loss, *state)])
            self.optimizer.step()
        return self


# Models without two blocks that take memory, or whose blocks' memory ebb cannot lower.
UNPLANNED = {}


@pytest.mark.parametrize("name", FAMILIES)
def test_bits_are_those_without_a_budget(install, told, name):
    expected = Training(name).train()
    install("80%")

    found = Training(name).train()

    assert_same(found, expected)
    lines = told()
    planned = any("; predicted peak " in line for line in lines)
    print("XX", name, planned, lines[-1][:200] if lines else "")
    assert planned == (name not in UNPLANNED), lines
