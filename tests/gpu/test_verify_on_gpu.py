"""Verify mode gives no false alarm for what kernels leave unwritten, and finds what changed."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import ebb
from ebb_tests.gpus import DRAWS_NUMBERS, NEEDS_GPU, bits_of_eager, same

pytestmark = NEEDS_GPU

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def attend(backend, q, dropout):
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(
            q * 2, q.sin(), q.cos(), dropout_p=dropout, is_causal=True
        )


@DRAWS_NUMBERS
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_attention(backend, dropout):
    q = torch.randn(2, 4, 64, 64, device="cuda", dtype=torch.half, requires_grad=True)
    try:
        attend(backend, q.detach(), dropout)
    except RuntimeError as error:
        pytest.skip(f"this torch has no such kernel for this GPU: {str(error).splitlines()[0]}")

    def run(seed, make_region):
        torch.manual_seed(seed)
        with make_region():
            loss = attend(backend, q, dropout).float().square().sum()
        return torch.autograd.grad(loss, [q])

    for seed in range(3):
        with ebb.verify():
            found = run(seed, ebb.region)
        assert same(found, bits_of_eager(lambda seed=seed: run(seed, torch.enable_grad)))


def test_an_unseen_write_is_found():
    x = torch.randn(1000, device="cuda", requires_grad=True)
    scale = torch.ones(1000, device="cuda")
    with ebb.verify():
        with ebb.region():
            loss = (x * scale).exp().sin().sum()
        scale.data.mul_(2)
        with pytest.raises(ebb.ReplayMismatch, match="aten::"):
            torch.autograd.grad(loss, x)
