"""Reports and traces that are written by themselves: EBB_REPORT, EBB_TRACE, out of memory."""

from __future__ import annotations

import atexit
import json
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ebb import _C
from ebb._environment import rank
from ebb._report import Report, check_path, latest, record_reports, reports
from ebb._report_text import headline

_TRACED_STEPS = 10
_HINT = (
    ". In a program that does not use ebb, set EBB, and EBB_MODULES if it does not call "
    "torch.utils.checkpoint"
)


def start(report: str, trace: str) -> None:
    """Records from now on and writes at exit.

    Args:
        report: a file, see :meth:`Report.save`; other ranks than the first put their number into
            its name. Empty for none.
        trace: a folder, made if it is not there; empty for none.

    Raises:
        ValueError: the file's suffix is unknown.
        OSError: the folder, or the file's, does not exist or cannot be written to.
    """
    if report:
        check_path(Path(report))
        if not os.access(Path(report).parent, os.W_OK):
            raise OSError(f"cannot write to the folder {str(Path(report).parent)!r}")
    if trace:
        Path(trace).mkdir(parents=True, exist_ok=True)
    record_reports(_TRACED_STEPS if trace else 1)
    atexit.unregister(_write)
    atexit.register(_write, report, trace)


def _write(report: str, trace: str) -> None:
    """At exit, where an exception would help nobody."""
    try:
        recorded = list(reports())
        last = latest(recorded)
        if last is None:
            if rank() == 0 and report:
                print(
                    f"ebb: no region was entered, so there is no report in {report}{_HINT}",
                    file=sys.stderr,
                )
            return
        if report:
            path = Path(report)
            if rank() > 0:
                path = path.with_name(f"{path.stem}.rank{rank()}{path.suffix}")
            last.save(path)
            if rank() == 0:
                print(f"ebb: {headline(last)}; the report is in {path}", file=sys.stderr)
        for step in recorded if trace else ():
            write_trace(step, Path(trace) / f"rank{rank()}-step{step.step}.json")
    except Exception as error:
        print(f"ebb: no report: {type(error).__name__}: {error}", file=sys.stderr)


def write_trace(report: Report, path: Path) -> None:
    """Writes a step's work as Perfetto and chrome://tracing read it.

    Source: "Trace Event Format", the JSON array form of Chrome's tracing.
    """
    threads = {thread: i for i, thread in enumerate(dict.fromkeys(s[4] for s in report.spans))}
    events: list[dict[str, Any]] = []
    for kind, name, begin, seconds, thread, nbytes in report.spans:
        event = {"name": name if kind == "region" else f"{kind} {name}", "cat": kind, "ph": "X"}
        time = {"ts": begin * 1e6, "dur": seconds * 1e6}
        place = {"pid": rank(), "tid": threads[thread]}
        events.append(event | time | place | ({"args": {"bytes": nbytes}} if nbytes else {}))
    for when, held, eager in report.timeline:
        counter = {"name": "bytes held for backward", "ph": "C", "ts": when * 1e6, "pid": rank()}
        events.append(counter | {"args": {"with ebb": held, "plain eager": eager}})
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


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
        print("ebb: out of memory. What its regions know of this step:", file=sys.stderr)
        print(recorded[-1], file=sys.stderr, flush=True)
