"""Files that ebb writes. They name modules, operators and source lines of a job."""

from __future__ import annotations

import os
from pathlib import Path


def write_private(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file that only its owner can read. A file that exists keeps its permissions."""
    with open(Path(path), "w", encoding="utf-8", opener=_open_private) as file:
        file.write(text)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
