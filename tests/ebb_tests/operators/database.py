"""The operators of torch's own test database that run on the CPU, and their sample inputs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import set_rng_seed


def dtypes_of(op) -> list[torch.dtype]:
    supported = op.supported_dtypes("cpu")
    wanted = [d for d in (torch.float64, torch.float32, torch.complex128) if d in supported]
    return wanted or sorted(supported, key=str)[:1]


def name_of(op) -> str:
    return f"{op.name}-{op.variant_test_name}" if op.variant_test_name else op.name


ON_THE_CPU = [op for op in op_db if dtypes_of(op)]


def differentiable(op, dtype) -> bool:
    return op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")


def samples_of(op, dtype) -> Iterator:
    # `op.sample_inputs` would search the stack for its caller, which takes 20 ms.
    set_rng_seed(0)
    requires_grad = differentiable(op, dtype)
    return iter(op.sample_inputs_func(op, "cpu", dtype, requires_grad=requires_grad))
