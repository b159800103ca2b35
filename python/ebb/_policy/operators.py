"""The names by which users give operators."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from ebb._support.shown import checked_name, shown

Operator: TypeAlias = "str | torch._ops.OpOverload | torch._ops.OpOverloadPacket"


def qualified_name(op: Any) -> str:
    """An OpOverload's name with its overload, such as ``aten::mm.default``."""
    name = str(op.name())
    return name if "." in name else name + ".default"


def operator_name(op: object) -> str:
    """The operator's name in C++.

    Raises:
        TypeError: `op` is not an operator.
    """
    if isinstance(op, torch._ops.OpOverload):
        return qualified_name(op)
    if isinstance(op, torch._ops.OpOverloadPacket):
        return str(op._qualified_op_name)
    if isinstance(op, str):
        return checked_name("an operator's name", op)
    raise TypeError(
        f"ebb: an operator is a string such as 'aten::mm', an OpOverload such as "
        f"torch.ops.aten.mm.default, or an OpOverloadPacket such as torch.ops.aten.mm; "
        f"got {shown(op)} of type {type(op).__name__}"
    )
