"""Profiles on a device: how long kernels took there, not how long the host took to call them."""

from __future__ import annotations

import accelerator
import torch

import ebb


def test_runtimes_are_the_devices(device):
    x = torch.randn(8, 8).to(device).requires_grad_()

    def step():
        with ebb.region(ebb.policies.save_all):
            y = (x.exp() @ x).sin()
        y.sum().backward()

    with accelerator.delayed(20_000, 0):  # microseconds, at random, before each task
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
    with accelerator.delayed(20_000, 0), ebb.record_reports():
        with ebb.region():
            y = (x.exp() @ x).sin().cos()
        y.sum().backward()

        report = ebb.report()

    assert sum(row.replay_seconds for row in report.rows) < 0.005 < report.advice[0].seconds
