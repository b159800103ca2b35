"""Arguments that an operator does not read, and storages that are resized by hand."""

from __future__ import annotations

import pytest
import torch

import ebb
from ebb import _testing
from ebb_tests.exactness import like_eager, like_eager_each
from ebb_tests.stand_ins import kernel, operator_facts

aten = torch.ops.aten


def beta_zero(rows, inner, columns, dtype):
    """Operators, the shape of what each does not read with beta = 0, and a call that gives it."""
    torch.manual_seed(0)
    a, b = torch.randn(rows, inner).to(dtype), torch.randn(inner, columns).to(dtype)
    aa, bb = torch.randn(2, rows, inner).to(dtype), torch.randn(2, inner, columns).to(dtype)
    v, u, w = a[0].clone(), a[:, 0].clone(), b[0].clone()
    out = torch.empty(rows, columns, dtype=dtype)
    whole, both = (rows, columns), (2, rows, columns)
    return {
        aten.addmm.default: (whole, lambda s: aten.addmm(s, a, b, beta=0)),
        aten.addmm.out: (whole, lambda s: aten.addmm(s, a, b, beta=0, out=out.clone())),
        aten._addmm_activation.default: (
            (columns,),
            lambda s: aten._addmm_activation(s, a, b, beta=0),
        ),
        aten.addmv.default: ((rows,), lambda s: aten.addmv(s, a, v, beta=0)),
        aten.addr.default: (whole, lambda s: aten.addr(s, u, w, beta=0)),
        aten.addbmm.default: (whole, lambda s: aten.addbmm(s, aa, bb, beta=0)),
        aten.baddbmm.default: (both, lambda s: aten.baddbmm(s, aa, bb, beta=0)),
        aten.addmm_.default: (whole, lambda s: aten.addmm_(s.clone(), a, b, beta=0)),
        aten.addmv_.default: ((rows,), lambda s: aten.addmv_(s.clone(), a, v, beta=0)),
        aten.addr_.default: (whole, lambda s: aten.addr_(s.clone(), u, w, beta=0)),
        aten.addbmm_.default: (whole, lambda s: aten.addbmm_(s.clone(), aa, bb, beta=0)),
        aten.baddbmm_.default: (both, lambda s: aten.baddbmm_(s.clone(), aa, bb, beta=0)),
    }


A, B = torch.randn(4, 5), torch.randn(5, 3)
NORM = (torch.randn(6, 3), torch.randn(6, 3), torch.ones(3))  # gradient, input, weight
LIKE = {
    aten.zeros_like.default: ((2, 3), torch.zeros_like),
    aten.ones_like.default: ((2, 3), torch.ones_like),
    aten.full_like.default: ((2, 3), lambda s: torch.full_like(s, 7)),
    aten.new_zeros.default: ((2, 3), lambda s: s.new_zeros(3, 2)),
    aten.new_ones.default: ((2, 3), lambda s: s.new_ones(3, 2)),
    aten.new_full.default: ((2, 3), lambda s: s.new_full((3, 2), 4)),
    aten.rand_like.default: ((2, 3), torch.rand_like),
    aten.randn_like.default: ((2, 3), torch.randn_like),
    aten.randint_like.default: ((2, 3), lambda s: torch.randint_like(s, 9)),
}


def batch_norm_backward(statistics):
    gradient, x, weight = NORM
    mean, inverse = x.mean(0), 1 / (x.var(0, unbiased=False) + 1e-5).sqrt()
    mask = [True, True, True]
    results = aten.native_batch_norm_backward(
        gradient, x, weight, statistics, statistics, mean, inverse, True, 1e-5, mask
    )
    return torch.cat([result.reshape(-1) for result in results])


ALL_BETA_ZERO = beta_zero(4, 5, 3, torch.float32)
# The product of an in-place one is not computed again without its buffer: see test below.
BETA_ZERO = {op: call for op, call in ALL_BETA_ZERO.items() if not op._schema.name.endswith("_")}
UNREAD = BETA_ZERO | LIKE | {aten.native_batch_norm_backward.default: ((3,), batch_norm_backward)}


def run(call, shape, fill, dtype=torch.float32):
    torch.manual_seed(0)
    return call(torch.full(shape, fill, dtype=dtype))


@pytest.mark.parametrize("op", UNREAD, ids=str)
def test_torch_does_not_read_it(op):
    shape, call = UNREAD[op]

    assert torch.equal(run(call, shape, 1.0), run(call, shape, float("nan")))


@pytest.mark.parametrize("sizes", [(1, 1, 1), (4, 5, 3), (64, 48, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", ALL_BETA_ZERO, ids=str)
def test_torch_does_not_read_it_in_any_size_and_type(op, dtype, sizes):
    shape, call = beta_zero(*sizes, dtype)[op]

    assert torch.equal(run(call, shape, 1.0, dtype), run(call, shape, float("nan"), dtype))


@pytest.mark.parametrize("op", UNREAD, ids=str)
def test_ebb_knows_that(op):
    assert "unread" in operator_facts(op)["uses"].values()


def test_ebb_takes_nothing_else_for_unread():
    """The table of this file is whole: a new entry of ebb's needs a new line here."""
    known = {op._schema.name for op in UNREAD} | {
        # they have no kernel on the CPU, or no result that is recomputed
        "aten::cudnn_batch_norm_backward",
        "aten::empty_like",
        "aten::new_empty",
        "aten::new_empty_strided",
    }
    for name in torch._C._dispatch_get_all_op_names():
        base, _, overload = name.partition(".")
        if base.startswith("aten::") and torch._C._dispatch_has_kernel(name):
            facts = _testing.operator_facts(base, overload)
            assert base in known or "unread" not in facts["uses"].values(), name


@pytest.mark.parametrize("op", UNREAD, ids=str)
@like_eager_each
def test_it_may_be_overwritten_before_backward(region, op):
    shape, call = UNREAD[op]
    x, buffer = torch.randn(5, requires_grad=True), torch.randn(shape)
    with region:
        loss = (x.sum() * call(buffer).sin().cos()).sum()
    buffer.fill_(float("nan"))
    return torch.autograd.grad(loss, x)[0]


@pytest.mark.parametrize("beta", [0, 0.0, False, 0.5, 1, True])
@like_eager(ebb.policies.recompute_all)
def test_one_scratch_buffer_for_all_layers(region, beta):
    """As Megatron-LM does it for the scores of attention."""
    queries = torch.randn(2, 4, 5, requires_grad=True)
    buffer = torch.ones(2, 4, 4)
    with region:
        h = queries
        for _ in range(3):
            scores = torch.baddbmm(buffer, h, h.transpose(1, 2), beta=beta, alpha=0.5)
            if beta == 0:
                buffer.normal_()  # for another use
            h = torch.bmm(scores.softmax(-1), h)
    return torch.autograd.grad(h.sum(), queries)[0]


@pytest.mark.parametrize("beta", [0, False, 1, True])
@like_eager(ebb.policies.recompute_all)
def test_it_may_be_another_argument_too(region, beta):
    x = torch.randn(4, 4, requires_grad=True)
    with region:
        h = x * 2
        loss = (torch.addmm(h, h, h, beta=beta).sin() * torch.zeros_like(h).cos()).sum()
        del h
    return torch.autograd.grad(loss, x)


@pytest.mark.parametrize("beta", [0, False, 1, True])
@like_eager(ebb.policies.recompute_all)
def test_an_inplace_product_overwrites_or_adds(region, beta):
    x = torch.randn(4, 3, requires_grad=True)
    with region:
        h = (x * 2).detach()
        h.addmm_(A, B, beta=beta)
        loss = (x * h.sin()).sum()
        del h
    return torch.autograd.grad(loss, x)


def grown(h):
    h.untyped_storage().resize_(2 * h.untyped_storage().nbytes())
    more = torch.empty(0).set_(h.untyped_storage(), 0, (2 * h.numel(),))
    more[h.numel() :] = 3
    return more


def shrunk(h):
    h.untyped_storage().resize_(h.untyped_storage().nbytes() // 2)
    return torch.empty(0).set_(h.untyped_storage(), 0, (h.numel() // 2,))


def emptied_and_filled(h):
    size = h.untyped_storage().nbytes()
    h.untyped_storage().resize_(0)
    h.untyped_storage().resize_(size)
    return h.copy_(torch.arange(h.numel()))


@pytest.mark.parametrize("resize", [grown, shrunk, emptied_and_filled])
@pytest.mark.parametrize("on", ["a computed tensor", "one from outside"])
@like_eager_each
def test_a_storage_that_is_resized_by_hand(region, resize, on):
    x, h = torch.randn(6, requires_grad=True), torch.randn(6)
    with region:
        if on == "a computed tensor":
            h = (x * 2).detach()
        y = h.sin()
        h = resize(h)
        loss = (x.sum() * h.sin().cos()).sum() + (x * y.cos()).sum()
    return torch.autograd.grad(loss, x)[0]


def test_a_kernel_that_multiplies_by_zero_what_it_should_not_read():
    """As some backends' do. Memory of which nobody says what is in it would be NaN here."""

    def addmm(s, a, b, *, beta=1, alpha=1):
        return s * beta + (a @ b) * alpha

    a, b, s = torch.randn(3, 4), torch.randn(4, 5), torch.randn(3, 5)
    x = torch.randn(3, 5, requires_grad=True)
    torch.use_deterministic_algorithms(True)
    try:
        with kernel("addmm", addmm):
            with ebb.region(ebb.policies.recompute_all):
                loss = (x * torch.addmm(s, a, b, beta=0)).exp().sum()
            gradient = torch.autograd.grad(loss, x)[0]
    finally:
        torch.use_deterministic_algorithms(False)

    assert torch.equal(gradient, (a @ b) * (x * (a @ b)).exp())
