"""Builds the copy, and runs tests in it."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NoReturn

from mutants.mutant import ROOT

ON_DEVICE = ["--on-device"]  # in the process that runs them, which then has the device for good


def build(tree: Path) -> None:
    """Once for all mutants."""
    late = tree / "build" / "late"  # the device of tests is the same as the checkout's
    (ROOT / "build" / "late").mkdir(parents=True, exist_ok=True)
    late.parent.mkdir(parents=True, exist_ok=True)
    if not late.exists():
        late.symlink_to(ROOT / "build" / "late", target_is_directory=True)
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # CMake and ninja
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
        cwd=tree,
        env=os.environ
        | {
            "PATH": programs,
            "EBB_CMAKE_ARGS": "-DEBB_LTO=OFF",
            "EBB_BUILD_DIR": "build/cmake",
            "EBB_TESTING": "1",
        },
        stdout=subprocess.DEVNULL,
        check=True,
    )


def preload(tree: Path) -> None:
    """What each run needs is imported once: they are forks of this process."""
    os.chdir(tree)
    sys.path.insert(0, str(tree / "python"))
    os.environ["PYTHONPATH"] = str(tree / "python")
    for module in ("torch", "torch.utils.cpp_extension", "numpy", "hypothesis", "pytest", "ebb"):
        importlib.import_module(module)


def failure(tests: Iterable[str], mutant: str, limit: float, options: Iterable[str]) -> str | None:
    """Runs these under that mutant ("": none): what failed first; None if nothing did."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        child = os.fork()
        if child == 0:
            run_in_child(output.fileno(), [*options, *tests], {"MUTANT": mutant})
        status = wait(child, limit)
        output.seek(0)
        said = output.read()
    if status is None:
        return f"{last_begun(said)}: no end"
    if status in (2, 3, 4, 5):  # pytest could not run them
        raise RuntimeError(f"{' '.join(tests)}:\n{said[-6000:]}")
    if status < 0:
        return f"{last_begun(said)}: ended by signal {-status}"
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", said, re.MULTILINE)
    return failed[1] if failed else None if status == 0 else "the process failed"


def run_in_child(output: int, arguments: Iterable[str], environment: Mapping[str, str]) -> NoReturn:
    os.setpgid(0, 0)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.update(environment)
    import pytest

    status = pytest.main(["-x", "-vv", "--tb=short", "-p", "no:cacheprovider", *arguments])
    sys.stdout.flush()
    os._exit(status)


def wait(child: int, limit: float) -> int | None:
    """Its exit status, less than 0 for a signal; None if it took too long."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def last_begun(output: str) -> str:
    return (re.findall(r"^(tests/\S+::.+?)(?: (?:PASSED|$)|$)", output, re.M) or ["no test"])[-1]


def first_failure(tests: Iterable[str], mutant: str, limit: float) -> str | None:
    """Those on the device for tests in a process of their own."""
    on_device = [test for test in tests if test.startswith("tests/accelerator/")]
    others = [test for test in tests if test not in on_device]
    for group, options in ((on_device, ON_DEVICE), (others, ["--engine=plain"])):
        found = failure(group, mutant, limit, options) if group else None
        if found:
            return found
    return None
