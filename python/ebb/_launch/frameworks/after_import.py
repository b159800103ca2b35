"""Calls a function once a module has been imported."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

Then = Callable[[ModuleType], None]


class AfterImport(importlib.abc.MetaPathFinder):
    """Finds the modules of a table as the other finders do, and calls a function after each was
    executed. All other modules cost one lookup in the table."""

    def __init__(self, wanted: Mapping[str, Then]) -> None:
        self._wanted = wanted

    def install(self) -> None:
        """Call the functions of modules that are imported already, and of others from now on."""
        for name, then in self._wanted.items():
            if name in sys.modules:
                then(sys.modules[name])
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        then = self._wanted.get(name)
        if then is None:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            _call_after(spec.loader, then)
        return spec


def _call_after(loader: importlib.abc.Loader, then: Then) -> None:
    """Make the next module that `loader` executes the argument of `then`. The loader stays what it
    is: others ask it for source and resources."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        execute(module)
        then(module)

    loader.exec_module = exec_module  # type: ignore[method-assign]
