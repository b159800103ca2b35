"""Whether modules run inside of the forward of those around them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch


class Callers:
    """Looks at what runs in what, by hooks, until it is closed. A module may be called by others
    than the one that it is a child of, and that by a method that is not its forward.

    Args:
        pairs: names of modules, those, and the modules around them.
    """

    def __init__(self, pairs: Iterable[tuple[str, torch.nn.Module, torch.nn.Module]]) -> None:
        self._running: Counter[int] = Counter()  # by id, so that a model may be freed meanwhile
        self._inside: set[str] = set()
        self._outside: set[str] = set()
        self._hooks: list[Any] = []
        around = set()
        for name, module, outer in pairs:
            self._hooks.append(module.register_forward_pre_hook(self._looking(name, id(outer))))
            around.add(outer)
        for outer in around:
            self._hooks.append(outer.register_forward_pre_hook(self._begins))
            self._hooks.append(outer.register_forward_hook(self._ends, always_call=True))

    def _looking(self, name: str, outer: int) -> Any:
        def look(module: torch.nn.Module, args: object) -> None:
            (self._inside if self._running[outer] else self._outside).add(name)

        return look

    def _begins(self, module: torch.nn.Module, args: object) -> None:
        self._running[id(module)] += 1

    def _ends(self, module: torch.nn.Module, args: object, result: object) -> None:
        self._running[id(module)] -= 1

    def close(self) -> set[str]:
        """Looks no more.

        Returns:
            The names of modules that ran, and each time in the forward of the one around them.
        """
        while self._hooks:
            self._hooks.pop().remove()
        return self._inside - self._outside
