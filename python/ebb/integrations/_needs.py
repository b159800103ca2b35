"""Imports the library of an integration."""

from __future__ import annotations

import importlib
from typing import Any


def library(module: str, package: str) -> Any:
    """A module of the library of an integration. The ImportError names the package to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"ebb: this integration needs the package {package!r}: pip install {package} "
            f"(importing {module} failed: {error})",
            name=module,
        ) from error
