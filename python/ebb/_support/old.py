"""Names of an earlier release, which work for one more release and warn."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any


def warn_of_old(name: str, instead: str) -> None:
    """Warns the caller's caller."""
    message = f"ebb: {name} is deprecated and will be removed in the next release: use {instead}"
    warnings.warn(message, FutureWarning, stacklevel=3)


def old_function(name: str, instead: str, function: Callable[[], Any]) -> Callable[[], Any]:
    """The old name of `function`, which takes no arguments."""

    def call() -> Any:
        warn_of_old(f"{name}()", instead)
        return function()

    return call


class Renamed:
    """The old name of the attribute `new`. It warns, and will be removed in the next release."""

    def __init__(self, new: str) -> None:
        self._new = new

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._old = name

    def __get__(self, instance: object, owner: type[Any]) -> Any:
        warnings.warn(
            f"ebb: {owner.__name__}.{self._old} is deprecated and will be removed in the next "
            f"release: use {self._new}",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(owner if instance is None else instance, self._new)
