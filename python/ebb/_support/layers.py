"""Changes of settings that may be undone in any order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any


class Layers:
    """A stack of changes to settings. The last layer is in force. Threads and plans may remove
    layers in any order.

    Args:
        read: returns the value of a setting.
        write: changes settings.
    """

    def __init__(
        self, read: Callable[[str], Any], write: Callable[[Mapping[str, Any]], object]
    ) -> None:
        self._read = read
        self._write = write
        self._below: list[dict[str, Any]] = []  # for each layer, the settings that it replaced

    def put(self, wanted: Mapping[str, Any], undo: ExitStack) -> None:
        """Put settings in place until `undo` is closed."""
        below = {name: self._read(name) for name in wanted}
        self._write(wanted)
        self._below.append(below)
        undo.callback(self._take_away, below)

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
        self._write(restored)
