"""Programs with collectives that replays repeat."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn

import ebb
from ebb_tests.ranks.comparing import POLICIES, assert_exact

REPEATED = ebb.policies.recompute_collectives
WIDTH = 8


def reduced(x):
    dist.all_reduce(x)
    return x


def reduced_later(x):
    dist.all_reduce(x, async_op=True).wait()
    return x


def gathered(x):
    whole = x.new_empty(2 * len(x), WIDTH)
    dist.all_gather_into_tensor(whole, x)
    return whole


def scattered(x):
    part = x.new_empty(len(x) // 2, WIDTH)
    dist.reduce_scatter_tensor(part, x)
    return part


def exchanged(x):
    received = x.new_empty(len(x), WIDTH)
    dist.all_to_all_single(received, x)
    return received


def exchanged_unevenly(x):
    mine = [1, 3] if dist.get_rank() == 0 else [3, 1]
    received = x.new_empty(len(x), WIDTH)
    dist.all_to_all_single(received, x, mine, mine)
    return received


def functional(name, *arguments):
    def call(x):
        return funcol.wait_tensor(getattr(funcol, name)(x, *arguments, group=dist.group.WORLD))

    call.__name__ = f"functional_{name}"
    return call


COLLECTIVES = (
    reduced,
    reduced_later,
    gathered,
    scattered,
    exchanged,
    exchanged_unevenly,
    functional("all_reduce", "sum"),
    functional("all_gather_tensor", 0),
    functional("reduce_scatter_tensor", "sum", 0),
    functional("all_to_all_single", None, None),
    functional("broadcast", 1),
)
BY_NAME = {collective.__name__: collective for collective in COLLECTIVES}


class Exchange(torch.autograd.Function):
    """A collective without a backward of its own, as in the layers of Megatron-LM."""

    @staticmethod
    def forward(ctx, x, name):
        ctx.rows = len(x)
        return BY_NAME[name](x.clone())

    @staticmethod
    def backward(ctx, gradient):
        return gradient.repeat(2, 1)[: ctx.rows], None


def assert_exact_under(train, policy, *accelerator):
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(POLICIES, "tried", policy)
        assert_exact(train, ["tried"], *accelerator)


def inputs():
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator, requires_grad=True)


def region_of(inside, name, x):
    with inside.region():
        return after(Exchange.apply(x.sin(), name))


def after(y):
    return (y * y.exp()).cos().sum()


class WithPolicy:
    def __init__(self, policy):
        self.policy = policy

    def region(self, **settings):
        return ebb.region(self.policy, **settings)


class Layer(nn.Module):
    def __init__(self, collective):
        super().__init__()
        self.collective = collective
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + Exchange.apply(F.gelu(self.up(x)), self.collective)[: len(x)].sin()


def stack(depth=3):
    torch.manual_seed(5)
    names = ["reduced", "exchanged", "functional_all_reduce"]
    return nn.Sequential(*(Layer(names[index % len(names)]) for index in range(depth)))
