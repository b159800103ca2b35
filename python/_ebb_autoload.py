"""Entry points of ebb that torch and Lightning call.

A separate module, so that ebb is not imported unless an environment variable requests it.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

from _ebb_switches import is_set, unknown_names


def start() -> None:
    """Imports ebb if a variable requests it. Errors do not raise, so that `import torch` continues;
    with EBB_STRICT an error ends the job.
    """
    alone = "EBB" not in os.environ and os.environ.get("EBB_MODULES")  # ebb reports this
    budget = os.environ.get("EBB_BUDGET", "").strip()  # any value: ebb reports invalid ones
    if not (is_set("EBB") or alone or budget or unknown_names()) or is_set("EBB_DISABLE"):
        return
    if "ebb" in sys.modules:
        return  # ebb is being imported, and reads the variables itself
    try:
        import ebb  # noqa: F401
    except Exception as error:
        if is_set("EBB_STRICT"):
            raise SystemExit(str(error)) from error
        if sys.stderr is not None:
            with suppress(OSError, ValueError):  # stderr may be closed
                message = f"could not be imported, so the job runs without ebb: {error!r}"
                print(f"ebb: {message}", file=sys.stderr)


def lightning_callbacks(package: str = "lightning.pytorch") -> list[Any]:
    """Callbacks for each Lightning trainer. Lightning calls methods of a module, such as
    ``training_step``, and not the module itself, so ebb's forward hook does not see the module.
    """
    models = sys.modules.get("ebb._launch.models")
    return [] if models is None else [models.lightning_callback(package)]


def pytorch_lightning_callbacks() -> list[Any]:
    """As `lightning_callbacks`, for the package with Lightning's old name."""
    return lightning_callbacks("pytorch_lightning")
