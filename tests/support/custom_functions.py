"""Custom autograd functions whose backward treats what it saved in unusual ways."""

from __future__ import annotations

from torch.autograd import Function


class GivesWhatItSaved(Function):
    """Its gradient is the tensor that it saved, which AccumulateGrad may take for its own."""

    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a.cos())
        return a.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0]


class Scratch(Function):
    """Uses what it saved as scratch memory in backward, as some fused kernels do."""

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
    """The same, by a write that moves no version."""

    @staticmethod
    def backward(ctx, grad):
        (a,) = ctx.saved_tensors
        result = grad * a
        a.data.zero_()
        return result
