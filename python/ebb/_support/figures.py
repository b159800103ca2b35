"""Figures with matplotlib."""

from __future__ import annotations

import importlib
from typing import Any


def new_figure(what: str, width: float, height: float) -> Any:
    """A new matplotlib figure.

    Args:
        what: the function that needs the figure, for error messages.
        width, height: in inches.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"ebb: {what} needs matplotlib; pip install 'torch-ebb[plot]'"
        ) from error
    return figures.Figure(figsize=(width, height), layout="constrained")
