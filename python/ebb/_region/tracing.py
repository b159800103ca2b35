"""Where somebody makes a graph of what runs, ebb steps aside: that graph is plain eager's.

A tracer follows tensors by identity, and what backward unpacks in a region is another tensor than
the one that was packed: it would stand in the graph as a constant, and the graph would give wrong
gradients for other inputs.

Under torch.compile ebb sees no op of the graph either. Handing a region to torch.utils.checkpoint
while it is traced would give torch's partitioner the policy, but a function that writes to a buffer
or draws without the partitioner's knowledge would then give other gradients. So that is left to the
user, who knows the function: ``policy.to_sac()``.
"""

from __future__ import annotations

import functools
import sys
import warnings
from typing import Any

import torch
from torch._C import _dispatch_tls_is_dispatch_key_included, _get_dispatch_mode
from torch.compiler import is_dynamo_compiling

_MODES = torch._C._TorchDispatchModeKey
_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch


@functools.cache
def _warn() -> None:
    warnings.warn(
        "ebb: a region is traced by torch.compile or another tracer, which decides by itself what "
        "is kept there. To give torch.compile the policy: torch.utils.checkpoint.checkpoint("
        "function, ..., use_reentrant=False, context_fn=policy.to_sac()), for a function that "
        "writes to nothing but its results.",
        stacklevel=2,
    )


def region_is_traced() -> bool:
    """Says so, once; called while somebody traces."""
    _warn()
    return True


# As torch.compiler.assume_constant_result, which would import Dynamo: a second in each process.
region_is_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_optimized_module(module: Any) -> bool:
    """Whether `module` is what torch.compile returned. Does not import Dynamo."""
    dynamo = sys.modules.get("torch._dynamo")
    return isinstance(module, getattr(dynamo, "OptimizedModule", ()))


def makes_a_graph() -> bool:
    """Whether this thread runs for a tracer: make_fx, AOT, torch.export, torch.jit.trace, Dynamo.

    Dynamo does not run the code that it reads, so it never gets beyond the first line.
    """
    if is_dynamo_compiling():
        return True
    return (
        torch._C._is_tracing()
        # Of make_fx and what is built on it.
        or _get_dispatch_mode(_MODES.PROXY) is not None
        or _get_dispatch_mode(_MODES.FUNCTIONAL) is not None
        # make_fx(pre_dispatch=True) has its modes on a stack of their own.
        or _dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH)
    )


def is_fake() -> bool:
    """Whether tensors have no memory that could be saved."""
    return _get_dispatch_mode(_MODES.FAKE) is not None


def is_traced() -> bool:
    """Whether regions are to do nothing."""
    return makes_a_graph() or is_fake()
