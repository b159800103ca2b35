"""``python -m ebb --version [--verbose]``, ``python -m ebb [options] script.py arguments``, and
``python -m ebb report run.json``."""

from __future__ import annotations

import argparse
import os
import platform
import runpy
import sys
from contextlib import ExitStack
from pathlib import Path

import torch

import ebb
from ebb import _C
from ebb._launch import takeover
from ebb._launch.listing import Listing
from ebb._launch.start import budget_and_file, policy_from, start
from ebb._report.files import render
from ebb._support.shown import clipped


def describe() -> str:
    """The versions and parts of this installation, for a bug report."""
    native = Path(_C.__file__).parent
    commit = native / "commit.txt"  # written by the build
    return "\n".join(
        [
            f"ebb {ebb.__version__}",
            f"commit {commit.read_text().strip() if commit.exists() else 'unknown'}",
            f"torch {torch.__version__} (built against {_C.torch_release})",
            f"compiler {_C.compiler}",
            f"python {platform.python_version()} on {platform.machine()}",
            f"cuda {torch.version.cuda or 'no'}",
            f"page kernels for cuda {'yes' if (native / 'libebb_cuda.so').exists() else 'no'}",
            f"plug-ins {_C.plugins or 'none'}",
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["report"]:
        return render(given[1:])
    parser = argparse.ArgumentParser(
        prog="python -m ebb",
        description=ebb.__doc__.splitlines()[0],
        epilog="python -m ebb report run.json renders a report that was saved as JSON.",
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="with --version: also print the commit, the plug-ins, and the versions of torch, the "
        "compiler and Python",
    )
    parser.add_argument(
        "--cmake-dir",
        action="store_true",
        help="print the folder to pass to CMake as -Debb_DIR=...",
    )
    parser.add_argument(
        "--policy",
        help="the policy, as in the variable EBB; default: 1 (recompute everything), or none with "
        "--budget",
    )
    parser.add_argument("--modules", help="modules that become regions, as in EBB_MODULES")
    parser.add_argument(
        "--list-modules",
        action="store_true",
        help="run the program until each model has run twice, and print possible regions",
    )
    parser.add_argument("--budget", help="memory budget, as in EBB_BUDGET")
    parser.add_argument(
        "--verify",
        choices=["raise", "demote"],
        help="compare each recomputed value with the forward's, bit for bit; if they differ, raise "
        "an error, or warn and save that operator's outputs (demote)",
    )
    parser.add_argument("--report", help="file for the report, written at exit")
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, not a file")
    parser.add_argument("script", nargs="?", help="the program to run with ebb")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the program")
    options = parser.parse_args(given)
    if options.version:
        print(describe() if options.verbose else f"ebb {ebb.__version__}")
        return 0
    if options.cmake_dir:
        print(os.path.join(os.path.dirname(_C.__file__), "cmake"))
        return 0
    if options.script is None:
        parser.print_help()
        return 2
    if options.list_modules:
        list_modules(options)
        return 0
    if options.policy is None and options.budget is None:
        options.policy = "1"
    checks = {"policy": policy_from, "budget": budget_and_file}
    for name, check in checks.items():
        if (text := getattr(options, name)) is not None:
            try:
                check(text)
            except (OSError, ValueError) as error:
                parser.error(f"--{name} {clipped(text)}: {error}")
    try:
        set_up(options)
    except ValueError as error:  # raised under EBB_STRICT
        sys.exit(str(error))
    run(options)
    return 0


def set_up(options: argparse.Namespace) -> None:
    """Sets environment variables, which child processes of the script inherit."""
    names = {"policy": "EBB", "budget": "EBB_BUDGET", "modules": "EBB_MODULES"}
    for option, variable in (names | {"report": "EBB_REPORT"}).items():
        if (text := getattr(options, option)) is not None:
            os.environ[variable] = os.path.abspath(text) if option == "report" else text
    if options.verify is not None:
        os.environ["EBB_VERIFY"] = "1" if options.verify == "raise" else "demote"
        ebb.verify(options.verify)
    start()


def list_modules(options: argparse.Namespace) -> None:
    """Runs the script, without the settings of the variables, until its modules can be listed."""
    takeover.remove()
    listing = Listing()
    with ExitStack() as undo:
        listing.start(undo)
        try:
            run(options)
        finally:
            listing.print_found()


def run(options: argparse.Namespace) -> None:
    """Runs the script as `python script.py` would."""
    sys.argv = [options.script, *options.arguments]
    if options.module:
        sys.path[0] = os.getcwd()
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(options.script))
        runpy.run_path(options.script, run_name="__main__")


if __name__ == "__main__":
    sys.exit(main())
