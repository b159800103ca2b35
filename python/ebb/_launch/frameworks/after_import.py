"""Calls a function once a module has been imported."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
        # Only the finders behind this one: another AfterImport would ask this one in turn.
        others = list(sys.meta_path)
        for finder in others[others.index(self) + 1 :] if self in others else others:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(name, path, target)
            if spec is not None:
                _call_after(spec, then)
                return spec
        return None


def _call_after(spec: ModuleSpec, then: Then) -> None:
    """Call `then` with the module of `spec` once it was executed. The loader stays the same
    object, because other code asks it for source and resources. A loader without `exec_module` is
    left alone."""
    loader = spec.loader
    execute = getattr(loader, "exec_module", None)
    if loader is None or execute is None:
        return

    def exec_module(module: ModuleType) -> None:
        if module.__spec__ is not spec:  # the loader may load others, as a zip file's does
            execute(module)
            return
        # Before the module runs: it may import others with this loader. Two may have replaced it.
        with suppress(AttributeError):
            del loader.exec_module
        execute(module)
        then(module)

    with suppress(AttributeError):  # of an object without attributes of its own
        loader.exec_module = exec_module  # type: ignore[method-assign]
