"""Changes of settings that may be undone in any order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any


class Layers:
    """A stack of changes to settings that `write` makes. The last layer is in force. Threads and
    plans may remove layers in any order."""

    def __init__(self, write: Callable[[Mapping[str, Any]], object]) -> None:
        self._write = write
        self._below: list[dict[str, Any]] = []  # for each layer, the settings that it replaced

    def add(self, below: Mapping[str, Any], undo: ExitStack) -> None:
        """Settings have changed until `undo` is closed. `below`: their earlier values."""
        layer = dict(below)
        self._below.append(layer)
        undo.callback(self._take_away, layer)

    def _take_away(self, below: dict[str, Any]) -> None:
        index = next(n for n, layer in enumerate(self._below) if layer is below)
        del self._below[index]
        restored = {}
        for name, value in below.items():
            above = next((layer for layer in self._below[index:] if name in layer), None)
            if above is not None:
                above[name] = value
            else:
                restored[name] = value
        if restored:
            self._write(restored)
