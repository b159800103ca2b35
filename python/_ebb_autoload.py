"""What torch and Lightning call by themselves: entry points of ebb.

A module of its own, so that nothing else is imported where the variable EBB is not set.
"""

from __future__ import annotations

import os
import sys
from typing import Any


def is_set(name: str) -> bool:
    """Whether a variable asks for something."""
    return os.environ.get(name, "").lower() not in ("", "0", "false", "no", "off")


def start() -> None:
    """Imports ebb if the variable EBB asks for it. Raises nothing: `import torch` goes on."""
    if not is_set("EBB") or is_set("EBB_DISABLE"):
        return
    if "ebb" in sys.modules:
        return  # it is being imported, and looks at the variables itself
    try:
        import ebb  # noqa: F401
    except Exception as error:
        print(f"ebb is off: {type(error).__name__}: {error}", file=sys.stderr)


def lightning_callbacks() -> list[Any]:
    """Callbacks for each of Lightning's trainers: its modules are not called as modules, so their
    first forward would not be seen.
    """
    takeover = sys.modules.get("ebb._takeover")
    return [] if takeover is None else [takeover.lightning_callback()]
