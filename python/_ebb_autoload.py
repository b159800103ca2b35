"""Entry points of ebb that torch and Lightning call.

A separate module, so that ebb is not imported unless an environment variable requests it.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from typing import Any

from _ebb_switches import (
    NEED_REGIONS,
    is_child,
    is_launcher,
    is_set,
    launched_rank,
    meant_by,
    unknown_names,
)


def start() -> None:
    """Imports ebb if a variable requests it. Errors do not raise, so that `import torch` continues;
    with EBB_STRICT an error ends the job.
    """
    alone = "EBB" not in os.environ and os.environ.get("EBB_MODULES")  # ebb reports this
    budget = os.environ.get("EBB_BUDGET", "").strip()  # any value: ebb reports invalid ones
    if is_set("EBB_DISABLE"):
        return
    has_settings = any(map(is_set, NEED_REGIONS))
    is_checked = has_settings and is_set("EBB_STRICT")  # ebb ends the job if it makes no region
    if not (is_set("EBB") or alone or budget or is_checked or any(map(meant_by, unknown_names()))):
        if has_settings:
            atexit.register(_tell_of_settings_alone, os.getpid())
        return
    if "ebb" in sys.modules:
        return  # ebb is being imported, and reads the variables itself
    try:
        import ebb  # noqa: F401, PLC0415 - only where a variable asks for it
    except Exception as error:
        if is_set("EBB_STRICT"):
            raise SystemExit(str(error)) from error
        _tell_of_error(error)


def _tell_of_error(error: Exception) -> None:
    if sys.stderr is not None and not is_child():  # else the parent has told it
        who = f"rank {launched_rank()}: " if launched_rank() else ""
        with suppress(OSError, ValueError):  # stderr may be closed
            message = f"could not be imported, so the job runs without ebb: {error!r}"
            print(f"ebb: {who}{message}", file=sys.stderr)


def _tell_of_settings_alone(process: int) -> None:
    """Call at exit, with the process that imported torch."""
    has_other = is_launcher() or launched_rank() > 0  # another process tells it
    if "ebb" in sys.modules or has_other or os.getpid() != process or sys.stderr is None:
        return
    names = [name for name in NEED_REGIONS if is_set(name)]
    have = "has" if len(names) == 1 else "have"
    with suppress(OSError, ValueError):  # stderr may be closed
        print(
            f"ebb: {', '.join(names)} {have} no effect, because the program did not import ebb. "
            "Set EBB=1 (or EBB_BUDGET) to use ebb without a change of the program",
            file=sys.stderr,
        )


def lightning_callbacks(package: str = "lightning.pytorch") -> list[Any]:
    """Callbacks for each Lightning trainer. Lightning calls methods of a module, such as
    ``training_step``, and not the module itself, so ebb's forward hook does not see the module.
    """
    models = sys.modules.get("ebb._launch.models")
    return [] if models is None else [models.lightning_callback(package)]


def pytorch_lightning_callbacks() -> list[Any]:
    """As `lightning_callbacks`, for the package with Lightning's old name."""
    return lightning_callbacks("pytorch_lightning")
