"""Shared by the tests of OFFLOAD."""

from __future__ import annotations

import torch

import ebb

OFFLOAD_ALL = ebb.Policy(default=ebb.OFFLOAD, inputs=ebb.OFFLOAD)
SINES = ebb.Policy({"aten::sin": ebb.OFFLOAD})

POLICIES = {
    "all": OFFLOAD_ALL,
    "inputs": ebb.policies.offload_inputs,
    "products": ebb.Policy({"aten::*mm": ebb.OFFLOAD, "aten::gelu": ebb.SAVE}),
    "mixed": ebb.Policy(
        {"aten::*mm": ebb.OFFLOAD, "aten::native_layer_norm": ebb.SAVE}, inputs=ebb.OFFLOAD
    ),
}


def chain_of_sines(x, length=3):
    """Each function's input is saved; each but the first is a result that nothing else holds."""
    for _ in range(length):
        x = x.sin().cos()
    return x


def finish_copies(fake):
    """All queued copies run, and the engine notices, as it does at each pack and unpack."""
    fake.advance(1 << 30)
    ebb.offload.stats()


def gradients(loss, inputs):
    return torch.autograd.grad(loss, inputs)
