"""Logs operators whose results a region saves although the policy says RECOMPUTE."""

from __future__ import annotations

from ebb._support.log import log


def tell(op: str, region: str, nbytes: int) -> None:
    """Logs a custom operator that no rule names. Called once for each such operator."""
    name = op.removesuffix(".default")
    log.warning(
        f"ebb: region {region!r} saves {nbytes / 2**20:.1f} MiB of results of {op} although the "
        "policy says RECOMPUTE, because a custom operator may have hidden state. If it gives the "
        f"same bits for the same arguments, add ebb.Rule({name!r}, ebb.RECOMPUTE), or "
        f"EBB='recompute_all,{name}:recompute'. Shown once."
    )
