"""Builds the copy, and runs tests in it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from mutant import ROOT

FOR_ACCELERATOR = {"EBB_TEST_ACCELERATOR": "1"}  # which a process has for good


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
        | {"PATH": programs, "EBB_CMAKE_ARGS": "-DEBB_LTO=OFF", "EBB_BUILD_DIR": "build/cmake"},
        stdout=subprocess.DEVNULL,
        check=True,
    )


def failure(
    tree: Path, tests: Iterable[str], mutant: str, limit: float, more: Mapping[str, str]
) -> str | None:
    """Runs these under that mutant ("": none): what failed first; None if nothing did."""
    environment = os.environ | {"PYTHONPATH": str(tree / "python"), "EBB_MUTANT": mutant} | more
    command = [sys.executable, "-m", "pytest", "-x", "-vv", "--tb=short", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, *tests],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit,
        )
    except subprocess.TimeoutExpired as error:
        return f"{last_begun((error.stdout or b'').decode(errors='replace'))}: no end"
    if done.returncode in (2, 3, 4, 5):  # pytest could not run them
        raise RuntimeError(f"{' '.join(tests)}:\n{done.stdout[-4000:]}{done.stderr[-2000:]}")
    if done.returncode < 0:
        return f"{last_begun(done.stdout)}: ended by signal {-done.returncode}"
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.MULTILINE)
    return failed[1] if failed else None if done.returncode == 0 else "the process failed"


def last_begun(output: str) -> str:
    return (re.findall(r"^(tests/\S+::.+?)(?: (?:PASSED|$)|$)", output, re.M) or ["no test"])[-1]


def first_failure(
    tree: Path, tests: Iterable[str], mutant: str, limit: float, more: Mapping[str, str]
) -> str | None:
    """Those on the device for tests in a process of their own."""
    on_device = [test for test in tests if test.startswith("tests/accelerator/")]
    others = [test for test in tests if test not in on_device]
    found = on_device and failure(tree, on_device, mutant, limit, FOR_ACCELERATOR | dict(more))
    return found or (failure(tree, others, mutant, limit, more) if others else None) or None
