"""Padding rows that backward functions see together: see Note [Dead rows]."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
from torch.nn import functional as F

import ebb
from ebb_tests.replays import replays_ahead

R, D, LIVE = 16, 4, 6
COUNT = torch.tensor(LIVE)
VALID = (torch.arange(R) < LIVE).unsqueeze(1)
WEIGHTS = torch.linspace(0.5, 1.5, D)


class Ratio(torch.autograd.Function):
    """Saves both arguments and its result after its operators have run."""

    @staticmethod
    def forward(ctx, a, b):
        ratio = a / b
        ctx.save_for_backward(a, b, ratio)
        return ratio

    @staticmethod
    def backward(ctx, gradient):
        a, b, ratio = ctx.saved_tensors
        return gradient * (ratio / a), gradient * -(ratio / b)


def in_place(operator):
    """The operator on a clone, whose old contents torch saves by another clone."""
    return lambda h, s: operator(h.clone(), s)


def on_a_view(operator):
    def function(h, s):
        h = h.clone()
        operator(h.view(R, 2, D // 2), s.view(R, 2, D // 2))
        return h

    return function


# Functions of two tensors with rows. `s` is positive, and tiny in padding rows, as `h` is.
TOGETHER = {
    "amax": lambda h, s: h - h.amax(-1, keepdim=True),
    "amin": lambda h, s: h - h.amin(-1, keepdim=True),
    "amax without the dimension": lambda h, s: h - h.amax(1).unsqueeze(1),
    "max": lambda h, s: h - h.max(dim=1, keepdim=True).values,
    "norm": lambda h, s: h / h.norm(dim=-1, keepdim=True),
    "maximum norm": lambda h, s: h / torch.linalg.vector_norm(h, torch.inf, -1, keepdim=True),
    "logsumexp": lambda h, s: h - h.logsumexp(-1, keepdim=True),
    "softmax": lambda h, s: h.softmax(-1),
    "std": lambda h, s: h / h.std(-1, keepdim=True),
    "layer_norm": lambda h, s: F.layer_norm(h, (D,)),
    "quotient": lambda h, s: h / s,
    "quotient of a sum": lambda h, s: h / s.sum(-1, keepdim=True),
    "quotient of itself": lambda h, s: h / h.abs().sum(-1, keepdim=True),
    "product": lambda h, s: h * s,
    "product of quotients": lambda h, s: (h / s) * (s / h),
    "root of a quotient": lambda h, s: (h.abs() / s).sqrt() * s,
    "power": lambda h, s: s**h,
    "atan2": lambda h, s: torch.atan2(h, s + 1),
    "hypot": lambda h, s: torch.hypot(h, s),
    "in place": in_place(lambda h, s: h.div_(s)),
    "in place on a view": on_a_view(lambda h, s: h.div_(s)),
    "power in place on a view": on_a_view(lambda h, s: h.abs_().pow_(s)),
    "root in place on a view": on_a_view(lambda h, s: h.abs_().sqrt_()),
    "a function of its own": Ratio.apply,
    "dropout": lambda h, s: torch.native_dropout(h, 0.25, True)[0].amax(-1, keepdim=True) - h,
}

POLICIES = {
    "h": ebb.Policy({"aten::mm": ebb.PAGE}, default=ebb.SAVE),
    "h, the rest is recomputed": ebb.Policy({"aten::mm": ebb.PAGE}),
    "all but h": ebb.Policy({"aten::mm": ebb.SAVE}, default=ebb.PAGE),
    "all": ebb.Policy(default=ebb.PAGE),
    "all but products, at each use": ebb.Policy(
        {"aten::mm": ebb.PAGE}, default=ebb.RECOMPUTE_EACH_TIME
    ),
}


def rows(seed):
    """Random rows, of which the padding is tiny."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(R, D, generator=generator, device="cpu").to(VALID.device)
    return torch.where(VALID, x, x * 1e-20)


def gradients(function, policy=None, kept=()):
    """Gradients of a program in a region, or in eager. `kept`: what it holds until backward."""
    torch.manual_seed(0)
    w, v = (torch.eye(D).add_(0.125).requires_grad_() for _ in range(2))
    x, s = rows(1).requires_grad_(), rows(2).requires_grad_()
    with contextlib.nullcontext() if policy is None else ebb.region(policy):
        h = ebb.experimental.mark_rows(x.clone(), COUNT) @ w
        scale = (ebb.experimental.mark_rows(s.clone(), COUNT) @ v).abs() + 1e-25
        y = function(h, scale)
        loss = (torch.where(VALID, y, 0) * WEIGHTS).sum()
        held = [{"h": h, "s": scale, "y": y}[name] for name in kept]
    del h, scale, y
    found = torch.autograd.grad(loss, [w, v, x, s], allow_unused=True)
    del held
    return found


def assert_same(expected, found):
    for a, b in zip(expected, found, strict=True):
        assert (a is None and b is None) or torch.equal(a, b), f"{b} instead of {a}"


@pytest.fixture(params=[False, True], ids=["", "ahead"])
def ahead(request):
    with replays_ahead() if request.param else contextlib.nullcontext():
        yield


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("kept", ["", "h", "s", "y", "hs", "sy"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("name", TOGETHER)
def test_padding_rows_that_belong_together(name, policy, kept):
    expected = gradients(TOGETHER[name], kept=kept)
    assert all(g is None or g.isfinite().all() for g in expected)

    for _ in range(2):
        found = ebb.experimental.paging.run_step(lambda: gradients(TOGETHER[name], policy, kept))
        assert_same(expected, found)


def random_program(draw):
    """A function of two tensors with rows: random operators on what came before."""
    steps = []
    for _ in range(draw.randint(2, 6)):
        name = draw.choice([*TOGETHER, "mm", "add", "exp", "sin", "positive"])
        steps.append((name, draw.random(), draw.random()))

    def function(h, s):
        known = [h, s]
        for name, first, second in steps:
            a, b = (known[int(at * len(known))] for at in (first, second))
            if name in TOGETHER:
                y = TOGETHER[name](a, b.abs() + 1e-25)
            elif name == "mm":
                y = a @ torch.eye(D).add_(0.25)
            else:
                y = {
                    "add": lambda a, b: a + b,
                    "exp": lambda a, b: a.clamp(max=2).exp(),
                    "sin": lambda a, b: a.sin(),
                    "positive": lambda a, b: a.abs() + b.abs() + 0.5,
                }[name](a, b)
            known.append(y.expand(R, D).contiguous() if y.shape != h.shape else y)
        return known[-1] + known[-2]

    return function


def random_policy(draw):
    decisions = [ebb.SAVE, ebb.RECOMPUTE, ebb.RECOMPUTE_EACH_TIME, ebb.PAGE, ebb.PAGE]
    names = ["mm", "div", "amax", "amin", "abs", "exp", "sum", "clone", "mul", "linalg_vector_norm"]
    rules = {f"aten::{name}": draw.choice(decisions) for name in names if draw.random() < 0.7}
    return ebb.Policy(
        rules, default=draw.choice(decisions), inputs=draw.choice([ebb.SAVE, ebb.PAGE])
    )


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("seed", range(60))
def test_random_programs_whose_padding_rows_meet(seed):
    draw = random.Random(seed)
    program, expected = None, ()
    while not expected or not all(g is None or g.isfinite().all() for g in expected):
        program = random_program(draw)
        expected = gradients(program)
    kept = draw.choice(["", "h", "s", "y", "hsy"])
    policy = random_policy(draw)

    for _ in range(2):
        found = ebb.experimental.paging.run_step(lambda: gradients(program, policy, kept))
        assert_same(expected, found)
