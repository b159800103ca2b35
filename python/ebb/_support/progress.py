"""Shows a job's progress over several steps."""

from __future__ import annotations

import sys
from contextlib import suppress


class Progress:
    """A line on stderr that is written over; shows nothing if stderr is not a terminal.

    Args:
        text: describes the work.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._is_shown = False

    def show(self, step: int, steps: int) -> None:
        """Shows that `step` of the steps, counted from 1, is running."""
        if sys.stderr is not None and sys.stderr.isatty():
            self._is_shown = True
            self._write(f"{self._text}: step {step} of {steps}")

    def end(self) -> None:
        """Removes the line, so that other output may follow."""
        if self._is_shown:
            self._is_shown = False
            self._write("")

    def _write(self, line: str) -> None:
        with suppress(OSError, ValueError):
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
