"""Files that ebb writes. They name modules, operators and source lines of a job."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from functools import partial


def write_private(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file that only its owner can read. A file that exists keeps its permissions."""
    with open(path, "w", encoding="utf-8", opener=partial(os.open, mode=0o600)) as file:
        file.write(text)


def replace_private(path: str, text: str) -> None:
    """As `write_private`, at once: a process that reads the file, or that is ended meanwhile, finds
    the text from before or the new one. The file is another one then, so links to it end."""
    folder, name = os.path.split(path)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{name[:100]}.", dir=folder)  # mode 0600
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
