"""A collective that writes to what an earlier region computed, outside of regions or in another.

No version moves, so eager's backward reads what was written where it saved that tensor itself, and
goes on. ebb gives eager's gradients, or raises as for any write to what backward needs.
"""

from __future__ import annotations

import contextlib

import pytest
import torch

import ebb
from ebb_tests.exactness import same_bits
from ebb_tests.ranks.collectives import WAYS, WRITES, rank, write
from ebb_tests.ranks.comparing import POLICIES, prompt_accelerator, run
from ebb_tests.ranks.two_ranks import on_two_ranks


class Through(torch.autograd.Function):
    """Megatron-LM's `reduce_from_tensor_model_parallel_region`, for any collective."""

    @staticmethod
    def forward(ctx, t, name, way):
        write(name, t, way)
        return t.view_as(t)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 0.5, None, None


def read_before(x, inside, after, name, way):
    """What backward needs was made of it, and is not it."""
    with inside():
        h = x * 2
        out = (h + 1).sin()
    with after():
        return out + Through.apply(h, name, way).exp()


def saved_before(x, inside, after, name, way):
    with inside():
        h = x * 2
        out = h.sin()
    with after():
        return out + Through.apply(h, name, way).exp()


def saved_as_a_result(x, inside, after, name, way):
    with inside():
        h = x.exp()
        out = h + 1
    with after():
        return (out * x).sin() + Through.apply(h, name, way)


def not_needed(x, inside, after, name, way):
    """As Megatron-LM has it: what is reduced is a product's result, which nobody has read."""
    with inside():
        h = x.sin() @ x.t()
    with after():
        return Through.apply(h, name, way).exp()


def without_autograd(x, inside, after, name, way):
    with inside():
        h = (x * 2).detach()
        out = (h + 1).sin() * x
    with after():
        write(name, h, way)
        return out + h.exp() * x


PROGRAMS = {
    f.__name__: f
    for f in (read_before, saved_before, saved_as_a_result, not_needed, without_autograd)
}
# Of these eager's backward reads nothing that was written, so ebb's must not raise either, but for
# what was offloaded, which cannot be made again.
EXACT = {"read_before", "not_needed", "without_autograd"}


def gradients(program, name, way, region, after_too):
    torch.manual_seed(rank())
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    y = PROGRAMS[program](x, region, region if after_too else contextlib.nullcontext, name, way)
    try:
        return {"result": y, "gradient": torch.autograd.grad(y.sum(), x)[0]}
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return {"result": y, "gradient": None}


@pytest.mark.parametrize("after_too", [False, True], ids=["outside", "in another region"])
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("collective", WRITES)
@on_two_ranks
def test_a_collective_after_the_region_writes_to(collective, program, after_too):
    for way in WAYS:

        def train(how, way=way):
            return gradients(program, collective, way, how.region, after_too)

        expected = run(train, None)
        for name, policy in POLICIES.items():
            with prompt_accelerator():
                actual = run(train, policy)
            assert same_bits(actual["result"], expected["result"]), name
            refused = actual["gradient"] is None and (program not in EXACT or name == "mixed")
            assert refused or same_bits(actual["gradient"], expected["gradient"]), name
    assert ebb.stats()["total"]["entered"] > 0
