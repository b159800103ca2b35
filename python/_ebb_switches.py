"""Environment variables that are on or off. Below all of ebb: read before it is imported, too."""

from __future__ import annotations

import os


def is_set(name: str) -> bool:
    """Whether a variable asks for something."""
    return os.environ.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")
