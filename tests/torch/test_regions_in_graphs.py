"""Regions inside compiled functions. See Note [Regions in compiled graphs].

`aot_eager` runs the operators of the compiled graph one by one, so gradients have eager's bits.
"""

from __future__ import annotations

from operator import attrgetter

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import ebb
from ebb_tests.exactness import same_bits
from ebb_tests.programs.compiled import (
    FORMS,
    POLICIES,
    PROGRAMS,
    Attention,
    BatchNorm,
    DrawsForBackward,
    Dropout,
    KeepsOnContext,
    Program,
    RandomNumbers,
    Wide,
    WritesInside,
    by_apply,
    by_checkpoint,
    by_with,
    check,
    steps,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize(
    ("kind", "form", "policy"),
    [
        pytest.param(kind, FORMS[(i + j) % len(FORMS)], POLICIES[j], id=f"{kind.__name__}-{j}")
        for i, kind in enumerate(PROGRAMS)
        for j in range(2)
    ],
)
def test_gradients_are_those_of_eager(kind, form, policy):
    check(kind, form, policy, fullgraph=True)
    assert ebb.stats()["total"]["entered"] == 0


@pytest.mark.sweep
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", PROGRAMS)
def test_gradients_are_those_of_eager_in_all_forms(kind, form):
    for policy, dynamic in zip(POLICIES, (None, True), strict=True):
        torch._dynamo.reset()
        check(kind, form, policy, dynamic=dynamic)


class Breaks(Wide):
    def first(self, x):
        y = self.up(x).sin()
        torch._dynamo.graph_break()
        return x + self.down(y.exp())


@pytest.mark.parametrize("form", [by_apply, by_with, by_checkpoint])
def test_a_region_with_a_graph_break_surrounds_compiled_parts(form):
    check(Breaks, form, "recompute_all")


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        (Program, "reduce-overhead"),
        *((kind, None) for kind in (Dropout, RandomNumbers, BatchNorm, Attention)),
    ],
)
def test_inductor_gives_the_gradients_that_it_gives_without_ebb(kind, mode):
    plain, program = kind(), kind()
    expected = steps(plain, torch.compile(plain, mode=mode, fullgraph=True))
    by_apply(program, ebb.policies.recompute_all)
    found = steps(program, torch.compile(program, mode=mode, fullgraph=True))
    assert all(map(same_bits, found, expected))


@pytest.mark.sweep
@pytest.mark.parametrize("kind", [k for k in PROGRAMS if k.__name__.startswith("Writes")])
def test_inductor_recomputes_from_no_input_that_the_graph_writes(kind):
    """Without ebb, Inductor recomputes from written inputs, and gives wrong gradients."""
    eager, program = kind(), kind()
    by_apply(program, ebb.policies.recompute_all)
    found = steps(program, torch.compile(program, fullgraph=True))
    # Inductor rounds differently.
    torch.testing.assert_close(found, steps(eager, eager), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("written", ["mean", "linear.bias", "x"])
def test_a_write_after_the_graph_is_an_error_if_backward_recomputes_from_it(written):
    program = Program()
    ebb.apply(program, ebb.policies.recompute_all, "")
    x = torch.randn(4, 8)
    y = torch.compile(program, backend="aot_eager", fullgraph=True)(x)
    with torch.no_grad():
        (x if written == "x" else attrgetter(written)(program)).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_two_forwards_before_a_backward():
    plain, program = WritesInside(), WritesInside()
    by_apply(program, ebb.policies.recompute_all)
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    for model, call in ((plain, plain), (program, compiled)):
        x = torch.linspace(0, 1, 32).view(4, 8)
        results = [call(x), call(x * 2)]
        sum(results).sum().backward()
        model.found = model.linear.weight.grad
    assert same_bits(program.found, plain.found)


def test_random_numbers_that_only_backward_needs_are_drawn_in_forward():
    class Draws(Program):
        def first(self, x):
            return self.linear(DrawsForBackward.apply(x.sin())) * torch.rand_like(x)

    check(Draws, by_apply, "recompute_all", backend="aot_eager_default_partitioner")


def test_a_write_to_an_input_that_a_function_keeps_on_its_context():
    """Autograd does not check the version of such an input, so ebb saves what depends on it."""

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            return KeepsOnContext.apply(x, self.weight).sin()

    found = []
    for policy in (None, ebb.policies.recompute_all):
        torch._dynamo.reset()
        program = Keeps()
        if policy:
            ebb.apply(program, policy, "")
        x = torch.ones(4, 8)
        y = torch.compile(program, backend="aot_eager_default_partitioner", fullgraph=True)(x)
        x.add_(1)
        y.sum().backward()
        found.append(program.weight.grad)
    assert same_bits(*found)


@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition"])
def test_a_written_buffer_of_a_subclass(backend):
    class Buffers(Program):
        def __init__(self):
            super().__init__()
            self.two = TwoTensor(torch.ones(8), torch.ones(8))

        def first(self, x):
            return self.linear((x + self.two.clone().a).sin()).exp()

        def after(self):
            self.two.mul_(0.5)

    eager, program = Buffers(), Buffers()
    by_apply(program, ebb.policies.recompute_all)
    found = steps(program, torch.compile(program, backend=backend))
    torch.testing.assert_close(found, steps(eager, eager))
