"""Functions with the names and the structure of TransformerEngine's, without its kernels."""

from __future__ import annotations

import contextlib

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import detach_variable


class _CheckpointFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, *args):
        ctx.function, ctx.state = function, torch.get_rng_state()
        ctx.save_for_backward(*args)
        with torch.no_grad():
            return function(*args)

    @staticmethod
    def backward(ctx, gradient):
        args = detach_variable(ctx.saved_tensors)
        with torch.random.fork_rng(), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            outputs = ctx.function(*args)
        torch.autograd.backward(outputs, gradient)
        return None, *(arg.grad for arg in args)


def _without_reentrant(function, *args):
    """Saved-tensor hooks: the first one that is unpacked recomputes all."""
    state, saved, count = torch.get_rng_state(), [], [0]

    def pack(tensor):
        count[0] += 1
        return count[0] - 1

    def recompute():
        def keep(tensor):
            saved.append(tensor.detach())

        inner = saved_tensors_hooks(keep, lambda _: None)
        with torch.random.fork_rng(), torch.enable_grad(), inner:
            torch.set_rng_state(state)
            function(*args)

    def unpack(index):
        if not saved:
            recompute()
        return saved[index]

    with saved_tensors_hooks(pack, unpack):
        return function(*args)


def checkpoint(function, *args, use_reentrant=True):
    """transformer_engine.pytorch.checkpoint."""
    if use_reentrant:
        return _CheckpointFunction.apply(function, *args)
    return _without_reentrant(function, *args)


class OffloadSynchronizer:
    """Copies saved tensors to the host, and back in backward."""

    def push_tensor(self, tensor):
        return tensor.device, tensor.detach().to("cpu", copy=True)

    def pop_tensor(self, saved):
        device, tensor = saved
        return tensor.to(device)


def get_cpu_offload_context():
    """transformer_engine.pytorch.get_cpu_offload_context: a context, and a function for outputs."""
    own = OffloadSynchronizer()

    @contextlib.contextmanager
    def context():
        with saved_tensors_hooks(own.push_tensor, own.pop_tensor):
            yield

    class Reusable(contextlib.AbstractContextManager):
        def __enter__(self):
            self.inner = context()
            return self.inner.__enter__()

        def __exit__(self, *error):
            return self.inner.__exit__(*error)

    return Reusable(), lambda x: x
