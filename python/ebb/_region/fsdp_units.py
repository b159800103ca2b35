"""Regions around FSDP units that free their parameters after forward."""

from __future__ import annotations

import sys
from typing import Any

from torch.compiler import is_dynamo_compiling

from ebb import _C

_watched: list[type] = []


# Note [Regions around FSDP units]
# Backward recomputes a region as a whole. If the region contains several FSDP units that free their
# parameters after forward, backward would need the parameters of all units at once, but FSDP
# gathers them unit by unit. So each such unit splits the region before and after the unit's
# forward. ebb recomputes the parts apart from each other, each when FSDP has gathered the
# parameters of the part's unit.
def watch() -> None:
    """Let FSDP units split the regions in which they are called. Does nothing before the job
    imports FSDP."""
    fsdp = None if _watched else sys.modules.get("torch.distributed.fsdp")
    for name in ("FSDPModule", "FullyShardedDataParallel"):
        if (units := getattr(fsdp, name, None)) is not None:
            _watched.append(units)
            _split_at(units)


def _split_at(units: Any) -> None:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        splits = not is_dynamo_compiling() and _C.in_region() and _frees(self)
        if splits:
            _C.split_region()
        results = super(units, self).__call__(*args, **kwargs)
        if splits:
            _C.split_region()
        return results

    units.__call__ = call


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
