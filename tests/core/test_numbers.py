"""Ops with a Python number, which a recipe keeps as a number."""

from __future__ import annotations

import pytest
import torch

from ebb_tests.exactness import assert_exact

NUMBERS = [3, -7, 2**40, True, False, 0.1, float("inf"), -0.0, 1e-300, 1.5 - 2.5j]


@pytest.mark.parametrize("number", NUMBERS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.complex64])
def test_an_op_with_a_number_is_recomputed_with_that_number(
    number: complex, dtype: torch.dtype
) -> None:
    # Integers do not need grad: the number then decides the dtype of the product.
    grad = dtype.is_floating_point or dtype.is_complex
    x = (torch.arange(6.0).reshape(2, 3) + 1).to(dtype).requires_grad_(grad)
    w = torch.full((2, 3), 0.5, requires_grad=True)

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x * number + number) * w
        return y.abs().sin().sum()

    assert_exact(step, [x, w])
