"""Applies process-wide settings. In: settings that policies need. Out: the settings in force."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from ebb import ahead, offload
from ebb._plan.pages import size_pools_anew


class Layers:
    """A stack of changes to settings. The last layer is in force; layers may be removed in any
    order.

    Args:
        configure: changes settings, and returns all current ones.
    """

    def __init__(self, configure: Callable[..., Mapping[str, Any]]) -> None:
        self._configure = configure
        self._below: list[dict[str, Any]] = []  # for each layer, the settings that it replaced

    def put(self, wanted: Mapping[str, Any], undo: ExitStack) -> None:
        """Put settings in place until `undo` is closed."""
        now = self._configure()
        below = {name: now[name] for name in wanted}
        self._below.append(below)
        undo.callback(self._take_away, below)
        self._configure(**wanted)

    def _take_away(self, below: dict[str, Any]) -> None:
        index = next(n for n, layer in enumerate(self._below) if layer is below)
        del self._below[index]
        for name, value in below.items():
            above = next((layer for layer in self._below[index:] if name in layer), None)
            if above is not None:
                above[name] = value
            else:
                self._configure(**{name: value})


_offload = Layers(offload.configure)
_ahead = Layers(ahead.configure)


@dataclass(frozen=True)
class ProcessSettings:
    """Process-wide settings while policies are in place."""

    # Settings of ebb.offload.configure; empty: unchanged.
    offload: Mapping[str, int] = field(default_factory=dict)
    ahead: bool = True  # False disables replays ahead of backward; True leaves them as configured
    pages: bool = False  # True if the policies use page pools, which get new sizes

    def put(self, undo: ExitStack) -> None:
        """Put the settings in place until `undo` is closed."""
        if self.offload:
            _offload.put(self.offload, undo)
        if not self.ahead:
            _ahead.put({"regions": 0}, undo)
        if self.pages:
            size_pools_anew()
            undo.callback(size_pools_anew)
