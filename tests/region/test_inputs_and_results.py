"""What goes into a region and comes out of it, and what happens to it before backward."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ebb
from ebb_tests.exactness import (
    assert_like_eager,
    each_policy,
    exact,
    leaves,
    like_eager,
    policies,
    same_bits,
)

pytestmark = pytest.mark.engines("device")


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: list[torch.Tensor | None]


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(4, 4)

    def forward(self, x, *, mask=None, extra=()):
        h = F.gelu(self.linear(x))
        h = h if mask is None else h * mask
        for e in extra:
            h = h + e.sin()
        return {
            "tuple": (h, None, h.detach()),
            "dict": {"out": h, "none": None, "nested": {"twice": h * 2}},
            "dataclass": Output(h.exp(), [None, h]),
            "view": h.t(),
            "input": (x, h),
            "parameter": (self.linear.weight, h),
            "none": None,
        }[self.kind]


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value or [] for t in tensors(v)]


@pytest.mark.parametrize("way", ["region", "apply", "checkpoint", "decorator"])
@pytest.mark.parametrize(
    "kind", ["tuple", "dict", "dataclass", "view", "input", "parameter", "none"]
)
def test_outputs_of_every_kind(kind, way):
    def run(way):
        torch.manual_seed(0)
        block, x = Block(kind), torch.randn(4, 4, requires_grad=True)
        options = {"mask": torch.ones(4), "extra": [torch.ones(4, requires_grad=True)]}
        if way == "region":
            with ebb.region():
                out = block(x, **options)
        elif way == "apply":
            root = nn.ModuleDict({"block": block})
            ebb.apply(root, ebb.policies.recompute_all, modules="block")
            out = root["block"](x, **options)
        elif way == "checkpoint":
            out = ebb.checkpoint(block, x, use_reentrant=False, **options)
        elif way == "decorator":
            out = ebb.region()(lambda: block(x, **options))()
        else:
            out = block(x, **options)
        found = tensors(out)
        loss = sum((t.sin() * t).sum() for t in found if t.requires_grad)
        inputs = [x, *block.parameters(), *options["extra"]]
        grads = torch.autograd.grad(loss, inputs, allow_unused=True) if found else []
        return [*found, *grads], (out is None)

    (actual, nothing), (expected, _) = run(way), run("eager")
    assert nothing == (kind == "none")
    assert len(actual) == len(expected)
    assert all(map(same_bits, actual, expected))


@pytest.mark.parametrize("frozen", ["input", "weight", "bias", "all but one"])
@like_eager()
def test_inputs_and_parameters_that_need_no_grad(region, frozen):
    net = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.Tanh()).double()
    if frozen == "weight":
        net[0].weight.requires_grad_(False)
    if frozen == "bias":
        net[2].bias.requires_grad_(False)
    if frozen == "all but one":
        net.requires_grad_(False)
        net[2].weight.requires_grad_()
    x = leaves((4, 4))[0].requires_grad_(frozen != "input")
    with region:
        loss = net(x).exp().sum()
    return torch.autograd.grad(loss, [p for p in net.parameters() if p.requires_grad])


def write(t):
    with torch.no_grad():
        t.mul_(3)


def with_a_keyword():
    mask = torch.ones(4)
    return mask, lambda: Block("view")(torch.ones(4, 4), mask=mask)


def with_a_list():
    parts = [torch.randn(4, requires_grad=True) for _ in range(3)]
    return parts[1], lambda: sum(p * p for p in parts)


def with_a_parameter():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    return net[2].weight, lambda: net(torch.ones(2, 4))


@pytest.mark.parametrize("make", [with_a_keyword, with_a_list, with_a_parameter])
def test_an_input_written_between_forward_and_backward_raises(make):
    for region in (torch.enable_grad(), *(ebb.region(p) for p in policies().values())):
        written, program = make()
        with region:
            out = program()
        write(written)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@each_policy
def test_an_input_that_only_a_recipe_needs_is_never_silently_another(policy):
    """Eager has not saved it and goes on; ebb gives the same or says what to do."""

    def run(region):
        x, bias = leaves((4,), (4,))
        with region:
            h = x + bias
            out = h.sin()
            del h
        write(bias)
        return torch.autograd.grad(out.sum(), x)[0]

    expected = run(torch.enable_grad())
    try:
        actual = run(ebb.region(policy, "block"))
    except RuntimeError as error:
        actual = str(error)
    if isinstance(actual, str):
        assert "aten::add.Tensor in region 'block'" in actual
        assert "SAVE" in actual
    else:
        assert same_bits(actual, expected)


@exact((4, 4))
def test_an_input_that_is_an_expanded_a_strided_and_an_empty_view(x):
    wide = x[:1].expand(4, 4)
    strided = torch.as_strided(x, (2, 2), (1, 2), 1)
    empty = x[:0].exp()
    return (wide * strided.sum()).sin(), strided.exp() * strided, empty.sin()


@exact((6,))
def test_integer_bool_and_complex_values_on_the_way(x):
    index = x.detach().argsort()
    positive = x > 0
    z = torch.view_as_complex(torch.stack((x, x.sin()), -1))
    picked = torch.where(positive, x.exp(), x[index])
    return picked * picked, (z * z.conj()).real, z.abs().sin()


def test_some_outputs_are_used_and_others_dropped():
    def run(region, keep):
        x = leaves((6,))[0]
        with region:
            a, b, c = (x * 2).sin().split(2)
            outs = [a.exp(), b.tanh() * a, c.sigmoid()]
        del a, b, c
        outs = [outs[i] for i in keep]
        return torch.autograd.grad(sum(o.sum() for o in outs), x)[0]

    for keep in ([0], [1], [2], [2, 0], [1, 2]):
        assert_like_eager(partial(run, keep=keep))
