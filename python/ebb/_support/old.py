"""Warns of names of an earlier release, which work for one more release."""

from __future__ import annotations

import warnings


def warn_of_old(name: str, instead: str) -> None:
    """Warns the caller's caller.

    Args:
        name: the deprecated name.
        instead: the replacement.
    """
    message = f"ebb: {name} is deprecated and will be removed in the next release: use {instead}"
    warnings.warn(message, FutureWarning, stacklevel=3)
