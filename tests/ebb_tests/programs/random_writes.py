"""Instructions of random programs that write, differentiate, or change regions and modes."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import ebb
from ebb_tests.programs import random_instructions as make
from ebb_tests.programs.custom_functions import GivesWhatItSaved
from ebb_tests.programs.random_instructions import (
    UNARY,
    choose,
    fits,
    is_differentiable,
    is_float,
    is_vector,
)
from ebb_tests.programs.random_programs import NAMES, Machine, Skip

# Ordinary writes, and writes that autograd or version counters do not notice.


def grow_and_fill(t: torch.Tensor) -> torch.Tensor:
    if t.is_inference():
        raise Skip  # resize_ would leave uninitialised bytes, and fill_ would raise
    return t.resize_(t.numel() + 4).fill_(0.2)


ALONE = (
    torch.sin_, torch.tanh_, torch.relu_, lambda t: t.mul_(0.5), lambda t: t.add_(1), torch.abs_,
    lambda t: t.clamp_(-1, 1), torch.zero_, lambda t: t.fill_(0.3), torch.neg_, torch.sigmoid_,
    lambda t: t[:1].mul_(3), lambda t: t.cumsum_(0), lambda t: t.pow_(2), F.leaky_relu_,
    lambda t: t.transpose(0, -1).add_(0.5), lambda t: t.masked_fill_(t > 0.2, 0.1), F.elu_,
    lambda t: t.__setitem__(0, 0.7), lambda t: t.__setitem__(t < 0, 0.2), lambda t: t.add_(t.sum()),
    lambda t: torch._foreach_mul_([t[:1], t[1:]], 0.5), lambda t: torch._foreach_sin_([t, t]),
    lambda t: t.renorm_(2, 0, 1.0), lambda t: t.index_fill_(0, torch.tensor([0]), 0.9),
    lambda t: t.transpose_(0, -1), lambda t: t.unsqueeze_(0), lambda t: t.squeeze_(),
    lambda t: t.fill_diagonal_(0.4), lambda t: t.mul_(t), torch.round_,
    lambda t: t.resize_(t.numel() // 2 + 1), grow_and_fill,
)  # fmt: skip
JOINT = (
    lambda t, o: t.add_(o), lambda t, o: t.mul_(o), lambda t, o: t.copy_(o),
    lambda t, o: t.sub_(o, alpha=2), lambda t, o: t.addcmul_(o, o), lambda t, o: t.lerp_(o, 0.3),
    lambda t, o: t.masked_fill_(o > 0, 0.2), lambda t, o: t.__setitem__(slice(0, 1), o[:1]),
    lambda t, o: t.index_put_((torch.arange(len(o)) % len(t),), o), lambda t, o: t.atan2_(o),
    lambda t, o: t.scatter_(0, torch.zeros_like(o, dtype=torch.int64), o),
    lambda t, o: torch._foreach_add_([t], [o]), lambda t, o: torch._foreach_copy_([t], [o]),
    lambda t, o: t.masked_scatter_(t > 0, o.expand_as(t)), lambda t, o: t.div_(o.abs() + 1),
    lambda t, o: t.index_add_(0, torch.arange(len(o)) % len(t), o), lambda t, o: t[1:].add_(o[:1]),
    lambda t, o: t.put_(torch.tensor([0]), o.flatten()[:1]), lambda t, o: t.diagonal().copy_(o[0]),
    lambda t, o: torch.mul(o, o, out=t), lambda t, o: torch.sin(o, out=t),
    lambda t, o: torch.add(o, 1, out=t), lambda t, o: torch.cat([o], out=t),
    lambda t, o: torch.cumsum(o, 0, out=t), lambda t, o: torch.where(o > 0, o, t, out=t),
    lambda t, o: torch.add(t, o, out=t), lambda t, o: t.addmm_(o, o), lambda t, o: t.hypot_(o),
)  # fmt: skip
FILLS = (
    lambda t, g: t.normal_(generator=g), lambda t, g: t.uniform_(generator=g),
    lambda t, g: t.bernoulli_(0.5, generator=g), lambda t, g: t.exponential_(generator=g),
    lambda t, g: t.random_(0, 3, generator=g), lambda t, g: F.dropout(t, inplace=True),
    lambda t, g: F.rrelu(t, training=True, inplace=True), lambda t, g: t.log_normal_(generator=g),
    lambda t, g: t[:1].normal_(generator=g), lambda t, g: torch.rand(t.shape, out=t, generator=g),
)  # fmt: skip


def write(m: Machine, operand: int, way: int, function: Callable) -> None:
    slot = m.slot(operand & ~3, is_vector)  # & ~3: any tensor, not only those that require grad
    if way >= 64:  # write to a copy that autograd has not saved
        m.push(slot.tensor * 0.5)
        slot = m.pool[-1]
    silent = way % 8 == 7
    m.touch(slot, silent)
    t = slot.tensor
    if way % 8 >= 4 or (t.is_leaf and t.requires_grad and way > 8):  # others raise for leaves
        with torch.no_grad():
            function(t.data if silent else t.detach() if way % 8 == 6 else t)
    else:
        function(t)


def write_alone(m, a, b, c):
    write(m, a, c, choose(ALONE, b))


def write_joint(m, a, b, c):
    source = m.pick(c, fits(m.pick(a & ~3, is_vector)))
    write(m, a, c, lambda t: choose(JOINT, b)(t, source))


def write_random(m, a, b, c):
    write(m, a, c, lambda t: choose(FILLS, b)(t, m.generator if c % 2 else None))


def write_input(m, a, b, c):
    """Writes to an input without gradients, as an optimizer or a buffer's update does."""
    slot = m.input_slot(a)
    m.touch(slot, silent=c % 4 == 3)
    with torch.no_grad():
        choose(ALONE, b)(slot.tensor.data if c % 4 == 3 else slot.tensor)


def write_behind_torch(m, a, b, c):
    """Writes with numpy to a tensor from outside of regions.

    Skips computed tensors (see `Machine.touch`), and all tensors with offloading or paging, since
    the bytes may have been copied already.
    """
    slot = m.slot(a, lambda t: is_float(t) and t.dtype != torch.bfloat16)
    if slot.record.computed or m.engine.keep != ebb.SAVE:
        raise Skip
    m.touch(slot, unseen=True)
    m.refusable = True
    slot.tensor.detach().numpy()[...] *= 2


def write_result(m, a, b, c):
    """Calls an operator with new tensors as `out=`."""
    first = m.pick(a, is_vector)
    other = m.pick(b, fits(first)).detach()
    first = first.detach()
    out = torch.empty(0 if c % 2 else first.shape, dtype=torch.result_type(first, other))
    tables = (
        lambda: torch.mul(first, other, out=out), lambda: torch.sub(first, other, out=out),
        lambda: torch.maximum(first, other, out=out), lambda: torch.atan2(first, other, out=out),
        lambda: torch.sort(first, 0, out=(out, torch.empty(0, dtype=torch.int64))),
        lambda: torch.max(first, 0, out=(out, torch.empty(0, dtype=torch.int64))),
        lambda: torch.stack([first, first], out=out), lambda: torch.normal(first, 1.0, out=out),
        lambda: torch.cumsum(first, 0, out=out),
    )  # fmt: skip
    m.push(choose(tables, c >> 1)())


# Custom functions.


class SavesInput(Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a * a

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0] * grad * 2


class SavesOutput(Function):
    @staticmethod
    def forward(ctx, a):
        out = a.sigmoid()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0] * grad


class SavesIntermediate(Function):
    """Has two results. Keeps an intermediate as an attribute, and saves another."""

    @staticmethod
    def forward(ctx, a):
        ctx.h = a.sin()
        ctx.save_for_backward(ctx.h * 2, a)
        indices = a.argsort(-1)
        ctx.mark_non_differentiable(indices)
        return ctx.h + 1, indices

    @staticmethod
    def backward(ctx, grad, _):
        return grad * ctx.saved_tensors[0] + ctx.h


class Scratch(Function):
    """Overwrites its saved tensor in backward. A second backward gives the same result."""

    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a.abs()

    @staticmethod
    def backward(ctx, grad):
        (a,) = ctx.saved_tensors
        result = grad * a.abs()
        a.data.abs_()
        return result


class Doubles(Function):
    @staticmethod
    def forward(ctx, a):
        a.mul_(2)
        ctx.mark_dirty(a)
        return a

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class DoublesUnseen(Doubles):
    """Writes without the dispatcher, and declares it by `mark_dirty`."""

    @staticmethod
    def forward(ctx, a):
        a.numpy()[...] *= 2
        ctx.mark_dirty(a)
        return a


class GivesAView(Function):
    @staticmethod
    def forward(ctx, a):
        return a.view_as(a)

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


# Instructions for autograd, regions and modes.

CUSTOM = (
    SavesInput, SavesOutput, SavesIntermediate, GivesWhatItSaved, GivesAView, Doubles,
)  # fmt: skip


def custom(m, a, b, c):
    slot = m.slot(a, is_vector)
    function = choose(CUSTOM, b)
    if function is Doubles:
        m.touch(slot)
    m.push(function.apply(slot.tensor), slot)


def custom_scratch(m, a, b, c):
    """`Scratch` on a tensor that no other node has saved, but that a recipe may read."""
    h = m.pick(a, is_vector) * 1.5
    m.push(h + 1)
    m.push(Scratch.apply(h))


def custom_unseen(m, a, b, c):
    """Writes without an operator. Recipes that read the old bytes are refused if these are lost."""
    slot = m.slot(a, lambda t: is_vector(t) and not t.is_inference())
    m.touch(slot, unseen=True)
    if slot.own_counter:
        raise Skip
    m.refusable = True
    m.push(DoublesUnseen.apply(slot.tensor), slot)


def hook(m, a, b, c):
    t = m.pick(a, is_differentiable)
    if c % 2:
        t.retain_grad()
    elif t.is_leaf or t.grad_fn:  # reading grad_fn updates it for views; torch crashes otherwise
        t.register_hook(lambda grad: grad * 2)


def user_hooks(m, a, b, c):
    """An op under the user's saved-tensor hooks, which take precedence over the region's."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t):
        m.map(a, is_float, choose(UNARY, b))


def toggle(m, a, b, c):
    """Toggles an input's requires_grad. See `swap_data` for the skipped case."""
    t = m.inputs[a % 5]
    if t.requires_grad and m.entered:
        raise Skip
    t.requires_grad_(not t.requires_grad)


def set_storage(m, a, b, c):
    slot = m.slot(a, lambda t: is_vector(t) and not (t.requires_grad or t.is_inference()))
    m.touch(slot)
    slot.tensor.set_(slot.tensor * 0.9)
    m.rebind(slot.tensor)


def checkpointed(m, a, b, c):
    """Calls torch's checkpoint, or ebb's as a nested region."""
    t = m.pick(a, is_float)

    def block(u):
        return (choose(UNARY, b)(u) * 0.7).sin() * u.sigmoid()

    if c % 3 < 2:
        m.push(checkpoint(block, t, use_reentrant=c % 3 == 0))
    elif m.open and m.with_regions:
        m.push(ebb.checkpoint(block, t, use_reentrant=False))
    else:
        m.push(block(t))


def swap_data(m, a, b, c):
    """Gives an input another storage. Earlier results still need the old one.

    Skipped after a backward with create_graph: its graph holds another tensor object for the input
    ("Parameters that need grad are unpacked as a new tensor object" in docs/shortcomings.md).
    """
    if m.recorded_backward:
        raise Skip
    slot = m.input_slot(a)
    slot.tensor.data = slot.tensor.detach() * 0.9
    m.rebind(slot.tensor)


def differentiate(m, a, b, c):
    """Computes gradients before the program ends, maybe inside a region."""
    out, of = m.pick(a, is_differentiable), m.pick(b, is_differentiable)
    m.recorded_backward |= c % 4 == 1
    grads = torch.autograd.grad(
        out, of, torch.ones_like(out), retain_graph=c % 16 > 0, create_graph=c % 4 == 1,
        allow_unused=True,
    )  # fmt: skip
    m.push(grads)


def accumulate(m, a, b, c):
    out = m.pick(a, is_differentiable)
    m.touch_gradients()
    out.backward(torch.ones_like(out), retain_graph=c % 16 > 0)
    m.push([t.grad for t in m.inputs if t.grad is not None and b % 2])


def enter(m, a, b, c):
    m.enter(a)


def leave(m, a, b, c):
    if len(m.open) == 1 and c % 4:
        raise Skip  # stay: most instructions should run in a region
    m.leave()


def without_grad(m, a, b, c):
    m.no_grad = 2 + c % 3


def with_autocast(m, a, b, c):
    m.autocast = 2 + c % 4


def give_name(m, a, b, c):
    tensor = m.pick(a, is_float)
    if m.with_regions:
        ebb.checkpoint_name(tensor, NAMES[b % len(NAMES)])


def inference(m, a, b, c):
    with torch.inference_mode():
        m.map(a, is_float, choose(UNARY, b))


# Instructions for devices with several streams, and for several devices.


def switch_stream(m, a, b, c):
    """Makes one of the streams the current stream."""
    stream = m.streams[a % len(m.streams)]
    stream.wait_stream(torch.accelerator.current_stream())
    for slot in m.pool:
        if slot.tensor.device == stream.device:
            slot.tensor.record_stream(stream)
    torch.accelerator.set_stream(stream)


def other_device(m, a, b, c):
    """Copies a tensor to the other device, runs an op there, and copies the result back."""
    t = m.pick(a, is_float)
    there = t.to("late:1" if t.device.index == 0 else "late:0")
    m.push(choose(UNARY, b)(there).to(t.device))


def nothing(m, a, b, c):
    raise Skip


WRITES = {
    write_alone: 4, write_joint: 4, write_input: 6, write_random: 2, write_behind_torch: 1,
    make.batch_norm: 1, swap_data: 1,
}  # fmt: skip
WEIGHTS = {
    nothing: 1, give_name: 4, make.unary: 40, make.along: 12, make.binary: 36, make.several: 6,
    make.product: 14,
    make.listed: 6, make.indexed: 6, make.layer: 4, make.batch_norm: 3, make.view: 12,
    make.alias_with_own_counter: 1, make.cast: 2, make.use_complex: 2, make.forget: 4,
    make.factory: 5, make.drawn: 6, write_alone: 5, write_joint: 4, write_random: 2, write_input: 1,
    write_behind_torch: 1, write_result: 3, custom: 3, custom_scratch: 1, custom_unseen: 1, hook: 1,
    user_hooks: 1, toggle: 1, swap_data: 1, set_storage: 1, checkpointed: 2,
    differentiate: 2, accumulate: 1, enter: 6, leave: 6,
    without_grad: 2, with_autocast: 1, inference: 1,
}  # fmt: skip
ON_DEVICE = {switch_stream: 8, other_device: 5}


def repeated(weights):
    return [kind for kind, weight in weights.items() for _ in range(weight)]


@functools.cache
def kinds_for(engine):
    """The instructions of programs, each as often as its weight says."""
    return repeated(WEIGHTS | (ON_DEVICE if engine.is_on_device else {}))


WRITE_KINDS = repeated(WRITES)
