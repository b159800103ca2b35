"""Rows, reports and verify mode follow one graph: each keeps its own data with the handles."""

from __future__ import annotations

import contextlib

import pytest
import torch

import ebb

LIVE = 5


def program(x):
    h = torch.nn.functional.gelu(x * 2)
    h = h + h.amax(-1, keepdim=True)  # its backward reads two values with rows
    return (h.sin() * (torch.arange(8) < LIVE)[:, None]).square().sum()


def gradient(policy=None):
    torch.manual_seed(0)
    leaf = torch.randn(8, 16, requires_grad=True)
    x = leaf * 1.0
    with ebb.region(policy) if policy else contextlib.nullcontext():
        x = x.clone()
        if policy:
            ebb.experimental.mark_rows(x, torch.tensor(LIVE))
        loss = program(x)
    loss.backward()
    return leaf.grad


@pytest.mark.parametrize("verifies", [False, True])
@pytest.mark.parametrize(
    "policy",
    [
        ebb.Policy([], default=ebb.PAGE),
        ebb.Policy({"aten::mul": ebb.PAGE}),
        ebb.Policy({"aten::sin": ebb.PAGE, "aten::gelu": ebb.SAVE}),
        ebb.policies.recompute_all,
    ],
    ids=["all", "product", "sine", "none"],
)
def test_rows_reports_and_verify_work_together(policy, verifies):
    expected = gradient()
    for _ in range(3):  # the first step is recorded, the others use pools
        with ebb.record_reports(), ebb.verify() if verifies else contextlib.nullcontext():
            found = gradient(policy)
            report = ebb.report()

        compared = slice(LIVE) if verifies else slice(None)  # verify mode shows padding as NaN
        assert torch.equal(found[compared], expected[compared])
        assert {row.fate for row in report.rows} & {"recomputed", "paged", "saved"}


def test_pages_are_used_and_reported():
    policy = ebb.Policy({"aten::mul": ebb.PAGE})
    expected = gradient()
    for _ in range(3):
        ebb.reset_stats()
        with ebb.record_reports():
            assert torch.equal(gradient(policy), expected)
            assert ebb.stats()["total"]["bytes_paged"] + ebb.stats()["total"]["bytes_saved"] > 0
