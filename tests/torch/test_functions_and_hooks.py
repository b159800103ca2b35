"""Custom autograd functions, hooks, transforms and checkpoints in and around regions."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.autograd.forward_ad as forward
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import ebb
from ebb_tests.exactness import assert_exact, each_policy, exact, leaves, like_eager, same_bits

pytestmark = pytest.mark.engines("exactness", "device")


class Saves(torch.autograd.Function):
    """x * sin(x) * 2, saving its input, an intermediate and its output, in one way or in two."""

    ways = ()

    @staticmethod
    def forward(ctx, x):
        middle = x.sin()
        out = x * middle * 2
        if "by attribute" in Saves.ways:
            ctx.tensors = x.detach(), middle, out.detach()
        if "by ctx" in Saves.ways:
            ctx.save_for_backward(x, middle, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, middle, out = ctx.saved_tensors if "by ctx" in Saves.ways else ctx.tensors
        if len(Saves.ways) == 2:
            assert torch.equal(middle, ctx.tensors[1])
        return grad * (middle * 2 + x.cos() * x * 2 + out * 0)


@pytest.mark.parametrize("ways", [("by ctx",), ("by attribute",), ("by ctx", "by attribute")])
def test_function_that_saves_input_intermediate_and_output(ways, monkeypatch):
    monkeypatch.setattr(Saves, "ways", ways)
    assert_exact(lambda x: Saves.apply(Saves.apply(x.exp()) + 1).sin(), leaves((4,)))


class Doubles(torch.autograd.Function):
    """Writes to its argument and returns it, with what it held before saved."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.clone())
        ctx.mark_dirty(x)
        return x.mul_(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2 * ctx.saved_tensors[0]


@pytest.mark.parametrize("view", [False, True])
@exact((4,))
def test_function_that_writes_to_its_argument(x, view):
    h = x + 1
    if view:
        Doubles.apply(h[:2])
        return h.sin() * h
    return Doubles.apply(h).sin() * x


class Sorts(torch.autograd.Function):
    """Integer outputs, unused gradients, and a backward that is differentiable."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        values, order = x.sort()
        ctx.mark_non_differentiable(order)
        ctx.save_for_backward(order, x)
        return values, order, x.square()

    @staticmethod
    def backward(ctx, grad_values, grad_order, grad_square):
        order, x = ctx.saved_tensors
        total = torch.zeros_like(x)
        if grad_values is not None:
            total = total.scatter(0, order, grad_values)
        return total if grad_square is None else total + 2 * x * grad_square


@pytest.mark.parametrize("used", [(0,), (2,), (0, 2)])
@exact((5,))
def test_function_with_some_outputs_used(x, used):
    outputs = Sorts.apply(x.sin())
    return [outputs[i].exp() for i in used]


class RunsAgain(torch.autograd.Function):
    """Recomputes in its backward by hand, with autograd inside autograd."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x.sin() * x).exp()

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), ebb.region(name="inner"):
            y = (x.sin() * x).exp()
        return torch.autograd.grad(y, x, grad)[0]


@exact((4,))
def test_region_inside_a_backward(x):
    return RunsAgain.apply(RunsAgain.apply(x * 0.5)) * x


def test_gradcheck_and_its_second_order():
    x, w = (t.detach().mul(0.3).requires_grad_() for t in leaves((3, 3), (3, 3)))

    def function(x, w):
        with ebb.region():
            return torch.nn.functional.softplus((x @ w).tanh() * x)

    assert torch.autograd.gradcheck(function, (x, w))
    assert torch.autograd.gradgradcheck(function, (x, w))


@pytest.mark.parametrize("transform", ["jacobian", "hessian", "vjp", "hvp"])
@like_eager(ebb.policies.recompute_all)
def test_functional_derivatives(region, transform):
    def function(x):
        with region:
            y = (x.sin() * x).exp()
        return y if transform in ("jacobian", "vjp") else y.sum()

    vector = () if transform in ("jacobian", "hessian") else (torch.ones(3).double(),)
    derive = getattr(torch.autograd.functional, transform)
    result = derive(function, leaves((3,))[0].detach(), *vector)
    return result if isinstance(result, torch.Tensor) else result[1]


@like_eager(ebb.policies.recompute_all)
def test_forward_mode_over_a_region(region):
    x, w = leaves((3,), (3,))
    with forward.dual_level():
        dual = forward.make_dual(x, torch.ones(3).double())
        with region:
            y = (dual.sin() * w).exp()
        value, tangent = forward.unpack_dual(y)
    return [tangent, *torch.autograd.grad(value.sum() + tangent.sum(), (x, w))]


@like_eager()
def test_module_and_tensor_hooks_inside_the_region(region):
    torch.manual_seed(0)
    seen = []
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    net[0].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    net[1].register_forward_hook(lambda m, args, out: out.sin() * out)
    net[2].register_full_backward_hook(lambda m, gi, go: seen.append(go[0].clone()))
    x = leaves((2, 4))[0]
    with region:
        h = x.exp()
        h.register_hook(lambda g: seen.append(g.clone()) or g * 3)
        h.retain_grad()
        out = net(h)
    out.sin().sum().backward()
    return [x.grad, h.grad, *seen, *(p.grad for p in net.parameters())]


@pytest.mark.parametrize("where", ["inside", "outside", "both"])
@each_policy
def test_save_on_cpu_and_hooks_of_the_user(where, policy):
    packed = []

    def hooks():
        return saved_tensors_hooks(lambda t: packed.append(t.shape) or t * 1, lambda t: t)

    def run(region):
        x = leaves((4,))[0]
        with save_on_cpu() if where != "inside" else torch.enable_grad():
            a = x.sin() * x
            with region:
                b = a.exp() * x
                with hooks() if where != "outside" else torch.enable_grad():
                    c = (b * b).sin()
                d = c.tanh() * b
            e = d.exp()
        return torch.autograd.grad(e.sum(), x)[0]

    expected = run(torch.enable_grad())
    count = len(packed)
    assert same_bits(run(ebb.region(policy)), expected)
    assert len(packed) == 2 * count  # the innermost wins: inside the user's hooks ebb packs nothing


@pytest.mark.parametrize("reentrant", [False, True])
@each_policy
def test_torchs_checkpoint_inside_around_and_beside_regions(policy, reentrant):
    chosen = policy
    torch_checkpoint = functools.partial(checkpoint, use_reentrant=reentrant)

    def block(x):
        return torch.nn.functional.dropout(x.sin() * x, 0.3).exp()

    def region(make, function, x):
        with make():
            return function(x)

    def program(make, x):
        inside = region(make, lambda x: torch_checkpoint(block, x) * x, x)
        around = torch_checkpoint(lambda x: region(make, block, x) * x, x)
        nested = region(make, lambda x: torch_checkpoint(lambda x: region(make, block, x), x), x)
        return inside + around * nested

    def run(make):
        torch.manual_seed(3)
        x = leaves((4,))[0]
        program(make, x).sum().backward()
        return x.grad, torch.rand(2)

    ours, plain = run(lambda: ebb.region(chosen)), run(torch.enable_grad)
    assert same_bits(ours[0], plain[0])
    assert same_bits(ours[1], plain[1])


@like_eager(ebb.policies.recompute_all)
def test_gradients_with_respect_to_intermediates(region):
    x = leaves((4,))[0]
    with region:
        a = x.sin()
        b = a.exp() * a
        c = b.tanh()
    return torch.autograd.grad(c.sum(), (a, b, x))


@like_eager()
def test_several_losses_from_one_region(region):
    x = leaves((4,))[0]
    with region:
        h = x.sin() * x
        first, second = h.exp().sum(), (h * h).tanh().sum()
    a = torch.autograd.grad(first, x, retain_graph=True)[0]
    del first
    return a, torch.autograd.grad(second, x)[0]
