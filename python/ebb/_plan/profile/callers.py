"""Finds which modules call the blocks. In: blocks, and the modules around them. Out: names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch


class Callers:
    """Observes with hooks, until `close`, whether modules run in the forward of the module around
    them. They do not if another module, or a method other than forward, calls them."""

    def __init__(self, pairs: Iterable[tuple[str, torch.nn.Module, torch.nn.Module]]) -> None:
        """`pairs`: names of modules, with each module and the module around it."""
        self._running: Counter[int] = Counter()  # by id, so that hooks keep no model alive
        self._inside: set[str] = set()
        self._outside: set[str] = set()
        self._hooks: list[Any] = []
        around = set()
        for name, module, outer in pairs:
            look = partial(self._look, name, id(outer))
            self._hooks.append(module.register_forward_pre_hook(look))
            around.add(outer)
        for outer in around:
            self._hooks.append(outer.register_forward_pre_hook(self._begins))
            self._hooks.append(outer.register_forward_hook(self._ends, always_call=True))

    def _look(self, name: str, outer: int, module: torch.nn.Module, args: object) -> None:
        (self._inside if self._running[outer] else self._outside).add(name)

    def _begins(self, module: torch.nn.Module, args: object) -> None:
        self._running[id(module)] += 1

    def _ends(self, module: torch.nn.Module, args: object, result: object) -> None:
        self._running[id(module)] -= 1

    def close(self) -> set[str]:
        """Remove the hooks. Returns the names of the modules that ran, each time in the forward of
        the module around them."""
        while self._hooks:
            self._hooks.pop().remove()
        return self._inside - self._outside


def parent_of(model: torch.nn.Module, name: str) -> str:
    """The name of the nearest module around this one that has a forward, unlike ModuleList and
    ModuleDict."""
    while name:
        name = name.rpartition(".")[0]
        if not isinstance(model.get_submodule(name), torch.nn.ModuleList | torch.nn.ModuleDict):
            break
    return name
