"""``EBB_BUDGET=auto``: all is kept while there is room; a plan is made when there is none."""

from __future__ import annotations

from contextlib import ExitStack

from ebb import _C
from ebb._launch.agreeing import ranks_of_job
from ebb._launch.budget import Budget
from ebb._launch.taken import Taken
from ebb._plan.measured import base_bytes
from ebb._report.text import size
from ebb._support.names import in_ranges
from ebb._support.shown import clipped


class Room(Budget):
    """Keeps all while less than a limit is in use. When earlier regions have had to give up what
    they kept, steps are measured and a plan takes its place; where a job has several ranks it stays
    so, since they meet their limits at different steps.

    Args:
        limit: bytes.
        text, patterns, taken: as for :class:`Budget`.
    """

    def __init__(self, limit: int, text: str, patterns: tuple[str, ...], taken: Taken) -> None:
        super().__init__(limit, text, patterns, taken)
        self._limit = limit
        self._is_full = False

    def start(self, undo: ExitStack) -> None:
        super().start(undo)
        _C.keep_while_there_is_room(self._limit)
        undo.callback(_C.keep_while_there_is_room, 0)

    def _announce(self, names: list[str]) -> None:
        if not self._announced:
            self._announced = True
            shown_names = clipped(", ".join(dict.fromkeys(in_ranges(names))), 300)
            self._tell(
                f"all is kept while less than {size(self._limit)} are in use, then the earliest of "
                f"these are recomputed: {shown_names}; EBB_DISABLE=1 turns it off"
            )

    def _step_ended(self, is_step: bool) -> None:
        if not self._is_full:
            if _C.room_stats()["regions_given_up"] == 0 or ranks_of_job() is not None:
                self.blocks.take()
                return
            self._is_full = True
            _C.keep_while_there_is_room(0)
            models, optimizers = list(self._models), list(self._clock.optimizers)
            beside = max(0, _C.bytes_in_use() - base_bytes(models, optimizers))
            self._budget = max(1, self._limit - beside)
            self._tell("there is no room to keep all: steps are measured, and a plan is made")
        super()._step_ended(is_step)
