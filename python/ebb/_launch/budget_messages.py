"""Lines that ebb prints under EBB_BUDGET."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ebb._launch.assignment import Assignment
from ebb._launch.measured_steps import number_of_steps
from ebb._support.job import is_first
from ebb._support.log import log
from ebb._support.names import in_ranges
from ebb._support.progress import Progress
from ebb._support.shown import clipped, print_stderr


class Messages:
    """Prints lines about a budget.

    Args:
        text: the user's text for the budget.
        assignment: the policy for calls of torch.utils.checkpoint.
    """

    def __init__(self, text: str, assignment: Assignment) -> None:
        self.text = text
        self.assignment = assignment
        self.announced = False  # True once a line has named the blocks
        self._progress = Progress(f"ebb: EBB_BUDGET={text}: profiling")

    def tell(self, what: str) -> None:
        log.info("budget: %s", what)
        self.end_progress()
        if is_first():
            print_stderr(f"ebb: EBB_BUDGET={self.text}: {what}")

    def announce(self, names: Iterable[str], line: str) -> None:
        """Print once that ebb has found blocks. `line`: with a place for their names."""
        if self.announced:
            return
        self.announced = True
        self.tell(line.format(clipped(", ".join(dict.fromkeys(in_ranges(names))), 300)))

    def announce_profiling(self, names: Iterable[str], models: Iterable[torch.nn.Module]) -> None:
        """Print once that ebb profiles steps with these blocks."""
        if self.announced or not (names := list(names)):
            return
        self.announce(
            names,
            f"ebb profiles {number_of_steps(models)} steps, then chooses what each of these blocks "
            "saves and recomputes: {}; EBB_DISABLE=1 turns ebb off",
        )
        if self.assignment.text.startswith("EBB="):
            self.tell(
                f"{self.assignment.text} applies only to calls of torch.utils.checkpoint outside "
                "of these blocks"
            )

    def show_progress(self, left: int, models: Iterable[torch.nn.Module]) -> None:
        """Show how many steps have been measured."""
        if is_first():
            steps = number_of_steps(models)
            self._progress.show(steps + 1 - left, steps)

    def end_progress(self) -> None:
        self._progress.end()
