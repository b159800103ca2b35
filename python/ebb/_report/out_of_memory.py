"""The report of the step that ran out of memory, printed when that happens."""

from __future__ import annotations

import sys
from types import TracebackType

import torch

from ebb import _C
from ebb._report.report import reports
from ebb._support.job import label


class _Observer:
    """Prints the report of the step that ran out of memory, once."""

    attached = False
    printed = False


def observe_out_of_memory() -> None:
    """Prints the report if the program runs out of memory, on a CUDA device or, uncaught, here."""
    if _Observer.attached:
        return
    _Observer.attached = True
    if torch.cuda.is_available():
        # When CUDA is initialised: not before, since a process that is to be forked must not.
        torch.cuda._lazy_call(_observe_device)  # type: ignore[no-untyped-call]
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        note_error(error)
        before(kind, error, trace)

    sys.excepthook = hook


def note_error(error: BaseException) -> None:
    """Prints the report if that is what the program ends with."""
    if _is_out_of_memory(error):
        print_out_of_memory()


def _observe_device() -> None:
    attach = torch._C._cuda_attach_out_of_memory_observer  # type: ignore[attr-defined]
    attach(lambda *_: print_out_of_memory())


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "you tried to allocate" in str(error)


def print_out_of_memory() -> None:
    if not _C.is_reporting() or _Observer.printed:
        return
    recorded = [report for report in reports() if report.rows]
    if recorded:
        _Observer.printed = True
        where = f" in {label()}" if label() else ""
        print(f"ebb: out of memory{where}. What its regions know of this step:", file=sys.stderr)
        print(recorded[-1], file=sys.stderr, flush=True)
