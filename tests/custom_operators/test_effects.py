"""Custom operators that are registered with an effect run once, unless a rule forces replays."""

from __future__ import annotations

import pytest
import torch

import ebb


@pytest.fixture
def counted():
    """A custom operator with two overloads, both with an effect, and the list of its runs."""
    runs = []

    def run(x, scale=2.0):
        runs.append(scale)
        return x * scale

    with torch.library._scoped_library("ebb_rule8", "DEF") as library:
        for overload, schema, rest in (
            ("counted", "(Tensor x) -> Tensor", ()),
            ("counted.scaled", "(Tensor x, float scale) -> Tensor", (None,)),
        ):
            library.define(overload + schema)
            library.impl(overload, run, "CompositeExplicitAutograd")
            torch.library.register_autograd(
                f"ebb_rule8::{overload}",
                lambda context, gradient, rest=rest: (gradient * 3, *rest),
                lib=library,
            )
            library._register_effectful_op(
                f"ebb_rule8::{overload}", torch._library.effects.EffectType.ORDERED
            )
        yield torch.ops.ebb_rule8.counted, runs


@pytest.mark.parametrize("arguments", [(), (4.0,)], ids=["default overload", "other overload"])
@pytest.mark.parametrize("declared", ["by the call", "by a rule"])
def test_an_operator_with_an_effect_runs_once(counted, arguments, declared):
    operator, runs = counted
    x = torch.randn(4, requires_grad=True)

    def function(x):
        return operator(x.sin(), *arguments).exp()

    expected = torch.autograd.grad(function(x).sum(), x)[0]
    runs.clear()

    if declared == "by the call":
        result = ebb.checkpoint(function, x)
    else:
        with ebb.region(ebb.Policy({"ebb_rule8::counted": ebb.RECOMPUTE})):
            result = function(x)
    loss = result.sum()
    del result
    actual = torch.autograd.grad(loss, x)[0]

    assert torch.equal(actual, expected)
    assert len(runs) == 1


def test_force_replays_an_operator_with_an_effect(counted):
    operator, runs = counted
    x = torch.randn(4, requires_grad=True)

    with ebb.region(ebb.Policy([ebb.Rule("ebb_rule8::counted", ebb.RECOMPUTE, force=True)])):
        loss = operator(x.sin()).exp().sum()
    torch.autograd.grad(loss, x)

    assert len(runs) == 2
