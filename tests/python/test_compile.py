"""torch.compile in all places: what ebb sees is exact, and where it steps aside it hands over."""

from __future__ import annotations

import warnings

import pytest
import torch
from exactness import same_bits
from torch import nn

import ebb
from ebb import _takeover, _tracing


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


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    _tracing._warn.cache_clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("policy", ["recompute_all", "save_matmuls", "torchtitan"])
def test_a_compiled_part_inside_a_region(policy):
    expected = gradients(blocks())
    model = blocks()
    model[1] = torch.compile(model[1], backend="aot_eager")
    with ebb.apply(model, getattr(ebb.policies, policy)):
        found = gradients(model)
        assert ebb.stats()["total"]["bytes_dropped"] > 0
    assert all(map(same_bits, found, expected))


def test_the_partitioner_gets_the_policy_of_a_module():
    products = {}
    for name in ("save_matmuls", "recompute_all"):
        model, counting = blocks(), Counting()
        expected = gradients(model)
        ebb.apply(model, getattr(ebb.policies, name), "?")
        compiled = torch.compile(model, backend=counting.backend)
        for found, right in zip(gradients(compiled), expected, strict=True):
            torch.testing.assert_close(found, right)
        products[name] = (sum(counting.forward), sum(counting.backward))
    # Two products a block; in backward two for each, but for the first input's. One is made again
    # in each block: what the other gives nothing needs.
    assert products["save_matmuls"] == (6, 11)
    assert products["recompute_all"] == (6, 14)


def test_a_decorated_function_in_a_compiled_one():
    counting = Counting()
    w = torch.randn(8, 8, requires_grad=True)

    @ebb.region(ebb.policies.recompute_all)
    def part(x):
        return (x @ w).sin().exp()

    def program(x):
        return part(part(x)).sum()

    x = torch.randn(4, 8)
    expected = torch.autograd.grad(program(x), w)[0]
    compiled = torch.compile(program, backend=counting.backend, fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(x), w)[0], expected)
    assert sum(counting.backward) >= 4  # two of them again


def test_a_traced_block_says_so_once():
    w = torch.randn(8, 8, requires_grad=True)

    def program(x):
        with ebb.region(ebb.policies.recompute_all):
            h = (x @ w).sin()
        with ebb.region():
            return h.exp().sum()

    x = torch.randn(4, 8)
    expected = torch.autograd.grad(program(x), w)[0]
    ebb.reset_stats()
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    with pytest.warns(UserWarning, match=r"decides by itself.*to_sac\(\)"):
        found = torch.autograd.grad(compiled(x), w)[0]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="ebb:")
        compiled(torch.randn(5, 8))  # traced again
    torch.testing.assert_close(found, expected)
    assert ebb.stats()["total"]["entered"] == 0


def test_the_partitioner_gets_the_policy_of_a_function_that_ebb_would_take_over():
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
        _takeover.install(ebb.policies.save_all, "save_all", ())
        try:
            for found, right in zip(gradients(compiled), expected, strict=True):
                torch.testing.assert_close(found, right)
        finally:
            _takeover.remove()
        products.append((sum(counting.forward), sum(counting.backward)))
    assert products == [(6, 11), (6, 14)]


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_model_with_EBB_MODULES(fullgraph):
    expected = gradients(blocks())
    _takeover.install(ebb.policies.save_matmuls, "save_matmuls", ("?",))
    try:
        model = blocks()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
        for _ in range(2):
            for found, right in zip(gradients(compiled), expected, strict=True):
                torch.testing.assert_close(found, right)
        assert all(ebb._modules.marks_of(block).region is not None for block in model)
    finally:
        _takeover.remove()


class Counts(nn.Module):
    """Its forward has a side effect that a checkpointed function may not have when it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls = 0
        self.seen = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.linear(x).sin()
        self.seen.append(y)
        return y.exp()


def test_side_effects_in_a_traced_module():
    torch.manual_seed(0)
    model = nn.Sequential(Counts(), Counts())
    expected = gradients(model)
    ebb.apply(model, ebb.policies.save_matmuls, "?")
    compiled = torch.compile(model, backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = gradients(compiled)
    for one, right in zip(found, expected, strict=True):
        torch.testing.assert_close(one, right)
    assert [m.calls for m in model] == [2, 2]
    assert [len(m.seen) for m in model] == [2, 2]


def test_dropout_and_buffers_in_a_traced_module():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8))
    plain = torch.compile(model, backend="aot_eager")
    expected = gradients(plain)
    mean = model[1].running_mean.clone()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8))
    ebb.apply(model, ebb.policies.recompute_all, "")
    found = gradients(torch.compile(model, backend="aot_eager"))
    for one, right in zip(found, expected, strict=True):
        torch.testing.assert_close(one, right)
    assert same_bits(model[1].running_mean, mean)


def test_the_policy_for_torchs_checkpointing():
    w = torch.randn(8, 8, requires_grad=True)
    x = torch.randn(4, 8)

    def block(x):
        return (x @ w).sin().exp().sum()

    expected = torch.autograd.grad(block(x), w)[0]
    for policy in (ebb.policies.save_matmuls, ebb.policies.recompute_all, ebb.policies.save_all):
        y = torch.utils.checkpoint.checkpoint(
            block, x, use_reentrant=False, context_fn=policy.to_sac()
        )
        assert same_bits(torch.autograd.grad(y, w)[0], expected)
