"""Writes reports for EBB_REPORT, and renders a report that was saved as JSON."""

from __future__ import annotations

import argparse
import atexit
import glob
import itertools
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _ebb_switches import is_launcher, is_set
from torch.compiler import is_compiling
from torch.optim.optimizer import register_optimizer_step_post_hook

from ebb import _C
from ebb._policy.variable import JobPolicy
from ebb._report.recording import record_reports
from ebb._report.report import Report, check_path, headline, latest, reports
from ebb._support.job import is_first, label
from ebb._support.private_files import replace_private
from ebb._support.shown import print_stderr

_EVERY = re.compile("(.*)@([0-9]{1,9})", re.DOTALL)


def parse_report(text: str) -> tuple[str, int]:
    """Reads EBB_REPORT: the absolute path of a file, and after how many optimizer steps ebb writes
    the file each time; 0: only at exit and on signals."""
    found = _EVERY.fullmatch(text)
    text, steps = (found[1], int(found[2])) if found else (text, 0)
    if found and steps == 0:
        raise ValueError("the number of steps after @ must be 1 or more")
    path = Path(os.path.abspath(text))  # the program may change its working directory
    check_path(path)
    if not os.access(path.parent, os.W_OK):
        raise OSError(f"cannot write to the folder {str(Path(text).parent)!r}")
    return str(path), steps


_undo = ExitStack()


def start(report: str, steps: int = 0) -> None:
    """Records from now on, and writes the file at exit, on signals, and after each `steps`
    optimizer steps unless 0. All processes but the first of the job add their rank, or their number
    as a child process, to its name."""
    stop()
    record_reports(1)
    JobPolicy.of_variables()  # reads the file of EBB before the program may change directories
    files = _Files(Path(report))
    atexit.register(files.at_exit)
    _undo.callback(atexit.unregister, files.at_exit)
    _C.report_on_signals(files.write)
    _undo.callback(_C.report_on_signals, None)
    if steps:
        hook = register_optimizer_step_post_hook(files.each(steps))
        _undo.callback(hook.remove)


def stop() -> None:
    """Writes no files from now on."""
    _undo.close()


class _Files:
    """The report of this process."""

    def __init__(self, report: Path) -> None:
        self._report = report
        self._process = os.getpid()
        self._began = time.time()
        self._own: set[Path] = set()  # files that this process has written
        self._lock = threading.Lock()  # a signal may arrive while a step writes

    def at_exit(self) -> None:
        if os.getpid() == self._process:  # else a forked copy: the recorded steps are its parent's
            stop()
            self.write()

    def each(self, steps: int) -> Callable[..., None]:
        """A hook of optimizers that writes the report after each `steps` steps."""
        count = itertools.count(1)

        def after_step(*_: Any) -> None:
            if not is_compiling() and os.getpid() == self._process and next(count) % steps == 0:
                self.write(is_last=False)

        return after_step

    def write(self, is_last: bool = True) -> None:
        """Writes the report, and if `is_last` a line. Prints errors and does not raise them."""
        try:
            with self._lock:
                self._write(is_last)
        except Exception as error:
            where = f" of {label()}" if label() else ""
            print_stderr(f"ebb: could not write the report{where}: {type(error).__name__}: {error}")

    def _write(self, is_last: bool) -> None:
        last = latest(list(reports()))
        if last is None:
            if is_last and is_first() and not is_launcher():
                self._tell_of_nothing()
            return
        name = f"{self._report.stem}.{label()}" if label() else self._report.stem
        path = self._place(self._report.with_name(name + self._report.suffix))
        replace_private(str(path), last._in_format(path.suffix))
        if is_last and is_first():
            print_stderr(f"ebb: {headline(last)}; report: {path}")

    def _place(self, path: Path) -> Path:
        """The path, or a path with the process id if another process of this job wrote the file."""
        if path not in self._own and self._is_new(path):
            path = path.with_name(f"{path.stem}.pid{os.getpid()}{path.suffix}")
        self._own.add(path)
        return path

    def _is_new(self, path: Path) -> bool:
        return path.exists() and path.stat().st_mtime > self._began

    def _tell_of_nothing(self) -> None:
        """Tells the user that there is no file, or where the reports of other processes are."""
        report = self._report
        files = report.parent.glob(f"{glob.escape(report.stem)}*{glob.escape(report.suffix)}")
        written = [path for path in files if self._is_new(path)]
        if not written:
            hint = ""
            if not is_set("EBB") and not os.environ.get("EBB_BUDGET", "").strip():
                hint = (
                    ". If the program itself does not call ebb, set EBB=1 (and EBB_MODULES, if ebb "
                    "finds no blocks)"
                )
            why = f"because no region ran in this process{hint}"
            print_stderr(f"ebb: no report was written to {report}, {why}")
        elif report not in written:
            names = ", ".join(sorted(path.name for path in written)[:4])
            more = f" and {len(written) - 4} more" if len(written) > 4 else ""
            print_stderr(f"ebb: the reports are in {report.parent}: {names}{more}")


def render(arguments: list[str]) -> int:
    """The command ``python -m ebb report``. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m ebb report",
        description="Render a report that was saved as JSON, such as that of EBB_REPORT=run.json.",
    )
    parser.add_argument("file", help="the report, a .json file")
    parser.add_argument(
        "-o", "--output", help="file to write, .html or .txt; default: the report's name with .html"
    )
    parser.add_argument("--text", action="store_true", help="print text, and write no file")
    options = parser.parse_args(arguments)
    stop()  # this process has nothing to report
    try:
        report = Report.load(options.file)
        if options.text:
            print(report)
            return 0
        output = Path(options.output or Path(options.file).with_suffix(".html"))
        report.save(output)
    except (OSError, ValueError) as error:
        parser.exit(1, f"ebb: {str(error).removeprefix('ebb: ')}\n")
    print(output)
    return 0
