"""Logs operators whose results a region saves although the policy says RECOMPUTE."""

from __future__ import annotations

from ebb._support.log import log


def tell(op: str, region: str, nbytes: int) -> None:
    """Logs a custom operator that no rule names. Called once for each such operator."""
    name = op.removesuffix(".default")
    log.warning(
        "ebb: region %r saves %.1f MiB of results of %s although the policy says RECOMPUTE, "
        "because a custom operator may have hidden state. If it gives the same bits for the same "
        "arguments, add ebb.Rule(%r, ebb.RECOMPUTE), or EBB='recompute_all,%s:recompute'. Shown "
        "once.",
        region,
        nbytes / 2**20,
        op,
        name,
        name,
    )
