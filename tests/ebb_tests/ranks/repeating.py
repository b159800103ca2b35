"""Programs with collectives that replays repeat."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn

import ebb
from ebb_tests.ranks.collectives import into, reduced, reduced_later

REPEATED = ebb.policies.recompute_collectives
WIDTH = 8


def exchanged_unevenly(received, x):
    mine = [1, 3] if dist.get_rank() == 0 else [3, 1]
    dist.all_to_all_single(received, x, mine, mine)


def functional(name, *arguments):
    return lambda x: funcol.wait_tensor(getattr(funcol, name)(x, *arguments, dist.group.WORLD))


# Functions that may write to their argument.
COLLECTIVES = {
    "reduced": reduced,
    "reduced later": reduced_later,
    "gathered": into(dist.all_gather_into_tensor, 2),
    "scattered": into(dist.reduce_scatter_tensor, 0.5),
    "exchanged": into(dist.all_to_all_single, 1),
    "exchanged unevenly": into(exchanged_unevenly, 1),
    "functional all_reduce": functional("all_reduce", "sum"),
    "functional all_gather": functional("all_gather_tensor", 0),
    "functional reduce_scatter": functional("reduce_scatter_tensor", "sum", 0),
    "functional all_to_all": functional("all_to_all_single", None, None),
    "functional broadcast": functional("broadcast", 1),
}


class Exchange(torch.autograd.Function):
    """A collective without a backward of its own, as in the layers of Megatron-LM."""

    @staticmethod
    def forward(ctx, x, name):
        ctx.rows = len(x)
        return COLLECTIVES[name](x.clone())

    @staticmethod
    def backward(ctx, gradient):
        return gradient.repeat(2, 1)[: ctx.rows], None


def inputs():
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator, requires_grad=True)


def region_of(inside, name, x):
    with inside.region():
        return after(Exchange.apply(x.sin(), name))


def after(y):
    return (y * y.exp()).cos().sum()


class Layer(nn.Module):
    def __init__(self, collective):
        super().__init__()
        self.collective = collective
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + Exchange.apply(F.gelu(self.up(x)), self.collective)[: len(x)].sin()


def stack(depth=3):
    torch.manual_seed(5)
    names = ["reduced", "exchanged", "functional all_reduce"]
    return nn.Sequential(*(Layer(names[index % len(names)]) for index in range(depth)))
