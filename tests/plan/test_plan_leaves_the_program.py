"""`ebb.plan` runs steps, and leaves weights, buffers, gradients and random states as they were."""

from __future__ import annotations

import copy
import warnings

import numpy
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
def test_training_after_a_plan_is_that_without(zeroes):
    model = nn.Sequential(*(Block() for _ in range(4)))
    twin = copy.deepcopy(model)

    expected = losses_and_weights(twin, False, zeroes)
    found = losses_and_weights(model, True, zeroes)

    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def test_gradients_classes_and_settings_are_left():
    model = nn.Sequential(*(Block() for _ in range(4)))
    x = torch.randn(512, 16)
    model(x).sum().backward()
    model[0].up.weight.grad = None
    classes, settings = [type(module) for module in model.modules()], ebb.config.to_dict()
    before = [(p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]

    def step():
        model.zero_grad()
        model(x).square().mean().backward()

    ebb.plan(model, step, 0.7)

    assert [type(module) for module in model.modules()] == classes
    assert ebb.config.to_dict() == settings
    for parameter, (gradient, values) in zip(model.parameters(), before, strict=True):
        assert parameter.grad is gradient
        assert values is None or torch.equal(gradient, values)


def test_state_is_restored_if_no_plan_fits():
    model = nn.Sequential(*(Block() for _ in range(4)))
    x = torch.randn(8, 16)
    before = [value.clone() for value in model.state_dict().values()]
    state = torch.get_rng_state()

    with pytest.raises(ebb.BudgetError):
        ebb.plan(model, lambda: model(x).square().mean().backward(), 0.01)

    assert all(map(torch.equal, model.state_dict().values(), before))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


class Changing(Block):
    """Changes a buffer in each forward."""

    def __init__(self, change, buffer):
        super().__init__()
        self.register_buffer("seen", buffer, persistent=False)
        self.change = change

    def forward(self, x):
        self.change(self)
        return super().forward(x)


CHANGES = {
    "replaced": (lambda m: setattr(m, "seen", m.seen + 1), torch.zeros(())),
    "filled": (lambda m: setattr(m, "seen", torch.ones(3)), None),
    "deleted": (lambda m: delattr(m, "seen") if hasattr(m, "seen") else None, torch.ones(3)),
    "resized": (lambda m: m.seen.resize_(m.seen.numel() + 1), torch.zeros(1)),
    "transposed": (lambda m: m.seen.t_(), torch.rand(2, 3)),
    "of another type": (lambda m: setattr(m.seen, "data", m.seen.data.double()), torch.rand(3)),
    "expanded": (lambda m: None, torch.ones(1).expand(16)),
    "in place": (lambda m: m.seen.add_(1), torch.rand(3)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_buffers_are_restored(change):
    function, buffer = CHANGES[change]
    before = None if buffer is None else buffer.clone()
    model = nn.Sequential(*(Changing(function, buffer) for _ in range(4)))
    x = torch.randn(64, 16)

    ebb.plan(model, lambda: model(x).square().mean().backward(), 1.0)

    for block in model:
        assert block.seen is buffer
        assert "seen" in block._non_persistent_buffers_set
    if buffer is not None:
        assert buffer.dtype == before.dtype
        assert torch.equal(buffer, before)


def test_buffer_in_read_only_memory_is_left(tmp_path):
    numpy.save(tmp_path / "table.npy", numpy.ones(4096, numpy.float32))
    model = nn.Sequential(*(Block() for _ in range(4)))
    with warnings.catch_warnings(action="ignore"):  # torch's, that it must not be written
        table = torch.from_numpy(numpy.load(tmp_path / "table.npy", mmap_mode="r"))
    model.register_buffer("table", table)
    x = torch.randn(64, 16)

    ebb.plan(model, lambda: (model(x) + model.table[:16]).square().mean().backward(), 1.0)

    assert model.table is table


def test_generators_of_modules_are_restored():
    model = nn.Sequential(*(Block() for _ in range(4)))
    model.own = torch.Generator().manual_seed(3)
    x = torch.randn(64, 16)

    def step():
        noise = torch.rand(64, 16, generator=model.own)
        model(x + noise).square().mean().backward()

    ebb.plan(model, step, 1.0)

    assert torch.equal(model.own.get_state(), torch.Generator().manual_seed(3).get_state())


def test_buffer_registered_in_the_step_warns():
    def register(block):
        if "late" not in block._buffers:
            block.register_buffer("late", torch.ones(1))

    model = nn.Sequential(*(Changing(register, torch.ones(1)) for _ in range(4)))
    x = torch.randn(64, 16)

    with pytest.warns(UserWarning, match="buffers of 0 .* registered late; run one"):
        ebb.plan(model, lambda: model(x).square().mean().backward(), 1.0)


def test_lazy_module_raises():
    model = nn.Sequential(nn.LazyLinear(16), *(Block() for _ in range(4)))

    with pytest.raises(ValueError, match=r"0\.weight is uninitialized \(lazy\)"):
        ebb.plan(model, lambda: model(torch.ones(8, 16)).sum().backward(), 0.5)


def test_graph_from_before_the_plan_can_run_backward():
    model = nn.Sequential(*(Block() for _ in range(4)))
    model.register_buffer("mask", torch.rand(16))
    weight = torch.rand(16, requires_grad=True)
    x = torch.randn(64, 16)
    loss = (weight * model.mask).sum()

    ebb.plan(model, lambda: (model(x) * model.mask).square().mean().backward(), 1.0)
    loss.backward()

    assert torch.equal(weight.grad, model.mask)
