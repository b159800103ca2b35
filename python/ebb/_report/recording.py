"""Switches reports on and off."""

from __future__ import annotations

from types import TracebackType

from ebb import _C
from ebb._report.out_of_memory import note_error, watch_for_out_of_memory
from ebb._support.shown import shown


class record_reports:
    """Records the fate of each storage for :func:`ebb.report`, in the whole process.

    The call itself switches recording on, for outermost regions that are entered from now on; as a
    context manager, record_reports restores the earlier setting at the end. Steps recorded so far
    remain. Recording changes no decision and costs about a microsecond for each operator. If the
    program, a multiprocessing process or the ``with`` block ends with a failed allocation, ebb
    prints the report to stderr. Reports name modules if recording is on when ``ebb.apply`` is
    called, or when a region is given its ``root``.

    Args:
        steps: how many of the last steps to keep; 0 switches recording off.

    Raises:
        TypeError: ``steps`` is not an integer.
        ValueError: ``steps`` is negative or too large.
    """

    def __init__(self, steps: int = 1) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int):
            raise TypeError(f"ebb: steps must be an int; got {type(steps).__name__}")
        if not 0 <= steps < 2**32:
            raise ValueError(f"ebb: steps must be from 0 to {2**32 - 1}; got {shown(steps)}")
        if steps > 0:
            watch_for_out_of_memory()
        self._before = _C.set_reporting(steps)

    def __enter__(self) -> record_reports:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            note_error(error)
        _C.set_reporting(self._before)
