"""Leaves on the test accelerator, and comparisons of their gradients with the CPU's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from ebb import _testing, stats
from ebb_tests import device as late

needs_captures = pytest.mark.skipif(
    not late.TELLS_OF_CAPTURES, reason="torch tells of no captures but CUDA's"
)

Outputs = torch.Tensor | Sequence[torch.Tensor]


def leaf(device: torch.device | str, *shape: int) -> torch.Tensor:
    """Random numbers, 8 x 32 unless `shape` is given. They are there already."""
    x = torch.randn(*(shape or (8, 32))).to(device).requires_grad_()
    late.synchronize()
    return x


def gradient_on_cpu(program: Callable[[torch.Tensor], Outputs], x: torch.Tensor) -> torch.Tensor:
    """The gradient of the sum of what `program(x)` returns, computed on the CPU."""
    x = x.detach().cpu().requires_grad_()
    return gradient(program(x), x)


def gradient(outputs: Outputs, x: torch.Tensor) -> torch.Tensor:
    """The gradient of the sum of all outputs, without a sum that reads them."""
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    return torch.autograd.grad(outputs, x, [torch.ones_like(y) for y in outputs])[0]


def assert_gradient(
    found: torch.Tensor, program: Callable[[torch.Tensor], Outputs], x: torch.Tensor
) -> None:
    """Checks that `found` has the bits of the gradient that the CPU computes."""
    late.synchronize()
    expected = gradient_on_cpu(program, x)
    assert torch.equal(found.cpu(), expected), f"{found.cpu()} instead of {expected}"


def assert_same(found: Sequence[torch.Tensor], expected: torch.Tensor) -> None:
    """Checks that all of `found` have the bits of `expected`, which is on the CPU."""
    late.synchronize()
    for number, tensor in enumerate(found):
        ours = tensor.detach().cpu()
        assert torch.equal(ours, expected), f"number {number}: {ours} instead of {expected}"


def finish_copies() -> None:
    """Waits for all copies, and lets ebb process them."""
    _testing.drain_offload()
    late.synchronize()
    stats()["offload"]
