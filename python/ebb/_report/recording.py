"""Switches reports on and off, and prints the report of a step that ran out of memory."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing import util
from types import TracebackType

import torch

from ebb import _C
from ebb._report.report import reports
from ebb._support.job import label
from ebb._support.layers import Layers
from ebb._support.sizes import whole_number

_PHRASES = ("you tried to allocate", "out of memory", "ALLOC_FAILED")  # of torch, CUDA, cuBLAS


# Note [Out of memory]
# A failed allocation need not end the program: torch may retry, ebb may
# (Note [Allocations that fail]), or the program tries a smaller batch. So a report is printed when
# the exception leaves the program, a multiprocessing process, or `with ebb.record_reports()`, once
# for each exception.
@functools.cache
def watch_for_out_of_memory() -> None:
    """Prints the report if the program ends with a failed allocation."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        note_error(error)
        before(kind, error, trace)

    sys.excepthook = hook
    # A process that multiprocessing starts does not inherit its parent's registrations.
    _watch_process()
    util.register_after_fork(_watch_process, lambda watch: watch())


def _watch_process() -> None:
    """Checks at the end of a multiprocessing process, which catches the exceptions that end it."""
    util.Finalize(None, lambda: note_error(sys.exception()), exitpriority=0)


def note_error(error: BaseException | None) -> None:
    """Prints the report if `error`, which ends the program or a block, means out of memory."""
    short = next((one for one in _chain(error) if _is_out_of_memory(one)), None)
    is_reporting = "report" in _C.plugins and _C.is_reporting()
    if short is None or not is_reporting or hasattr(short, "_ebb_has_told"):
        return
    recorded = [report for report in reports() if report.rows]
    if recorded:
        short._ebb_has_told = True  # type: ignore[attr-defined]
        where = f" on {label()}" if label() else ""
        print(f"ebb: out of memory{where}. Report of the step up to this point:", file=sys.stderr)
        print(recorded[-1], file=sys.stderr, flush=True)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The exception, and its causes and contexts."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _PHRASES)


_layers = Layers(lambda settings: _C.set_reporting(settings["steps"]))


class record_reports:
    """Records the fate of each storage for ``ebb.report``, in the whole process.

    The call itself switches recording on, for outermost regions that are entered from now on; as a
    context manager, record_reports restores the earlier setting at the end. Blocks of several
    threads may overlap: the block that was entered last counts. Steps recorded so far
    remain. Recording changes no decision and costs about a microsecond for each operator. If the
    program, a multiprocessing process or the ``with`` block ends with a failed allocation, ebb
    prints the report to stderr. Reports name modules if recording is on when ``ebb.apply`` is
    called, or when a region is given its ``root``.

    Args:
        steps: how many of the last steps to keep; 0 switches recording off.

    Raises:
        TypeError: ``steps`` is not an integer.
        ValueError: ``steps`` is negative or too large.

    Examples:
        >>> with ebb.record_reports():
        ...     with ebb.region():
        ...         loss = torch.ones(3, requires_grad=True).sin().cos().sum()
        ...     loss.backward()
        >>> ebb.report().rows[0].fate
        'recomputed'
    """

    def __init__(self, steps: int = 1) -> None:
        whole_number("steps", steps, most=2**32 - 1)
        if steps > 0:
            watch_for_out_of_memory()
        self._before = _C.set_reporting(steps)
        self._undo = ExitStack()

    def __enter__(self) -> record_reports:
        _layers.add({"steps": self._before}, self._undo)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            note_error(error)
        self._undo.close()
