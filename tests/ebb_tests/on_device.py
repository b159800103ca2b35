"""Runs tests on the test device in other processes, and reports them as tests of this one.

torch's accelerator, once registered, is there for the rest of the process (see ebb_tests.device),
and other tests are about processes without one. So the first test that needs the device starts a
pytest process that collects the same files and waits. For each such test it gets the test's id and
sends the reports back. A process that ends fails the test that it was running.

``pytest --on-device`` runs these tests, and no others, in its own process: for a debugger.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from ebb_tests.engines import PLAIN, Engine


def engine_of(item: pytest.Item) -> Engine:
    callspec = getattr(item, "callspec", None)
    return PLAIN if callspec is None else callspec.params.get("engine", PLAIN)


def process_of(item: pytest.Item) -> str | None:
    """Names the process for the test. None: this one."""
    if "accelerator" in item.path.parts:
        # These use ebb before the device is registered.
        return "backends" if item.path.stem == "test_backends" else "accelerator"
    return "engines" if engine_of(item).is_on_device else None


class Process:
    """A pytest process that has the device."""

    def __init__(self, root: Path, files: Iterable[str]) -> None:
        self.connection, other = Pipe()
        self.output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly")
        options += ("--on-device", f"--serve={other.fileno()}")
        environment = dict(os.environ)
        for name in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *files],
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            pass_fds=[other.fileno()],
        )
        other.close()

    def run(self, nodeid: str, following: str | None) -> list[dict[str, Any]] | None:
        """The reports of a test. None: the process has ended."""
        try:
            self.connection.send((nodeid, following))
            return self.connection.recv()
        except (EOFError, OSError):
            return None

    def ending(self) -> str:
        """How the process has ended, and the end of what it printed."""
        status = self.process.wait()
        how = f"status {status}" if status >= 0 else signal.Signals(-status).name
        self.output.seek(0)
        return f"the process with the test device has ended: {how}\n{self.output.read()[-3000:]}"

    def close(self) -> None:
        self.connection.close()  # which ends the process
        self.process.wait()
        self.output.close()


class Processes:
    """Runs tests in other processes. A plugin of the process that the user has started."""

    def __init__(self) -> None:
        self.running: dict[str, Process] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Any:
        name = process_of(item)
        if name is None:
            return None
        hook = item.ihook
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._reports(name, item, nextitem):
            hook.pytest_runtest_logreport(report=report)
        # An earlier test of this process may have left fixtures of its module to this one.
        state = item.session._setupstate
        call = pytest.CallInfo.from_call(lambda: state.teardown_exact(nextitem), "teardown")
        if call.excinfo is not None:
            report = hook.pytest_runtest_makereport(item=item, call=call)
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _reports(
        self, name: str, item: pytest.Item, nextitem: pytest.Item | None
    ) -> list[pytest.TestReport]:
        if name not in self.running:
            files = {str(one.path): 0 for one in item.session.items if process_of(one) == name}
            self.running[name] = Process(item.config.rootpath, files)
        follows = nextitem is not None and process_of(nextitem) == name
        found = self.running[name].run(item.nodeid, nextitem.nodeid if follows else None)
        if found is not None:
            read = functools.partial(
                item.config.hook.pytest_report_from_serializable, config=item.config
            )
            return [read(data=data) for data in found]
        process = self.running.pop(name)
        message = process.ending()
        process.close()
        return [
            pytest.TestReport(
                item.nodeid,
                item.location,
                dict.fromkeys(item.keywords, 1),
                "failed",
                message,
                "call",
            )
        ]

    def pytest_sessionfinish(self) -> None:
        for process in self.running.values():
            process.close()


class Server:
    """Runs the tests whose ids come in. A plugin of the process with the device."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self.config, self.connection = config, connection
        self.reports: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        write = self.config.hook.pytest_report_to_serializable
        self.reports.append(write(config=self.config, report=report))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        items |= {None: None}  # type: ignore[dict-item]
        with contextlib.suppress(EOFError):
            while True:
                nodeid, following = self.connection.recv()
                self.reports = []
                self.config.hook.pytest_runtest_protocol(
                    item=items[nodeid], nextitem=items[following]
                )
                self.connection.send(self.reports)
        return True


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("ebb")
    group.addoption("--engine", action="append", help="only tests under the engine of this name")
    group.addoption(
        "--on-device", action="store_true", help="only tests on the test device, in this process"
    )
    group.addoption("--serve", type=int, help="internal: see tests/ebb_tests/on_device.py")


def configure(config: pytest.Config) -> None:
    if (file := config.getoption("serve")) is not None:
        config.pluginmanager.register(Server(config, Connection(file)))
    elif not config.getoption("on_device"):
        config.pluginmanager.register(Processes())


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what the options exclude."""
    names, here = config.getoption("engine"), config.getoption("on_device")
    chosen = [
        item
        for item in items
        if not (names and engine_of(item).name not in names)
        and not (here and process_of(item) is None)
    ]
    if len(chosen) < len(items):
        kept = {*chosen}
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = chosen
