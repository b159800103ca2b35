"""Finds FSDP units inside a module."""

from __future__ import annotations

import sys
from typing import Any

import torch


def units_inside(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The outermost FSDP units inside `module`, by name; empty if no unit inside frees
    its parameters after forward.

    A unit is a module on which ``fully_shard`` was called, or a FullyShardedDataParallel.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return {}
    found: dict[str, torch.nn.Module] = {}
    frees = False
    for name, inner in module.named_modules():
        is_unit = isinstance(inner, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel))
        if inner is module or not is_unit:
            continue
        frees = frees or _frees(inner)
        if not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = inner
    return found if frees else {}


def _frees(unit: Any) -> bool:
    """True if FSDP frees the unit's parameters after forward, or if that is unknown."""
    strategy = getattr(unit, "sharding_strategy", None)
    if strategy is not None:
        return strategy.name not in ("NO_SHARD", "SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
    try:
        group = unit._get_fsdp_state()._fsdp_param_group
        return group is not None and bool(group._reshard_after_forward)
    except AttributeError:  # these names are internal to torch
        return True
