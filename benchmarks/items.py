"""Runs a list of commands one after the other, also after failures, and writes the results.

This file knows nothing of GPUs and does not import torch: see on_gpu.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from report import write_results

Row = dict[str, Any]

PASSED, FAILED, TIMED_OUT = "passed", "FAILED", "TIMED OUT"
NOT_INSTALLED = "not installed"
FAILURES = (FAILED, TIMED_OUT)
FOLDER = "{folder}"  # commands contain this; it stands for the folder of their files
LINES_SHOWN = 25  # of the output of a failed command
LONGEST = 300  # characters of a message in the results


@dataclass(frozen=True)
class Item:
    """Something to run.

    Attributes:
        name: as the table shows it; unique among items of its kind.
        turn: items with lower turns run first. Items of turn 0 run each time, before all others; if
            one fails, no further item runs.
        command: the program and its arguments. The results include its files ``{folder}/*.json``
            and ``{folder}/*.md``, and the tests in ``{folder}/junit.xml``.
        seconds: time limit. With less time left, the item does not start.
        kind: the results that the item belongs to, such as tests; empty: to all kinds.
        program: a program that the item needs; if missing, the item is skipped and has not failed.
        refusal: text that the command prints if it cannot work on this machine.
        variables: environment variables of the command.
    """

    name: str
    turn: int
    command: Sequence[str]
    seconds: float
    kind: str = ""
    program: str = ""
    refusal: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        return "-".join(re.findall(r"[a-z0-9]+", self.name.lower()))


def run_items(
    items: Iterable[Item],
    seconds: float,
    folder: Path,
    tell: Callable[[Item, Row], None] = lambda item, row: None,
    variables: Mapping[str, str] | None = None,
) -> tuple[list[Row], list[Item]]:
    """Runs the items that fit into `seconds`; returns their rows and the items that did not run.

    An item does not start if its time limit exceeds the remaining time. Items of turn 0 always run.

    Args:
        folder: for logs, and the files of the commands.
        tell: called with each row when its item has ended.
        variables: environment variables for all items.
    """
    environment = os.environ | dict(variables or {})
    until = time.monotonic() + seconds
    rows: list[Row] = []
    left: list[Item] = []
    stopped = False
    for item in items:
        if stopped or (item.seconds > until - time.monotonic() and item.turn != 0):
            left.append(item)
            continue
        if item.program and not shutil.which(item.program, path=environment.get("PATH")):
            row = row_of(item, NOT_INSTALLED, 0, "")
        else:
            row = run_item(item, folder / item.kind, environment)
        rows.append(row)
        tell(item, row)
        stopped = item.turn == 0 and row["result"] in FAILURES
    return rows, left


def pending(items: Iterable[Item], results: Mapping[str, Results], ebb: str) -> list[Item]:
    """Items without a result for this state of ebb, by turn; then items that failed with it."""

    def result(item: Item) -> str | None:
        if item.turn == 0:
            return None
        rows = results[item.kind].rows
        return next(
            (r["result"] for r in rows if (r["name"], r.get("ebb")) == (item.name, ebb)), None
        )

    ordered = sorted(items, key=lambda item: item.turn)
    new = [item for item in ordered if result(item) is None]
    return new + [item for item in ordered if result(item) in FAILURES]


def row_of(item: Item, result: str, seconds: float, detail: str) -> Row:
    return {"name": item.name, "result": result, "seconds": round(seconds, 1), "detail": detail}


def run_item(item: Item, folder: Path, environment: dict[str, str]) -> Row:
    own = folder / item.file_name
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True)
    log = own / "log"
    print(f"\n--- {item.name} (at most {item.seconds:.0f} s)", flush=True)
    began = time.monotonic()
    status = run_command(
        [part.replace(FOLDER, str(own)) for part in item.command],
        item.seconds,
        log,
        environment | dict(item.variables),
    )
    row = judge(item, status, time.monotonic() - began, own)
    if row["result"] in FAILURES:
        print("\n".join(log.read_text(errors="replace").splitlines()[-LINES_SHOWN:]))
    print(f"--- {item.name}: {row['result']} after {row['seconds']} s. {row['detail']}", flush=True)
    return row


def run_command(
    command: Sequence[str], seconds: float, log: Path, environment: Mapping[str, str]
) -> int | None:
    """Runs a command and ends all processes that it started; None if it exceeds `seconds`.

    Returns the exit status otherwise.
    """
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )
        except OSError as error:
            output.write(f"{command[0]}: {error.strerror}\n".encode())
            return 127
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:  # also ends its child processes, also after an interrupt
            end_all(process)


def end_all(process: subprocess.Popen[bytes]) -> None:
    """Ends a process group by its leader: with SIGTERM, and after a while with SIGKILL."""
    for number, patience in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue


def judge(item: Item, status: int | None, seconds: float, own: Path) -> Row:
    text = (own / "log").read_text(errors="replace")
    row = row_of(item, PASSED, seconds, "")
    if status is None:
        row["result"] = TIMED_OUT
        running = re.findall(r"^\S+::\S+", text, re.M)
        row["detail"] = f"in {running[-1]}" if running else ""
    elif item.refusal and item.refusal in text:
        row["result"] = NOT_INSTALLED
        row["detail"] = f"it says: {item.refusal}"
    elif status != 0:
        row["result"] = FAILED
        row["detail"] = f"exit status {status}"
    row |= tests_of(own / "junit.xml")
    if row.get("tests") and row["result"] in (PASSED, FAILED):
        unexplained = row["result"] == FAILED and not row["failed"]
        found = [counted(row["tests"]), f"exit status {status}" if unexplained else ""]
        row["detail"] = "; ".join(filter(None, found))
    figures = {file.stem: json.loads(file.read_text()) for file in sorted(own.glob("*.json"))}
    pages = [file.read_text() for file in sorted(own.glob("*.md"))]
    return row | ({"figures": figures} if figures else {}) | ({"pages": pages} if pages else {})


def tests_of(file: Path) -> Row:
    """Reads a JUnit report: counts of tests by result, and the failed and the skipped tests."""
    try:
        cases = list(ET.parse(file).getroot().iter("testcase"))
    except (OSError, ET.ParseError):
        return {}
    counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
    told: dict[str, dict[str, str]] = {"failed": {}, "skipped": {}}
    for case in cases:
        kind, message = "passed", ""
        for child in case:
            if child.tag in ("failure", "error"):
                kind, message = "failed", child.get("message") or ""
            elif child.tag == "skipped":
                kind, message = "skipped", child.get("message") or ""
        counts[kind] += 1
        if kind != "passed":
            name = f"{(case.get('classname') or '').rpartition('.')[2]}::{case.get('name')}"
            told[kind][name] = without_places(message)
    return {"tests": counts, **told}


def counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in counts.items() if number)


def without_places(message: str) -> str:
    """The beginning of a message as one line, with absolute paths cut to file names."""
    text = " ".join(line.strip() for line in message.splitlines() if line.strip())
    return re.sub(r"(?<![\w.])/(?:[\w.+@-]+/)+", "", text)[:LONGEST]


def merge(before: Iterable[Row], now: Iterable[Row], order: Sequence[str]) -> list[Row]:
    """The newest row of each name in `order`, in that order. Other rows are dropped."""
    rows = {row["name"]: row for row in (*before, *now)}
    return [rows[name] for name in order if name in rows]


def read_rows(file: Path, machine: Mapping[str, Any]) -> list[Row]:
    """The rows of a file if it is of such a machine, with any driver version; otherwise none."""

    def without_driver(found: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in found.items() if name != "driver"}

    try:
        found = json.loads(file.read_text())
    except (OSError, json.JSONDecodeError):
        return []
    same = without_driver(found.get("machine", {})) == without_driver(machine)
    return found["items"] if same else []


class Results:
    """The rows of one kind of items: from earlier commands on such a machine, and new ones.

    Args:
        order: names of the items, in the order of the rows. Rows of other names are dropped.
        read_from, write_to: files without extension. In `read_from`, later files have newer rows.
    """

    def __init__(
        self,
        title: str,
        machine: Mapping[str, Any],
        order: Sequence[str],
        read_from: Iterable[Path],
        write_to: Sequence[Path],
    ) -> None:
        self.title, self.machine, self.order, self.write_to = title, machine, order, write_to
        self.rows: list[Row] = []
        for base in read_from:
            self.rows = merge(self.rows, read_rows(Path(f"{base}.json"), machine), order)

    def add(self, row: Row) -> None:
        """Adds a row and writes all rows to the files, so that an interrupt loses none."""
        self.rows = merge(self.rows, [row], self.order)
        results = {"machine": dict(self.machine), "items": self.rows}
        page = markdown(self.title, self.machine, self.rows, self.order)
        for base in self.write_to:
            write_results(base, results, page)


def markdown(
    title: str, machine: Mapping[str, Any], rows: Sequence[Row], order: Sequence[str]
) -> str:
    lines = [f"# {title}", "", ", ".join(f"{k} {v}" for k, v in machine.items()) + ".", ""]
    lines += ["| | result | seconds | |", "|---|---|--:|---|"]
    lines += [
        f"| {row['name']} | {row['result']} | {row['seconds']} | {cell(row['detail'])} |"
        for row in rows
    ]
    missing = [name for name in order if name not in {row["name"] for row in rows}]
    if missing:
        lines += ["", f"Not in these results: {', '.join(missing)}."]
    states = list(dict.fromkeys(row.get("ebb", "unknown") for row in rows))
    if len(states) > 1:
        lines += ["", "Not all rows are of the same state of ebb:", ""]
        for state in states:
            names = [row["name"] for row in rows if row.get("ebb", "unknown") == state]
            lines += [f"* {state}: {', '.join(names)}"]
    failed = [(name, why) for row in rows for name, why in row.get("failed", {}).items()]
    if failed:
        lines += ["", "## Tests that failed", "", *(f"* `{name}`: {why}" for name, why in failed)]
    reasons: dict[str, list[str]] = {}
    for row in rows:
        for name, why in row.get("skipped", {}).items():
            reasons.setdefault(why, []).append(name)
    if reasons:
        lines += ["", "## Tests that were skipped", ""]
        lines += [f"* {len(names)} from `{names[0]}`: {why}" for why, names in reasons.items()]
    for row in rows:
        for page in row.get("pages", []):
            lines += ["", f"## {row['name']}", "", within(page)]
    return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def within(page: str) -> str:
    """A Markdown page as a section of another: without title, headings one level lower."""
    lines = page.strip().splitlines()
    if lines and lines[0].startswith("# "):
        lines = lines[1:]
    return "\n".join("#" + line if line.startswith("##") else line for line in lines).strip()


def table(rows: Sequence[Row]) -> str:
    """The rows as a table for the terminal, printed after all items."""
    width = max(len(row["name"]) for row in rows)
    return "\n".join(
        f"{row['name']:{width}}  {row['result']:13}  {row['seconds']:6.1f} s  {row['detail']}"
        for row in rows
    )


def exit_status(rows: Iterable[Row]) -> int:
    return int(any(row["result"] in FAILURES for row in rows))


def show_list(items: Iterable[Item]) -> None:
    """Prints the items in the order in which they would run."""
    ordered = sorted(items, key=lambda item: item.turn)
    for turn in sorted({item.turn for item in ordered}):
        chosen = [item for item in ordered if item.turn == turn]
        print(f"turn {turn}: at most {sum(item.seconds for item in chosen):.0f} s")
        for item in chosen:
            python = item.command[0] == sys.executable
            command = " ".join(["python", *item.command[1:]] if python else item.command)
            print(f"  {item.name} ({item.seconds:.0f} s): {command}")
