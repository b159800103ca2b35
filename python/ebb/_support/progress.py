"""Shows a job's progress over several steps: rich's bar, or a line if rich is not installed."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any


class Progress:
    """A progress display on stderr; shows nothing if stderr is not a terminal. `text` describes the
    work."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._bar: Any = None  # rich's, while it is shown
        self._has_line = False

    def show(self, step: int, steps: int) -> None:
        """Shows that `step` of the steps, counted from 1, is running."""
        if sys.stderr is None or not sys.stderr.isatty():
            return
        with suppress(OSError, ValueError):
            try:
                self._show_bar(step, steps)
            except ImportError:
                line = f"\r\x1b[K{self._text}: step {step} of {steps}"
                print(line, end="", file=sys.stderr, flush=True)
                self._has_line = True

    def _show_bar(self, step: int, steps: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar

        if self._bar is None:
            self._bar = Bar(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                console=Console(stderr=True),
                transient=True,
                auto_refresh=False,  # no thread, and no change to the job's own output
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._bar.add_task(self._text)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=step, total=steps, refresh=True)

    def end(self) -> None:
        """Removes the display, so that other output may follow."""
        with suppress(OSError, ValueError):
            if self._bar is not None:
                self._bar.stop()
            elif self._has_line:
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        self._bar, self._has_line = None, False
