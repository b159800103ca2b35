"""Every differentiable operator in torch's own database, in a region, bit for bit as in eager.

The fast run takes the first sample of each operator; `make test-full` takes them all.
"""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from exactness import same_bits
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

import ebb

DIFFERENTIABLE = [op for op in op_db if op.supports_autograd]
POLICIES = {
    "recompute_all": ebb.policies.recompute_all,
    "save_all": ebb.policies.save_all,
    "mixed": ebb.Policy({f"aten::{initial}*": ebb.SAVE for initial in "acegmps_"}),
}


def gradients(op, sample, region):
    """Outputs and input gradients; None where eager itself refuses the sample."""

    def fresh(t):
        if not isinstance(t, torch.Tensor):
            return t
        return t.detach().clone().requires_grad_(t.requires_grad)

    def used(t):
        return t * 1 if isinstance(t, torch.Tensor) and t.requires_grad else t

    inputs = tree_map(fresh, (sample.input, sample.args, sample.kwargs))
    leaves = [t for t in tree_leaves(inputs) if isinstance(t, torch.Tensor) and t.requires_grad]
    torch.manual_seed(3)
    with region:
        first, args, kwargs = tree_map(used, inputs)  # so that something must be recomputed
        out = op(first, *args, **kwargs)
    if sample.output_process_fn_grad is not None:
        out = sample.output_process_fn_grad(out)
    outs = [o for o in tree_leaves(out) if isinstance(o, torch.Tensor) and o.requires_grad]
    values = [o.detach().to_dense() if o.layout != torch.strided else o.detach() for o in outs]
    values = [v.clone() for v in values]
    if outs and leaves:
        torch.manual_seed(4)
        weights = [torch.ones_like(o) for o in outs]
        values += torch.autograd.grad(outs, leaves, weights, allow_unused=True)
    return [v if v is None or v.layout == torch.strided else v.to_dense() for v in values]


def check(op, dtype, policy, samples):
    for sample in samples:
        try:
            expected = gradients(op, sample, contextlib.nullcontext())
            again = gradients(op, sample, contextlib.nullcontext())
        except Exception:
            continue  # eager refuses this sample
        if not all(same_bits(a, b) for a, b in zip(expected, again, strict=True)):
            continue  # eager does not reproduce itself: lstsq on one thread and the like
        actual = gradients(op, sample, ebb.region(policy))
        assert len(actual) == len(expected)
        for a, e in zip(actual, expected, strict=True):
            assert same_bits(a, e), (op.name, op.variant_test_name, dtype)


def samples_of(op, dtype, count):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            samples = iter(op.sample_inputs("cpu", dtype, requires_grad=True))
            return [s for s, _ in zip(samples, range(count), strict=False)]
        except Exception:  # a sample generator that needs a package which is not installed
            return []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("policy", POLICIES)
def test_first_sample_of_every_operator(policy):
    swept = 0
    for op in DIFFERENTIABLE:
        if torch.float64 in op.supported_dtypes("cpu"):
            check(op, torch.float64, POLICIES[policy], samples_of(op, torch.float64, 1))
            swept += 1
    assert swept > 400


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.complex128], ids=str)
def test_every_sample_of_every_operator(policy, dtype):
    for op in DIFFERENTIABLE:
        if dtype in op.supported_dtypes("cpu"):
            check(op, dtype, POLICIES[policy], samples_of(op, dtype, 10_000))
