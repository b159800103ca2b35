"""ebb.plan runs steps, and training goes on as if it had not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import ebb


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        y = self.down(torch.relu(self.up(self.norm(x))))
        return x + nn.functional.dropout(y, 0.3)


def losses_and_weights(model, plans, zeroes):
    """Five steps, after a plan or without one. `zeroes`: each step zeroes gradients first; else
    gradients are accumulated, also with one that was there before."""
    torch.manual_seed(4)
    x = torch.randn(8, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if not zeroes:
        model(x).square().mean().backward()
    if plans:
        plan = ebb.plan(model, lambda: model(x).square().mean().backward(), "60%")
        plan.apply(model)
    losses = []
    for _ in range(5):
        if zeroes:
            optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *model.state_dict().values(), torch.rand(2)]


@pytest.mark.parametrize("zeroes", [True, False])
def test_training_goes_on_as_without_a_plan(zeroes):
    model = nn.Sequential(*(Block() for _ in range(4)))
    twin = copy.deepcopy(model)

    expected = losses_and_weights(twin, False, zeroes)
    found = losses_and_weights(model, True, zeroes)

    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def test_gradients_are_the_same_tensors():
    model = nn.Sequential(*(Block() for _ in range(4)))
    x = torch.randn(512, 16)
    model(x).sum().backward()
    model[0].up.weight.grad = None
    before = [(p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]

    def step():
        model.zero_grad()
        model(x).square().mean().backward()

    ebb.plan(model, step, 0.7)

    for parameter, (gradient, values) in zip(model.parameters(), before, strict=True):
        assert parameter.grad is gradient
        assert values is None or torch.equal(gradient, values)


def test_all_is_restored_if_no_plan_fits():
    model = nn.Sequential(*(Block() for _ in range(4)))
    x = torch.randn(8, 16)
    before = [value.clone() for value in model.state_dict().values()]
    state = torch.get_rng_state()

    with pytest.raises(ebb.BudgetError):
        ebb.plan(model, lambda: model(x).square().mean().backward(), 0.01)

    assert all(map(torch.equal, model.state_dict().values(), before))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_buffer_that_a_step_replaces():
    class Counting(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen = self.seen + 1
            return super().forward(x)

    model = nn.Sequential(*(Counting() for _ in range(4)))
    buffers = [block.seen for block in model]

    ebb.plan(model, lambda: model(torch.ones(8, 16)).square().mean().backward(), 0.8)

    assert [block.seen for block in model] == buffers
    assert all(block.seen == 0 for block in model)
