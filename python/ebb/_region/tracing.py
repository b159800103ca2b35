"""Detects tracers. Regions do nothing under a tracer, so the graph is that of eager.

A tracer follows tensors by identity, but in a region backward gets another tensor object than the
one that autograd saved. The traced graph would contain that object as a constant, and give wrong
gradients for other inputs.

torch.compile is no such tracer: see Note [Regions in compiled graphs].
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
def region_is_traced() -> None:
    """Warns once. Called under a tracer."""
    warnings.warn(
        "ebb: regions have no effect under torch.export, make_fx, torch.jit.trace and other "
        "tracers. Enter the region where the traced function is called, or use torch.compile, "
        "which gets the region's policy.",
        stacklevel=2,
    )


def is_optimized_module(module: Any) -> bool:
    """True if torch.compile returned `module`. Does not import Dynamo."""
    dynamo = sys.modules.get("torch._dynamo")
    return isinstance(module, getattr(dynamo, "OptimizedModule", ()))


def makes_a_graph() -> bool:
    """True if this thread runs under make_fx, AOT, torch.export, torch.jit.trace or Dynamo, which
    traces only the first return of this function."""
    if is_dynamo_compiling():
        return True
    return (
        torch._C._is_tracing()
        # The modes of make_fx and of tracers built on make_fx.
        or _get_dispatch_mode(_MODES.PROXY) is not None
        or _get_dispatch_mode(_MODES.FUNCTIONAL) is not None
        # make_fx(pre_dispatch=True) keeps its modes on a separate stack.
        or _dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH)
    )


def is_fake() -> bool:
    """True if tensors are fake and have no memory to free."""
    return _get_dispatch_mode(_MODES.FAKE) is not None


def is_traced() -> bool:
    """True if regions must do nothing."""
    return makes_a_graph() or is_fake()
