"""Logs operators whose results a region keeps although the policy says RECOMPUTE."""

from __future__ import annotations

from ebb._support.log import log


def tell(op: str, region: str, nbytes: int) -> None:
    """Logs an operator that is not one of torch's and that no rule names. Called once for each."""
    name = op.removesuffix(".default")
    log.warning(
        "ebb: region %r keeps %.1f MiB that %s made, since an operator that is not one of torch's "
        "may keep state of its own. If it always gives the same bits for the same arguments, "
        "ebb.Rule(%r, ebb.RECOMPUTE) frees them (as text: recompute_all,%s:recompute). Shown once.",
        region,
        nbytes / 2**20,
        op,
        name,
        name,
    )
