"""A layer of experts on both ranks: tokens go to them and come back by all-to-all."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as differentiable
from torch import nn

from ebb_tests.ranks.collectives import into
from ebb_tests.ranks.models import WIDTH

exchange_counts = into(dist.all_to_all_single, 1)


class AllToAll(torch.autograd.Function):
    """As DeepSpeed, Megatron-LM and Tutel have it."""

    @staticmethod
    def forward(ctx, x, outgoing, incoming, how):
        ctx.splits = (outgoing, incoming, how)
        received = x.new_empty(sum(incoming), *x.shape[1:])
        x = x.contiguous()
        match how:
            case "single":
                dist.all_to_all_single(received, x, incoming, outgoing)
            case "async":
                work = dist.all_to_all_single(received, x, incoming, outgoing, async_op=True)
                work.wait()
            case "into what was computed":
                received = received.copy_(torch.arange(received.numel()).view_as(received)) * 2
                dist.all_to_all_single(received, x, incoming, outgoing)
        return received

    @staticmethod
    def backward(ctx, gradient):
        outgoing, incoming, how = ctx.splits
        return AllToAll.apply(gradient, incoming, outgoing, how), None, None, None


def exchange(x, outgoing, incoming, how):
    group = dist.group.WORLD
    match how:
        case "differentiable":
            received = x.new_empty(sum(incoming), *x.shape[1:])
            return differentiable.all_to_all_single(received, x, incoming, outgoing)
        case "functional":
            return funcol.all_to_all_single_autograd(x, incoming, outgoing, group)
        case _:
            return AllToAll.apply(x, outgoing, incoming, how)


class Experts(nn.Module):
    """A switch layer: each token goes to one of two experts, of which this rank has one."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.router = nn.Linear(WIDTH, 2)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        score, choice = self.router(x).softmax(-1).max(-1)
        order = choice.argsort(stable=True)
        counts = torch.bincount(choice, minlength=2)
        outgoing, incoming = counts.tolist(), exchange_counts(counts).tolist()
        h = exchange(x[order].sin(), outgoing, incoming, self.how)
        h = self.down(nn.functional.gelu(self.up(h))).sin()
        h = exchange(h, incoming, outgoing, self.how)
        return x + (h.new_zeros(x.shape).index_copy(0, order, h) * score.unsqueeze(-1)).sin()


WAYS = ("single", "async", "into what was computed", "differentiable", "functional")
