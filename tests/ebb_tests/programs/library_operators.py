"""Layers that call custom operators (`torch.library`), such as those of kernel libraries."""

from __future__ import annotations

import numpy as np
import torch
from torch.library import Library, custom_op

SIZE = 64
_library = Library("ebb_library", "FRAGMENT")


def _define(schema, kernel):
    _library.define(schema)
    name = schema.partition("(")[0]
    _library.impl(name, kernel, "CPU")
    return getattr(torch.ops.ebb_library, name)


def _add_in_place(x, w):
    x.add_(w)


def _in_padding(x):
    """A view of a larger buffer; the rest of the buffer stays uninitialised."""
    made = torch.empty(x.numel() + 256).fill_(np.random.rand())
    return made[: x.numel()].view(x.shape).copy_(x)


_dequantise = _define("dequantise(Tensor w) -> Tensor", lambda w: w.float() * 0.01)
_transposed = _define("transposed(Tensor w) -> Tensor", lambda w: (w.float() * 0.01).t())
_padded = _define("padded(Tensor w) -> Tensor", lambda w: _in_padding(w.float() * 0.01))
_parts = _define("parts(Tensor w) -> Tensor[]", lambda w: [w.float() * 0.01, w.float() * 0.02])
_columns = _define(
    "columns(Tensor w) -> Tensor", lambda w: (w.float() * 0.01).repeat(1, 2)[:, :SIZE]
)
_add_ = _define("add_(Tensor(a!) x, Tensor w) -> ()", _add_in_place)


@custom_op("ebb_library::squash", mutates_args=())
def _squash(x: torch.Tensor) -> torch.Tensor:
    return x.tanh()


@custom_op("ebb_library::attend", mutates_args=())
def _attend(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.softmax(-1), x.logsumexp(-1, keepdim=True)


@custom_op("ebb_library::drop", mutates_args=())
def _drop(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mask = (torch.rand_like(x) > 0.5).float()
    return x * mask, mask


@custom_op("ebb_library::looped", mutates_args=())
def _looped(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)  # filled like this by kernels that torch does not see
    out.numpy()[:] = np.tanh(x.detach().numpy())
    return out


@custom_op("ebb_library::fill", mutates_args={"out"})
def _fill(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x.sin())


@custom_op("ebb_library::view_of_made", mutates_args=())
def _view_of_made(x: torch.Tensor) -> torch.Tensor:
    return _in_padding(x.sin())


def _saves_output(ctx, inputs, output):
    ctx.save_for_backward(output)


def _saves_input(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


def _saves_outputs(ctx, inputs, output):
    ctx.save_for_backward(*output)


def _tanh_backward(ctx, grad):
    (y,) = ctx.saved_tensors
    return grad * (1 - y * y)


def _attend_backward(ctx, grad, grad_lse):
    y, lse = ctx.saved_tensors
    return y * (grad - (grad * y).sum(-1, keepdim=True)) + grad_lse * y + 0 * lse


_squash.register_autograd(_tanh_backward, setup_context=_saves_output)
_looped.register_autograd(_tanh_backward, setup_context=_saves_output)
_attend.register_autograd(_attend_backward, setup_context=_saves_outputs)
_drop.register_autograd(lambda ctx, g, _: g * ctx.saved_tensors[1], setup_context=_saves_outputs)
_view_of_made.register_autograd(
    lambda ctx, g: g * ctx.saved_tensors[0].cos(), setup_context=_saves_input
)


class _Dequantised(torch.autograd.Function):
    """A product with a weight that is dequantised in forward and in backward."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(w)
        return x @ _dequantise(w)

    @staticmethod
    def backward(ctx, grad):
        return grad @ _dequantise(ctx.saved_tensors[0]).t(), None


class _Filled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x)
        _fill(x, out)
        ctx.save_for_backward(x, out)
        return out * 2

    @staticmethod
    def backward(ctx, grad):
        x, out = ctx.saved_tensors
        return 2 * grad * x.cos() + 0 * out


def _in_place(x, w):
    y = x * 2
    with torch.no_grad():
        _add_(y, w.float())
    return y.sin()


# Each function takes activations and an integer weight.
LAYERS = {
    "saves its output": lambda x, w: _squash(x).exp(),
    "dequantised weight": lambda x, w: (x @ _dequantise(w)).sin(),
    "autograd.Function": lambda x, w: _Dequantised.apply(x, w).sin(),
    "several outputs": lambda x, w: _attend(x)[0].sin(),
    "list of outputs": lambda x, w: ((x @ _parts(w)[0]).sin() @ _parts(w)[1]).sin(),
    "view of what it made": lambda x, w: ((x @ _padded(w)).sin() @ _transposed(w)).sin()
    @ _columns(w),
    "view that autograd saves": lambda x, w: _view_of_made(x).exp(),
    "argument that it fills": lambda x, w: _Filled.apply(x).exp(),
    "in place": _in_place,
    "random": lambda x, w: _drop(x)[0].exp(),
    "kernel that torch does not see": lambda x, w: _looped(x).exp(),
    "operators of torch between": lambda x, w: (_squash(x.sin()) @ _dequantise(w)).relu().exp(),
}
