"""Operators of libraries in checkpointed calls that are taken over: no more is held than by torch's
checkpoint, with eager's bits; operators that do not repeat are refused.
"""

from __future__ import annotations

import functools
import gc
import itertools

import pytest
import torch
from torch.library import Library
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import ebb
from ebb_tests.exactness import same_bits
from ebb_tests.memory_use import allocations
from ebb_tests.programs.library_operators import LAYERS, SIZE

DEPTH = 3


def saves_products():
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])


def asks():
    def answer(context, op, *args, **kwargs):
        saves = op is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(answer)


def nested(layer, x, w):
    inner = functools.partial(checkpoint, layer, use_reentrant=False)
    return checkpoint(lambda x, w: inner(x, w).sin(), x, w, use_reentrant=False)


def by_ebb(layer, x, w):
    return ebb.checkpoint(layer, x, w, use_reentrant=False)


WAYS = {
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "not reentrant": functools.partial(checkpoint, use_reentrant=False),
    "without random state": functools.partial(
        checkpoint, use_reentrant=False, preserve_rng_state=False
    ),
    "list": functools.partial(checkpoint, use_reentrant=False, context_fn=saves_products),
    "function": functools.partial(checkpoint, use_reentrant=False, context_fn=asks),
    "nested": nested,
    "ebb.checkpoint": by_ebb,
}


def step(layer, way):
    """The bytes that are held after the forward, and gradients."""
    torch.manual_seed(0)
    x = torch.randn(SIZE, SIZE, requires_grad=True)
    weights = [torch.randint(-9, 9, (SIZE, SIZE), dtype=torch.int8) for _ in range(DEPTH)]
    torch.manual_seed(1)
    made = []

    def forward():
        h = x
        for w in weights:
            h = way(layer, h, w)
        made.append(h.sum())

    gc.disable()  # what earlier steps left is not to be freed meanwhile
    try:
        held = sum(allocations(forward))
    finally:
        gc.enable()
    made.pop().backward()  # torch's reentrant checkpoint refuses torch.autograd.grad
    return held, x.grad


PAIRS = list(itertools.product(LAYERS, WAYS))
# Each layer and each way, some times.
FAST = [pair for i, pair in enumerate(PAIRS) if i % 6 == 0]
SLOW = [pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS if pair not in FAST]


@pytest.mark.not_sanitized
@pytest.mark.parametrize(("layer", "way"), FAST + SLOW)
def test_no_more_is_held_than_by_torchs_checkpoint(take_over, layer, way):
    if way == "without random state" and layer == "random":
        pytest.skip("torch's checkpoint gives other gradients than eager")
    _, expected = step(LAYERS[layer], lambda layer, x, w: layer(x, w))
    if way == "nested":
        expected = step(LAYERS[layer], lambda layer, x, w: layer(x, w).sin())[1]
    torchs = WAYS["not reentrant" if way == "ebb.checkpoint" else way]
    most, found = step(LAYERS[layer], torchs)
    assert same_bits(found, expected)
    take_over()
    for number in range(2):
        held, found = step(LAYERS[layer], WAYS[way])
        assert same_bits(found, expected), number
        assert held <= most, number


# Operators that give other bits when they run again


_library = Library("ebb_stateful", "FRAGMENT")
_calls = []
_library.define("count(Tensor x) -> (Tensor, Tensor)")
_library.impl("count", lambda x: (x * 2, x + float(len(_calls) + bool(_calls.append(x)))), "CPU")
_library.define("count_into(Tensor x, Tensor(a!) out) -> ()")
_library.impl("count_into", lambda x, out: _count_into(x, out), "CPU")


def _count_into(x, out):
    _calls.append(x)
    out.copy_(x + len(_calls))


def counted(x):
    return torch.ops.ebb_stateful.count(x.detach())[1]


def counted_into(x):
    out = torch.empty_like(x)
    torch.ops.ebb_stateful.count_into(x.detach(), out)
    return out


@pytest.mark.parametrize(
    ("operator", "output"), [(counted, "result 1"), (counted_into, "argument 1")]
)
@pytest.mark.parametrize("way", ["reentrant", "function", "ebb.checkpoint"])
def test_operator_with_state_is_refused(taken, operator, output, way):
    x = torch.randn(SIZE, SIZE, requires_grad=True)
    loss = WAYS[way](lambda x, _: (operator(x) * x).sin(), x, None).sum()
    with pytest.raises(RuntimeError) as error:
        loss.backward()
    name = "count_into" if operator is counted_into else "count"
    for part in (
        f"ebb: cannot recompute ebb_stateful::{name}.default in region '",
        f"gave other bits than in the forward, in {output}.",
        f"EBB='recompute_all,ebb_stateful::{name}:save'",
    ):
        assert part in str(error.value)


def test_operator_that_a_rule_saves_may_have_state(take_over):
    x = torch.randn(SIZE, SIZE, requires_grad=True)
    take_over(policy=ebb.Policy({"ebb_stateful::count": ebb.SAVE}))
    checkpoint(lambda x: (counted(x) * x).sin(), x, use_reentrant=False).sum().backward()
    y = x.detach() + (len(_calls) - 1)
    z = x.detach().requires_grad_()
    (y * z).sin().sum().backward()
    assert same_bits(x.grad, z.grad)


def test_memory_that_numpy_filled_is_kept(take_over):
    def layer(x):
        out = torch.empty_like(x)
        out.numpy()[:] = 3
        torch.ops.ebb_library.add_(out, x.detach())
        return (out * x).sin()

    x = torch.randn(SIZE, SIZE, requires_grad=True)
    expected = torch.autograd.grad(layer(x).sum(), x)[0]
    take_over()
    loss = checkpoint(layer, x, use_reentrant=False).sum()
    assert same_bits(torch.autograd.grad(loss, x)[0], expected)


def test_log_names_results_that_regions_save_elsewhere(caplog):
    library = Library("ebb_told", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    x = torch.randn(512, 512, requires_grad=True)

    def layer(x):
        return (torch.ops.ebb_told.twice(x.detach()) * x).sin()

    for number in range(2):
        with ebb.region(name="layer"):
            loss = layer(x)
        assert len(caplog.messages) == 1, number
        assert loss.requires_grad
    assert "region 'layer' saves 1.0 MiB of results of ebb_told::twice.default" in caplog.text
    rule = ebb.Policy.parse("recompute_all,ebb_told::twice:recompute")
    for policy, count in ((ebb.policies.recompute_all, 1), (rule, 0)):
        with ebb.record_reports(), ebb.region(policy):
            loss = layer(x)
        loss.sum().backward()
        kept = [row.reason for row in ebb.report().rows if row.fate == "kept"]
        assert ["a rule with RECOMPUTE that names it" in reason for reason in kept] == [
            True
        ] * count
    library._destroy()
