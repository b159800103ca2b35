"""Plans and profiles on a device whose copies are as late as they may be."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch
from torch import nn

import ebb
from ebb._plan.measure import measure
from ebb._plan.plan import plan_of
from ebb._plan.profile.copies import Link
from ebb._plan.simulate.step import Step
from ebb_tests import device as late
from ebb_tests.exactness import same_bits

FAST = Link(out=1e9, back=1e9, least=1024, room=1 << 40)
BLOCKS = 12
CLOSE = 1.005  # of the peak: the host allocates scalars, which a step of the plan may not


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).sin())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.fixture
def model(device):
    ebb.config.offload.min_bytes = 1024
    return Net().to(device)


@pytest.fixture
def step(device, model):
    x = torch.randn(64, 32).to(device)

    def run():
        model.zero_grad(set_to_none=True)
        model(x).backward()

    return run


def bits(model, step):
    step()
    return [one.grad.cpu() for one in model.parameters()]


def test_copies_are_measured_and_values_that_may_leave_found(model, step):
    found = measure(step, model, ["layers.*"])

    assert found.link.out > 0
    assert found.link.back > 0
    facts = Step(found.profile)
    leaving = sum(map(facts.may_offload, range(len(facts.values))))
    assert leaving == BLOCKS, "what each block reads; the first block's, too"
    assert found.offload_all_ms is not None


@pytest.mark.parametrize("share", [0.25, 0.4, 0.6, 0.8])
@pytest.mark.parametrize("streams", [contextlib.nullcontext, lambda: late.delayed(300, 300)])
def test_a_plan_that_sends_keeps_to_bits_and_bytes(model, step, share, streams):
    expected = bits(model, step)
    measured = replace(measure(step, model, ["layers.*"]), link=FAST, offload_all_ms=None)
    plan = plan_of(measured, share, at_least=True)

    with plan.apply(model), streams():
        before = ebb.stats()["offload"]["bytes_sent"]
        found = bits(model, step)
        sent = ebb.stats()["offload"]["bytes_sent"] - before
        peak = ebb.profile(step, steps=1).peak

    assert all(map(same_bits, found, expected))
    assert peak <= plan.peak * CLOSE
    assert (sent > 0) == bool(plan._regions._settings.offload)
    assert plan._regions._settings.offload or share < 0.6


def test_a_plan_from_the_budget_alone(model, step):
    expected = bits(model, step)

    plan = ebb.plan(model, step, "60%")

    with plan.apply(model):
        assert all(map(same_bits, bits(model, step), expected))
        assert ebb.profile(step, steps=1).peak <= plan.budget * CLOSE


# Profiles: how long kernels took there, not how long the host took to call them


def test_profile_has_runtimes_of_the_device(device):
    x = torch.randn(8, 8).to(device).requires_grad_()

    def step():
        with ebb.region(ebb.policies.save_all):
            y = (x.exp() @ x).sin()
        y.sum().backward()

    with late.delayed(20_000, 0):  # microseconds, at random, before each task
        found = ebb.profile(step, steps=1)

    assert [one.func_name for one in found.operators] == [
        "aten::exp.default",
        "aten::mm.default",
        "aten::sin.default",
    ]
    assert sum(one.runtime for one in found.operators) > 5
    assert found.peak > 0


def test_the_host_waits_at_the_ends_of_a_step_only(device):
    x = torch.randn(8, 8).to(device).requires_grad_()

    def step():
        torch.ops.late.counts()
        with ebb.region(ebb.policies.save_all):
            y = (x.exp() @ x).sin()
        y.sum().backward()
        did = torch.ops.late.counts()
        assert did["record"] == 2 * 3
        assert not {"synchronize", "query"} & did.keys()

    ebb.profile(step, steps=1, warmup=0)


def test_advice_of_a_report_has_the_devices_times(device):
    x = torch.randn(8, 8).to(device).requires_grad_()
    with late.delayed(20_000, 0), ebb.record_reports():
        with ebb.region():
            y = (x.exp() @ x).sin().cos()
        y.sum().backward()

        report = ebb.report()

    assert sum(row.replay_seconds for row in report.rows) < 0.005 < report.advice[0].seconds
