"""Names of an earlier release, which work for one release more."""

from __future__ import annotations

import warnings


def warn_of_old(name: str, instead: str) -> None:
    """Warns the caller's caller.

    Args:
        name: that was used.
        instead: what to write.
    """
    message = f"ebb: {name} will be removed in the next release: use {instead}"
    warnings.warn(message, FutureWarning, stacklevel=3)
