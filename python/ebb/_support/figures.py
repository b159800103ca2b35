"""Pictures, through matplotlib."""

from __future__ import annotations

import importlib
from typing import Any


def new_figure(what: str, width: float, height: float) -> Any:
    """A figure of matplotlib's.

    Args:
        what: needs it, for messages.
        width, height: in inches.

    Raises:
        ModuleNotFoundError: matplotlib is not there.
    """
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"ebb: {what} needs matplotlib; pip install 'torch-ebb[plot]'"
        ) from error
    return figures.Figure(figsize=(width, height), layout="constrained")
