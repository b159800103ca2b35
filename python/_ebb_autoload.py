"""What torch and Lightning call by themselves: entry points of ebb.

A module of its own, so that nothing of ebb is imported where no variable asks for it.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

from _ebb_switches import is_set, unknown_names


def start() -> None:
    """Imports ebb if a variable asks for it. Raises nothing, so `import torch` goes on; with
    EBB_STRICT an ebb that cannot start ends the job.
    """
    alone = "EBB" not in os.environ and os.environ.get("EBB_MODULES")  # ebb says so
    budget = os.environ.get("EBB_BUDGET", "").strip()  # whatever it is: ebb tells of nonsense
    if not (is_set("EBB") or alone or budget or unknown_names()) or is_set("EBB_DISABLE"):
        return
    if "ebb" in sys.modules:
        return  # it is being imported, and looks at the variables itself
    try:
        import ebb  # noqa: F401
    except Exception as error:
        if is_set("EBB_STRICT"):
            raise SystemExit(str(error)) from error
        if sys.stderr is not None:
            with suppress(OSError, ValueError):  # a closed one
                print(f"ebb is off: {type(error).__name__}: {error}", file=sys.stderr)


def lightning_callbacks() -> list[Any]:
    """Callbacks for each of Lightning's trainers: its modules are not called as modules, so their
    first forward would not be seen.
    """
    models = sys.modules.get("ebb._launch.models")
    return [] if models is None else [models.lightning_callback()]
