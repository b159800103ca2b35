"""Custom autograd functions whose backward returns or overwrites a saved tensor."""

from __future__ import annotations

from torch.autograd import Function


class GivesWhatItSaved(Function):
    """Returns its saved tensor as the gradient. AccumulateGrad may keep it as `.grad`, uncopied."""

    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a.cos())
        return a.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0]


class Scratch(Function):
    """Overwrites its saved tensor in backward, as some fused kernels do."""

    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a.clone()

    @staticmethod
    def backward(ctx, grad):
        (a,) = ctx.saved_tensors
        result = grad * a
        a.zero_()
        return result


class SilentScratch(Scratch):
    """`Scratch`, but the write does not increment the version counter."""

    @staticmethod
    def backward(ctx, grad):
        (a,) = ctx.saved_tensors
        result = grad * a
        a.data.zero_()
        return result
