"""Compiled functions beside regions, and policies in torch's own checkpointing."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import ebb
from ebb._launch import takeover
from ebb_tests.exactness import same_bits

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.sin(self.up(x)).exp())


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3)))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model(torch.randn(4, 8)).square().sum().backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


class Counting:
    """A backend that counts the products in the graphs of forward and backward."""

    def __init__(self) -> None:
        from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
        from torch._dynamo.backends.common import aot_autograd

        self.forward: list[int] = []
        self.backward: list[int] = []

        def count(kinds):
            def compiler(graph, _):
                mm = torch.ops.aten.mm.default
                kinds.append(sum(node.target is mm for node in graph.graph.nodes))
                return make_boxed_func(graph.forward)

            return compiler

        self.backend = aot_autograd(
            fw_compiler=count(self.forward),
            bw_compiler=count(self.backward),
            partition_fn=min_cut_rematerialization_partition,
        )


@pytest.mark.parametrize("policy", ["recompute_all", "save_matmuls", "torchtitan"])
def test_a_compiled_part_inside_a_region(policy):
    expected = gradients(blocks())
    model = blocks()
    model[1] = torch.compile(model[1], backend="aot_eager")
    with ebb.apply(model, getattr(ebb.policies, policy), ""):
        found = gradients(model)
        assert ebb.stats()["total"]["bytes_dropped"] > 0
    assert all(map(same_bits, found, expected))


def test_the_partitioner_gets_a_policy_though_EBB_takes_checkpoints_over():
    # Two products a block; in backward two for each, but for the first input's. With recompute_all
    # one is made again in each block: what the other gives nothing needs.
    products = []
    for context_fn in (ebb.policies.save_matmuls.to_sac(), ebb.policies.recompute_all.to_sac()):
        model, counting = blocks(), Counting()
        expected = gradients(model)

        def program(x, model=model, context_fn=context_fn):
            for block in model:
                x = torch.utils.checkpoint.checkpoint(
                    block, x, use_reentrant=False, context_fn=context_fn
                )
            return x

        compiled = torch.compile(program, backend=counting.backend)
        compiled.parameters, compiled.zero_grad = model.parameters, model.zero_grad
        takeover.install(ebb.policies.save_all, "save_all", ())
        try:
            torch.testing.assert_close(gradients(compiled), expected)
        finally:
            takeover.remove()
        products.append((sum(counting.forward), sum(counting.backward)))
    assert products == [(6, 11), (6, 14)]


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_model_with_EBB_MODULES(fullgraph):
    expected = gradients(blocks())
    takeover.install(ebb.policies.save_matmuls, "save_matmuls", ("?",))
    try:
        model = blocks()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
        for _ in range(2):
            torch.testing.assert_close(gradients(compiled), expected)
        assert all(ebb._region.modules.marks_of(block).region is not None for block in model)
    finally:
        takeover.remove()


class Counts(nn.Module):
    """Its forward has side effects."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.calls = 0
        self.seen = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        y = self.linear(x + self.mean).sin()
        self.seen.append(y)
        return y.exp()


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(nn.functional.dropout(x.sin(), 0.5))


def made(kind) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(kind(), nn.BatchNorm1d(8), kind())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("kind", [Counts, Drops])
@pytest.mark.parametrize("policy", ["recompute_all", "save_matmuls"])
def test_a_traced_module_gives_what_it_gives_without_ebb(kind, policy, fullgraph, backend):
    """Also if it writes attributes and buffers, or draws random numbers."""
    plain, model = made(kind), made(kind)
    ebb.apply(model, getattr(ebb.policies, policy), "?")
    compiled = [torch.compile(m, backend=backend, fullgraph=fullgraph) for m in (plain, model)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            expected, found = (gradients(m) for m in compiled)
            assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
    assert same_bits(model[1].running_mean, plain[1].running_mean)
    assert all(same_bits(a, b) for a, b in zip(plain.buffers(), model.buffers(), strict=True))
    assert [getattr(m, "calls", 0) for m in model] == [getattr(m, "calls", 0) for m in plain]
