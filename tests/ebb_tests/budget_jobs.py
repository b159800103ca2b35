"""Jobs, written without regard to ebb, and their results under a budget."""

from __future__ import annotations

import gc

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ebb import _C
from ebb._launch import budgeted_job
from ebb._plan.profile.measuring import base_bytes
from ebb._region.modules import marks_of
from ebb_tests.exactness import same_bits

WIDTH = 16
ROWS = 256
PLANNED = budgeted_job.number_of_steps([])  # steps until ebb has made a plan
STEPS = PLANNED + 3


class Block(nn.Module):
    def __init__(self, dropout=0.1):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, depth=4, checkpoints=False, block=Block, **settings):
        super().__init__()
        self.layers = nn.ModuleList(block(**settings) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 1)
        self.checkpoints = checkpoints

    def forward(self, x):
        for layer in self.layers:
            if self.checkpoints:
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = self.call(layer, x)
        return self.head(x)

    def call(self, layer, x):
        return layer(x)


class Job:
    """A training job that records its results.

    Attributes:
        bits: for each step its loss, gradients, parameters and random state.
    """

    def __init__(self, model=Net, rows=lambda step: ROWS, **settings):
        torch.manual_seed(0)
        self.model = model(**settings)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.rows = rows
        self.bits = []

    def train(self, steps=STEPS):
        for step in range(len(self.bits), len(self.bits) + steps):
            self.step(step)
        return self

    def step(self, step):
        self.optimizer.zero_grad()
        loss = self.model(self.batch(step)).square().mean()
        loss.backward()
        self.note(loss)
        self.optimizer.step()

    def batch(self, step):
        return torch.randn(self.rows(step), WIDTH)

    def note(self, loss):
        gradients = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        parameters = [p.detach().clone() for p in self.model.parameters()]
        self.bits.append([loss.detach().clone(), *gradients, *parameters, torch.get_rng_state()])


def assert_same(found, expected):
    assert len(found.bits) == len(expected.bits)
    for step, (one, other) in enumerate(zip(found.bits, expected.bits, strict=True)):
        same = all(same_bits(a, b) for a, b in zip(one, other, strict=True))
        assert same, f"step {step}"


def regions(model):
    """The policy of each module that is a region, by name."""
    return {
        name: block.region.policy
        for name, inner in model.named_modules()
        if (block := marks_of(inner)) is not None
        and block.region is not None
        and block.region.policy is not None
    }


def peak_of(job):
    """Peak bytes of the next step, without and with the memory in use before the step."""
    before = base_bytes([job.model], [job.optimizer])
    _C.begin_profile()
    job.step(len(job.bits))
    job.bits.pop()
    now = most = 0
    for _, _, taken in _C.end_profile()["allocations"]:
        now += taken
        most = max(most, now)
    return most, before + most


class Quiet(Job):
    """A job that records no results, since the copies would count as the step's memory."""

    def note(self, loss):
        self.bits.append([])


def step_bytes(job, steps):
    """The peak of each of the next steps, counted by an allocator."""
    _C.use_counting_allocator()
    seen, read = [], _C.tensor_bytes
    most = 0

    def reading():  # what counts begins anew in the midst of a step's end
        nonlocal most
        now, since, is_exact = read()
        most = max(most, since)
        return now, since, is_exact

    _C.tensor_bytes = reading
    try:
        for _ in range(steps):
            gc.collect()
            _C.reset_most_tensor_bytes()
            began, most = read()[0], 0
            job.train(1)
            seen.append(max(most, read()[1]) - began + base_bytes([job.model], [job.optimizer]))
    finally:
        _C.tensor_bytes = read
    return seen
