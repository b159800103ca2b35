"""The last operator of a region saves its input and small results: ebb copies no input for them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ebb
from ebb_tests.exactness import like_eager

LINES = (64, 1024)
IMAGE = (2, 8, 32, 32)
HEADS = (1, 4, 64, 64)
STEPS = (64, 4, 32)


class RootMeanSquare(torch.autograd.Function):
    """Saves its input, and a small result of several operators, after all of them have run."""

    @staticmethod
    def forward(ctx, x):
        scale = x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        x, scale = ctx.saved_tensors
        grad = grad * scale
        return grad - x * scale.square() * (grad * x).mean(-1, keepdim=True)


def ctc_loss(x):
    counts = torch.full((4,), 64), torch.full((4,), 10)
    return F.ctc_loss(x, torch.arange(1, 11).repeat(4, 1), *counts)


def lstm(x):
    torch.manual_seed(0)
    weights = [torch.randn(32, 32), torch.randn(32, 8), torch.zeros(32), torch.zeros(32)]
    states = torch.zeros(1, 4, 8), torch.zeros(1, 4, 8)
    return torch.lstm(x, states, weights, True, 1, 0.0, True, False, False)[0]


def attention(x):
    return F.scaled_dot_product_attention(x, x, x)


OPERATORS = {
    "adaptive_max_pool2d": (IMAGE, lambda x: F.adaptive_max_pool2d(x, 4)),
    "amax": (LINES, lambda x: x.amax(1)),
    "amin": (LINES, lambda x: x.amin(1)),
    "avg_pool2d": (IMAGE, lambda x: F.avg_pool2d(x, 2)),
    "batch_norm": (IMAGE, lambda x: F.batch_norm(x, None, None, training=True)),
    "cdist": (LINES, lambda x: torch.cdist(x, torch.ones(8, 1024))),
    "cosine_similarity": (LINES, lambda x: F.cosine_similarity(x, x.detach().flip(0))),
    "cross_entropy": (LINES, lambda x: F.cross_entropy(x, torch.arange(64))),
    "ctc_loss": (STEPS, ctc_loss),
    "cummax": (LINES, lambda x: x.cummax(1).values),
    "cumprod": (LINES, lambda x: x.cumprod(1)),
    "custom function": (LINES, RootMeanSquare.apply),
    "fractional_max_pool2d": (IMAGE, lambda x: F.fractional_max_pool2d(x, 2, 8)),
    "gelu": (LINES, F.gelu),
    "group_norm": (IMAGE, lambda x: F.group_norm(x, 4)),
    "huber_loss": (LINES, lambda x: F.huber_loss(x, torch.zeros(LINES))),
    "instance_norm": (IMAGE, F.instance_norm),
    "layer_norm": (LINES, lambda x: F.layer_norm(x, (1024,))),
    "log_softmax": (LINES, lambda x: x.log_softmax(1)),
    "logcumsumexp": (LINES, lambda x: x.logcumsumexp(1)),
    "logsumexp": (LINES, lambda x: x.logsumexp(1)),
    "lstm": (STEPS, lstm),
    "max": (LINES, lambda x: x.max(1).values),
    "max_pool1d": (IMAGE[1:], lambda x: F.max_pool1d(x.flatten(1), 2)),
    "max_pool2d": (IMAGE, lambda x: F.max_pool2d(x, 2)),
    "max_pool3d": (IMAGE, lambda x: F.max_pool3d(x, 2)),
    "nll_loss": (LINES, lambda x: F.nll_loss(x, torch.arange(64))),
    "norm": (LINES, lambda x: x.norm()),
    "norm of rows": (LINES, lambda x: x.norm(dim=1)),
    "normalize": (LINES, lambda x: F.normalize(x, dim=1)),
    "prod": (LINES, lambda x: x.prod(1)),
    "rms_norm": (LINES, lambda x: F.rms_norm(x, (1024,))),
    "scaled_dot_product_attention": (HEADS, attention),
    "softmax": (LINES, lambda x: x.softmax(1)),
    "std": (LINES, lambda x: x.std(1)),
    "swish": (LINES, lambda x: x * x.sigmoid()),
    "topk": (LINES, lambda x: x.topk(4, 1).values),
    "var_mean": (LINES, lambda x: sum(part.sum() for part in torch.var_mean(x, 1))),
}


def measured(function, x):
    """Peak bytes of a step, and its gradient."""

    def step():
        x.grad = None
        torch.manual_seed(1)
        function(x).backward()

    return ebb.profile(step, warmup=1, steps=1).peak, x.grad


@pytest.fixture(params=OPERATORS)
def program(request):
    shape, operator = OPERATORS[request.param]
    torch.manual_seed(0)
    x = torch.randn(shape, requires_grad=True)

    def function(z):
        return operator((0.1 * z).exp()).sum()

    return function, x


def in_region(function, policy):
    def inner(z):
        with ebb.region(policy):
            return function(z)

    return inner


def test_recomputed_input_has_the_peak_of_torchs_checkpoint(program):
    function, x = program
    theirs, expected = measured(lambda z: checkpoint(function, z, use_reentrant=False), x)

    ours, gradient = measured(in_region(function, ebb.policies.recompute_all), x)

    assert torch.equal(gradient, expected)
    assert ours <= theirs


@pytest.mark.parametrize("decision", [ebb.SAVE, ebb.OFFLOAD, ebb.RECOMPUTE_EACH_TIME], ids=repr)
def test_input_with_another_decision_has_at_most_eagers_peak(program, decision):
    function, x = program
    eager, expected = measured(function, x)
    policy = ebb.Policy({"aten::exp": decision}, default=ebb.RECOMPUTE)

    ours, gradient = measured(in_region(function, policy), x)

    assert torch.equal(gradient, expected)
    assert ours <= eager + 1024  # a loss of sum() and the region's own small tensors


@like_eager()
def test_result_that_cannot_be_recomputed_does_not_fail_another_node(region):
    x = torch.linspace(0.1, 1, 64, requires_grad=True)
    exponent = torch.full((64,), 2.0)
    with region:
        y = x.sin().exp()
        power = y.pow(exponent)  # saves y, the exponent and the result
        first, second = (y * 3).sum(), power.sum()
    exponent.mul_(2)  # `second` has no backward any more
    return [*torch.autograd.grad(first, x), second.detach()]


@like_eager()
def test_input_is_written_by_a_hook_after_the_results_are_recomputed(region):
    x = torch.linspace(0.1, 1, 64).view(8, 8).requires_grad_()
    with region:
        y = x.sin().exp()
        loss = (y.amax(1, keepdim=True) + y.logsumexp(1, keepdim=True) - y).square().sum()
    seen = []

    def write(grads):
        seen.append(grads[0].clone())
        grads[0].mul_(0.5)

    y.grad_fn.register_prehook(write)
    return [*torch.autograd.grad(loss, x), *seen]


@like_eager()
def test_two_branches_from_one_input_of_several_nodes(region):
    x = torch.linspace(0.1, 1, 64).view(8, 8).requires_grad_()
    with region:
        y = x.sin().exp()
        left, right = y, y
        for _ in range(4):
            left = left - left.amax(1, keepdim=True)
            right = right * right.sigmoid()
        loss = (left * right).sum() + y.norm() + torch.cdist(y, y[:2]).sum()
    return torch.autograd.grad(loss, x)


@like_eager()
def test_second_backward_of_a_graph_whose_results_were_recomputed_early(region):
    x = torch.linspace(0.1, 1, 64).view(8, 8).requires_grad_()
    with region:
        y = x.sin().exp()
        loss = F.layer_norm(y, (8,)).square().sum() + y.std()
    first = torch.autograd.grad(loss, x, retain_graph=True)
    return [*first, *torch.autograd.grad(loss, x)]
