"""DeepSpeed's own checkpointing beside regions, and offloading in one of both only."""

from __future__ import annotations

import pytest
import torch

import ebb

checkpointing = pytest.importorskip(
    "deepspeed.runtime.activation_checkpointing.checkpointing", reason="needs DeepSpeed"
)


def test_offloading_twice_is_refused(monkeypatch):
    monkeypatch.setattr(checkpointing, "CPU_CHECKPOINT", True)
    with (
        pytest.raises(RuntimeError, match=r"DeepSpeed.*cpu_checkpointing to false"),
        ebb.region(ebb.policies.offload_inputs),
    ):
        pass
    with ebb.region(ebb.policies.recompute_all):
        pass


@pytest.mark.parametrize("where", ["inside", "around"])
def test_a_region_and_deepspeeds_function(where):
    w = torch.randn(16, 16, requires_grad=True)
    x = torch.randn(4, 16, requires_grad=True)

    def block(x):
        return (x @ w).sin().exp()

    @ebb.region(ebb.policies.recompute_all)
    def block_in_region(x):
        return block(x)

    def program():
        if where == "inside":
            return checkpointing.checkpoint(block_in_region, x).sum()
        with ebb.region(ebb.policies.recompute_all):
            return checkpointing.checkpoint(block, x).sum()

    program().backward()
    found = w.grad.clone(), x.grad.clone()
    w.grad = x.grad = None
    block(x).sum().backward()
    assert torch.equal(found[0], w.grad)
    assert torch.equal(found[1], x.grad)
