"""Writes reports and traces at exit, for EBB_REPORT and EBB_TRACE."""

from __future__ import annotations

import atexit
import glob
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from ebb._report.recording import record_reports
from ebb._report.report import Report, check_path, headline, latest, reports
from ebb._support.job import is_first, is_launcher, label, rank

_TRACED_STEPS = 10
_HINT = (
    "If the program itself does not call ebb, set EBB=1 (and EBB_MODULES, if ebb finds no blocks)"
)


def check_report(report: str) -> None:
    """Raises ValueError if the file's suffix is unknown, and OSError if its folder does not exist
    or is not writable."""
    check_path(Path(report))
    if not os.access(Path(report).parent, os.W_OK):
        raise OSError(f"cannot write to the folder {str(Path(report).parent)!r}")


def start(report: str, trace: str) -> None:
    """Records from now on and writes at exit.

    Args:
        report: a file, see :meth:`Report.save`; empty for none. All processes but the first of the
            job add their rank, or their number as a child process, to its name.
        trace: a folder; empty for none.
    """
    record_reports(_TRACED_STEPS if trace else 1)
    atexit.unregister(_write)
    atexit.register(_write, report, trace, os.getpid(), time.time())


def _write(report: str, trace: str, process: int, began: float) -> None:
    """Runs at exit, so it prints errors and does not raise them."""
    if os.getpid() != process:
        return  # a forked copy: the recorded steps are its parent's
    try:
        recorded = list(reports())
        last = latest(recorded)
        if last is None:
            if report:
                _tell_of_nothing(Path(report), began)
            return
        if report:
            path = Path(report)
            if label():
                path = path.with_name(f"{path.stem}.{label()}{path.suffix}")
            path = _unwritten(path, began)
            last.save(path)
            if is_first():
                print(f"ebb: {headline(last)}; report: {path}", file=sys.stderr)
        for step in recorded if trace else ():
            name = f"{label() or 'rank0'}-step{step.step}.json"
            write_trace(step, _unwritten(Path(trace) / name, began))
    except Exception as error:
        where = f" of {label()}" if label() else ""
        print(
            f"ebb: could not write the report{where}: {type(error).__name__}: {error}",
            file=sys.stderr,
        )


def _tell_of_nothing(report: Path, began: float) -> None:
    """Tells the user that there is no report, or where the reports of other processes are. Does
    nothing in a launcher."""
    if not is_first() or is_launcher():
        return
    pattern = f"{glob.escape(report.stem)}*{glob.escape(report.suffix)}"
    written = [p for p in report.parent.glob(pattern) if _is_new(p, began)]
    if report in written:
        return
    if written:
        names = ", ".join(sorted(path.name for path in written)[:4])
        more = f" and {len(written) - 4} more" if len(written) > 4 else ""
        print(f"ebb: the reports are in {report.parent}: {names}{more}", file=sys.stderr)
    else:
        print(
            f"ebb: no report was written to {report}, because no region ran. {_HINT}",
            file=sys.stderr,
        )


def _is_new(path: Path, began: float) -> bool:
    return path.exists() and path.stat().st_mtime > began


def _unwritten(path: Path, began: float) -> Path:
    """The path, or a path with the process id if another process of this job wrote the file."""
    if not _is_new(path, began):
        return path
    return path.with_name(f"{path.stem}.pid{os.getpid()}{path.suffix}")


def write_trace(report: Report, path: Path) -> None:
    """Writes the spans of a step in the format of Perfetto and chrome://tracing.

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
        counter = {"name": "bytes saved for backward", "ph": "C", "ts": when * 1e6, "pid": rank()}
        events.append(counter | {"args": {"ebb": held, "eager": eager}})
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
