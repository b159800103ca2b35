"""OFFLOAD on a fake accelerator: gradients have the bits of eager."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch

import ebb
from ebb_tests.exactness import leaves, same_bits
from ebb_tests.programs.ahead import blocks, parameters
from ebb_tests.programs.compared_programs import run_random_programs
from ebb_tests.programs.offloaded import OFFLOAD_ALL, POLICIES, finish_copies, gradients
from ebb_tests.stand_ins import fake_accelerator


@pytest.mark.parametrize("in_flight", [0, 1 << 12, 1 << 40])
@pytest.mark.parametrize("prefetch", [0, 1 << 13, 1 << 40])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_transformer_has_the_bits_of_eager(policy, prefetch, in_flight):
    modules = blocks(3)
    x = torch.randn(2, 8, 16, requires_grad=True)

    def step(region):
        h = x
        for block in modules:
            with region():
                h = block(h)
        return [h.detach(), *gradients(h.square().mean(), [x, *parameters(modules)])]

    expected = step(contextlib.nullcontext)
    with fake_accelerator(in_flight_bytes=in_flight, prefetch_bytes=prefetch) as fake:
        for advance in (0, 1, 1000):
            found = step(lambda: ebb.region(policy))
            assert all(map(same_bits, found, expected))
            fake.advance(advance)
        gc.collect()
        assert fake.counts()["copies_out"] > 0
        assert ebb.stats()["offload"]["stashes"] == 0
        assert ebb.stats()["offload"]["host_bytes_used"] == 0


def test_offloading_recomputes_nothing(accelerator):
    x, w = leaves((4, 4), (4, 4))
    with ebb.region(OFFLOAD_ALL):
        y = (x @ w).sin() @ w
    y.sum().backward()

    assert ebb.stats()["total"]["ops_replayed"] == 0


DTYPES = [
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.bool,
    torch.int64,
    torch.float8_e4m3fn,
]


class Keeps(torch.autograd.Function):
    """Saves a tensor of any kind and gives it back in backward."""

    @staticmethod
    def forward(ctx, x, kept):
        ctx.save_for_backward(kept)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Keeps.seen = ctx.saved_tensors[0]
        return gradient, None


VIEWS = {
    "whole": lambda t: t,
    "transposed": lambda t: t.t(),
    "row": lambda t: t[1],
    "column": lambda t: t[:, 2],
    "strided": lambda t: t[::2, ::3],
    "expanded": lambda t: t[:1].expand(5, -1),
    "number": lambda t: t[1, 1],
    "empty": lambda t: t[:0],
    "shifted": lambda t: t[2:, 1:],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_every_dtype_and_geometry_comes_back(accelerator, dtype, view):
    x = torch.zeros(1, requires_grad=True)
    numbers = torch.randint(0, 2, (4, 6)) if dtype is torch.bool else torch.randn(4, 6) * 8
    with ebb.region(OFFLOAD_ALL):
        kept = view(numbers.to(dtype).clone())
        expected = kept.clone()
        strides, offset = kept.stride(), kept.storage_offset()
        y = Keeps.apply(x, kept)
    del kept
    accelerator.advance(1000)
    y.backward(torch.ones(1))

    assert same_bits(Keeps.seen, expected)
    assert (Keeps.seen.stride(), Keeps.seen.storage_offset()) == (strides, offset)


@pytest.mark.sweep
@pytest.mark.parametrize("copies", ["late", "prompt", "disk"])
def test_random_programs_with_offload(copies):
    assert run_random_programs(300, engine=f"offload {copies}")["replayed"] > 60


def test_a_write_into_an_offloaded_value_leaves_one_to_offload(accelerator, x):
    with ebb.region(ebb.Policy({"aten::mul": ebb.OFFLOAD})):
        h = (x * 2).relu_()  # saves its result
        y = h.exp()
    del h
    finish_copies(accelerator)
    y.sum().backward()

    assert accelerator.counts()["copies_out"] == 1
    assert ebb.stats()["total"]["bytes_saved"] == 0
    assert torch.equal(x.grad, gradients((x * 2).relu().exp().sum(), x)[0])
