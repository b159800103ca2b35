"""What a replay draws is what the forward drew: eager, and inside a captured graph."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import ebb
from ebb_tests.gpus import DRAWS_NUMBERS, NEEDS_GPU, bits_of_eager, same, warmed_up_stream

pytestmark = [*NEEDS_GPU, DRAWS_NUMBERS]

RUNS = 20


def dropout(x):
    return F.dropout(x * 2, 0.4).sin().exp()


def attention(x):
    q, k, v = x.half().view(2, 32, 3, 4, 32).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q * 2, k.sin(), v.cos(), dropout_p=0.3).float().exp()


def bernoulli(x):
    """An operator that takes a Generator, and gets the default one."""
    return (x * torch.empty_like(x).bernoulli_(0.5)).exp()


def rrelu(x):
    return F.rrelu(x * 2, training=True).sin()


def like_another(x):
    return (x * torch.rand_like(x) + torch.randn_like(x)).exp()


def all_of_them(x):
    return dropout(bernoulli(x)) + like_another(x)


PROGRAMS = [dropout, attention, bernoulli, rrelu, like_another, all_of_them]
programs = pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)


def leaf():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(2, 32, 384, generator=generator).cuda().requires_grad_()


def gradient(program, x, region):
    with region:
        loss = program(x).sum()
    return torch.autograd.grad(loss, x)[0]


@programs
def test_eager(program):
    x = leaf()

    def run(make_region, seed):
        torch.manual_seed(seed)
        found = gradient(program, x, make_region())
        return found, torch.rand(5, device="cuda")  # the generator is where eager leaves it

    for seed in range(RUNS):
        expected = bits_of_eager(lambda seed=seed: run(torch.enable_grad, seed))
        assert same(run(ebb.region, seed), expected)


@programs
def test_eager_without_a_seed_between_steps(program):
    x = leaf()

    def run(make_region):
        torch.manual_seed(5)
        return [gradient(program, x, make_region()) for _ in range(RUNS)]

    expected = bits_of_eager(lambda: run(torch.enable_grad))

    assert same(run(ebb.region), expected)


@programs
def test_inside_a_captured_graph(program):
    """The same seed before each replay of eager's graph and of ours."""
    x = leaf()

    def capture(make_region):
        warmed_up_stream(lambda: gradient(program, x, make_region()))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = gradient(program, x, make_region())
        return graph, found

    def replay(captured, seed):
        graph, found = captured
        torch.manual_seed(seed)
        graph.replay()
        return found.clone(), torch.rand(5, device="cuda")

    theirs = capture(torch.enable_grad)
    ours = capture(ebb.region)

    masks = []
    for seed in range(RUNS):
        expected = bits_of_eager(lambda seed=seed: replay(theirs, seed))
        found = replay(ours, seed)
        assert same(found, expected)
        masks.append(found[0])
    assert not torch.equal(masks[0], masks[1])  # each replay draws anew


@programs
def test_an_eager_step_after_a_capture(program):
    """A capture leaves the generator as it is: what eager steps draw later is right."""
    x = leaf()
    graph = torch.cuda.CUDAGraph()
    warmed_up_stream(lambda: gradient(program, x, ebb.region()))
    with torch.cuda.graph(graph):
        captured = gradient(program, x, ebb.region())

    for seed in range(3):
        graph.replay()
        torch.manual_seed(seed)
        found = gradient(program, x, ebb.region())
        torch.manual_seed(seed)
        assert torch.equal(found, gradient(program, x, torch.enable_grad()))
    assert captured.isfinite().all()
