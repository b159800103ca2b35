"""PAGE below dispatch modes: what ebb does for itself no mode sees, and no region records."""

from __future__ import annotations

import contextlib

import pytest
import torch

import ebb
from ebb import _C
from ebb_tests.programs.paged import Seen, gradients, paged, region

ASKED = {
    "step_ok": ebb.experimental.paging.step_ok,
    "errors": _C.paging_errors,
    "found_inf": lambda: ebb.experimental.paging.found_inf("cpu"),
    "reset": ebb.experimental.paging.reset,
}


@pytest.mark.parametrize("inside", [contextlib.nullcontext, region], ids=["outside", "in a region"])
@pytest.mark.parametrize("name", ASKED)
def test_asking(name, inside, net):
    x, n = net.inputs(0), torch.tensor(20)
    gradients(net, x, n, region)
    loss = net(x, n, region)
    with Seen() as seen, inside():
        ASKED[name]()
    assert seen.names == []
    assert loss is not None


def test_a_step_that_begins_makes_pools(net):
    loss = net(net.inputs(0), torch.tensor(20), region)  # is recorded
    with Seen() as seen:
        bracket = ebb.experimental.paging.step()
        bracket.__enter__()
    assert seen.names == []
    assert ebb.stats()["paging"]["pools"] != []
    assert loss is not None
    bracket.__exit__(None, None, None)


def test_a_step_that_ends_makes_pools(net):
    bracket = ebb.experimental.paging.step()
    bracket.__enter__()
    gradients(net, net.inputs(0), torch.tensor(20), region)
    with Seen() as seen:
        bracket.__exit__(None, None, None)
    assert seen.names == []
    assert ebb.stats()["paging"]["pools"] != []


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "in pools"])
def test_what_comes_back(recorded):
    x, n = torch.randn(40, 8, requires_grad=True), torch.tensor(20)
    for _ in range(1 if recorded else 2):
        kept = paged(x, n)
        with Seen() as seen:
            found = kept[0][0].saved_tensors[0]
    assert set(seen.names) <= {"aten::detach"}  # autograd's
    assert torch.equal(found[:20], x[:20] + 1)


def test_a_copy_of_what_stays():
    """Of a layer that is not paged, before it is written."""
    w = torch.randn(8, 8, requires_grad=True)
    x, n = torch.randn(40, 8), torch.tensor(20)

    def step(mode):
        with ebb.experimental.paging.step():
            with ebb.region(ebb.Policy({"aten::mm": ebb.PAGE})):
                h = ebb.experimental.mark_rows(x @ w, n)
                y = h.exp().cos()
                kept = h.sin()
                with mode:
                    h.data.mul_(2)
            torch.autograd.grad(y[:20].sum(), [w])
        return kept

    for _ in range(2):
        step(contextlib.nullcontext())
    seen = Seen()
    step(seen)
    assert ebb.stats()["paging"]["resident"] == 2
    assert "aten::copy_" not in seen.names
    assert any("mul_" in name for name in seen.names)
