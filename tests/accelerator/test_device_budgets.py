"""Budgets of jobs on devices: what other processes have, a limit for each device, steps in bytes
that the allocator counts."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from ebb import _C, apply, plan
from ebb._launch import takeover
from ebb._launch.memory_limit import Limit, free, limit_of, there_is
from ebb._plan.choose.memory_budget import read_budget
from ebb.policies import recompute_all
from ebb_tests import device as late
from ebb_tests.exactness import same_bits

MIB = 1 << 20
WIDTH, ROWS, STEPS = 60, 499, 14  # of sizes that an allocator rounds up


class Split(nn.Module):
    """Its parts are on the devices that are named."""

    def __init__(self, *devices):
        super().__init__()
        torch.manual_seed(0)
        self.devices = devices
        self.layers = nn.ModuleList()
        for device in devices:
            block = nn.Sequential(
                nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
            )
            self.layers.append(block.to(device))

    def forward(self, x):
        for device, layer in zip(self.devices, self.layers, strict=True):
            x = x.to(device)
            x = x + layer(x)
        return x.square().mean()


@pytest.fixture
def install(device):
    yield lambda budget, text: takeover.install_budget(budget, text, (), None)
    takeover.remove()


def steps_of(devices, steps):
    """The model, after each step."""
    gc.collect()  # what a test before this one left
    late.synchronize()
    model = Split(*devices)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    x = torch.randn(ROWS, WIDTH).to(devices[0])
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
        late.synchronize()
        yield model


def parameters_of(model):
    return [one.detach().cpu() for one in model.parameters()]


def train(devices, steps=STEPS):
    """Its parameters, and the most bytes on the first device in each step."""
    models, most = [], []
    torch.accelerator.reset_peak_memory_stats()
    for model in steps_of(devices, steps):
        models.append(model)
        most.append(torch.accelerator.max_memory_allocated())
        torch.accelerator.reset_peak_memory_stats()
    return parameters_of(models[-1]), most


def train_uncounted(device):
    *_, model = steps_of([device], STEPS)
    return parameters_of(model)


def test_other_processes_count(device):
    gc.collect()  # tensors of other tests
    here = torch.ones(MIB, device=device)
    allocated = torch.accelerator.memory_allocated(device)
    ours = torch.accelerator.memory_reserved(device)  # earlier tests may have reserved much
    with late.limited(device=ours + 256 * MIB), late.shared(others=96 * MIB):
        available, rest = there_is(device), free(device)
    assert available == ours + 160 * MIB
    assert rest == available - allocated
    assert here is not None


def test_a_job_beside_another_one_lives(install, device, capsys):
    """The card is large enough for the job, and what another one has leaves half of that."""
    devices = [device] * 8
    expected, most = train(devices, steps=STEPS)
    total = 2 * most[-1]
    install(Limit(), "auto")
    with late.limited(device=total), late.shared(others=total - 6 * most[-1] // 10):
        found, _ = train(devices)

    assert all(map(same_bits, found, expected))
    assert "memory is too small to save all" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["auto", "100MiB", "40%"])
def test_an_allocator_that_counts_nothing_allows_no_budget(text, install, device, capsys):
    expected = train_uncounted(device)
    install(limit_of(text) or read_budget(text), text)
    with late.uncounted():
        found = train_uncounted(device)

    assert all(map(same_bits, found, expected))
    assert capsys.readouterr().err.count("does not count bytes") == 1


def test_an_allocator_that_counts_nothing_allows_no_plan(device):
    model, x = Split(device), torch.randn(ROWS, WIDTH).to(device)
    with late.uncounted(), pytest.raises(ValueError, match="late does not count bytes"):
        plan(model, lambda: model(x).backward(), 0.5)


@pytest.mark.parametrize("share", [0.4, 0.7])
def test_a_budget_is_kept_by_the_allocators_count(install, device, share):
    devices = [device] * 8
    expected, most = train(devices)
    gc.collect()
    late.synchronize()
    before = torch.accelerator.memory_allocated()
    budget = before + int(share * (most[-1] - before))
    install(read_budget(budget), str(budget))

    found, most = train(devices)

    assert all(map(same_bits, found, expected))
    assert most[-1] <= budget


@pytest.mark.parametrize("full", [0, 1])
def test_each_device_has_a_limit_of_its_own(device, full):
    """When one device is full, only regions on that device free what they keep."""
    devices = [device] * 4 + [torch.device("late", 1)] * 4
    model, x = Split(*devices), torch.randn(ROWS, WIDTH).to(device)

    def gradients(loss):
        loss.backward()
        late.synchronize()
        found = [one.grad.cpu() for one in model.parameters()]
        model.zero_grad()
        return found

    expected = gradients(model(x))
    at_rest = [torch.ops.late.device_usage(one) for one in range(2)]
    kept = 4 * 2 * 4 * WIDTH * ROWS * 4  # bytes of one half: what GELU reads, and makes
    before = _C.room_stats()["regions_given_up"]
    for number in range(2):
        limit = at_rest[number] + (kept // 2 if number == full else 8 * kept)
        _C.keep_while_there_is_room(limit, torch.device("late", number))
    try:
        with apply(model, recompute_all, "layers.*"):
            loss = model(x)
            taken = [torch.ops.late.device_usage(one) - at_rest[one] for one in range(2)]
            found = gradients(loss)
    finally:
        _C.keep_while_there_is_room(0)

    assert _C.room_stats()["regions_given_up"] > before
    assert taken[1 - full] > kept
    assert taken[full] < 0.8 * kept
    assert all(map(same_bits, found, expected))
