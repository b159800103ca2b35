"""Layers that Megatron-LM splits: collectives that write in place inside of custom functions."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from ebb_tests.ranks.collectives import into, reduced, reduced_later
from ebb_tests.ranks.models import WIDTH

gathered = into(dist.all_gather_into_tensor, 2)
scattered_sums = into(dist.reduce_scatter_tensor, 0.5)


def halves(t, dim):
    return t.chunk(2, dim)[dist.get_rank()].contiguous()


def gathered_along_last(t):
    parts = [torch.empty_like(t) for _ in range(2)]
    parts[dist.get_rank()] = t
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts, -1).contiguous()


def function_of(name, forward, backward):
    class Region(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            return forward(t)

        @staticmethod
        def backward(ctx, gradient):
            return backward(gradient)

    Region.__name__ = name
    return Region.apply


copy_to = function_of("CopyTo", lambda t: t, lambda g: reduced(g.contiguous()))
reduce_from = function_of("ReduceFrom", reduced, lambda g: g)
reduce_later = function_of("ReduceLater", reduced_later, lambda g: g)
scatter_to = function_of("ScatterTo", lambda t: halves(t, -1), gathered_along_last)
gather_from = function_of("GatherFrom", gathered_along_last, lambda g: halves(g, -1))
gather_sequence = function_of("GatherSequence", gathered, scattered_sums)
scatter_sequence = function_of("ScatterSequence", scattered_sums, gathered)


class AsyncLinear(torch.autograd.Function):
    """A product whose backward sums the input's gradient while it computes the weight's, and, with
    `sequence`, gathers the input into one global buffer in both directions.
    """

    buffer = None

    @classmethod
    def gather(cls, x):
        if cls.buffer is None:
            cls.buffer = torch.empty(2 * x.shape[0], *x.shape[1:], dtype=x.dtype)
        dist.all_gather_into_tensor(cls.buffer, x.contiguous())
        return cls.buffer

    @staticmethod
    def forward(ctx, x, weight, sequence):
        ctx.save_for_backward(x, weight)
        ctx.sequence = sequence
        whole = AsyncLinear.gather(x) if sequence else x
        return whole @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        whole = AsyncLinear.gather(x) if ctx.sequence else x
        gradient_of_x = gradient @ weight
        if ctx.sequence:
            part = torch.empty_like(x)
            work = dist.reduce_scatter_tensor(part, gradient_of_x, async_op=True)
        else:
            part = gradient_of_x
            work = dist.all_reduce(part, async_op=True)
        gradient_of_weight = gradient.t() @ whole
        work.wait()
        return part, gradient_of_weight, None


class ColumnParallel(nn.Module):
    def __init__(self, wide, narrow):
        super().__init__()
        self.weight = nn.Parameter(halves(torch.randn(narrow, wide) / wide, 0))
        self.bias = nn.Parameter(torch.zeros(narrow // 2))


class RowParallel(nn.Module):
    def __init__(self, wide, narrow):
        super().__init__()
        self.weight = nn.Parameter(halves(torch.randn(narrow, wide) / wide, 1))
        self.bias = nn.Parameter(torch.zeros(narrow))


class Layer(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(WIDTH)
        self.up = ColumnParallel(WIDTH, 2 * WIDTH)
        self.down = RowParallel(2 * WIDTH, WIDTH)

    def forward(self, x):
        h = self.norm(x)
        sequence = self.kind in ("sequence", "sequence, async")
        if self.kind in ("async", "sequence, async"):
            h = AsyncLinear.apply(h, self.up.weight, sequence) + self.up.bias
        else:
            h = gather_sequence(h) if sequence else copy_to(h)
            h = nn.functional.linear(h, self.up.weight, self.up.bias)
        h = nn.functional.gelu(h)
        if self.kind == "gathered between":
            h = scatter_to(gather_from(h).sin())
        h = nn.functional.linear(h, self.down.weight)
        reduce = reduce_later if self.kind == "reduced later" else reduce_from
        h = scatter_sequence(h) if sequence else reduce(h)
        return x + nn.functional.dropout((h + self.down.bias).sin(), 0.1)


class Stack(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layers = nn.ModuleList(Layer(kind) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sin()


KINDS = ("plain", "reduced later", "gathered between", "async", "sequence")
