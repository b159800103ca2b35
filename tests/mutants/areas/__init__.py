"""A module for each area: its MUTANTS; TESTS, the files in which `--search` looks for one that
fails; and EACH, the patterns of what must be in a mutant's text, by file name (a glob)."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

AREAS: dict[str, ModuleType] = {
    found.name: importlib.import_module(f"areas.{found.name}")
    for found in pkgutil.iter_modules(__path__)
}
