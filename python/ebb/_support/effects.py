"""Operators that were registered with an effect, which a second run would repeat."""

from __future__ import annotations

from torch._library.simple_registry import singleton


def has_effect(op: str) -> bool:
    """True if the operator `op`, such as ``mylib::log.default``, has an effect in torch's registry
    (``torch.library._register_effectful_op``), or takes a script object, which may have state.
    """
    return singleton.find(op.removesuffix(".default")).effect.effect is not None
