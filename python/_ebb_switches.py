"""Names and on/off values of environment variables, and what launchers say of a process. Imports
nothing of ebb, since these are also read before ebb is imported."""

from __future__ import annotations

import os
import sys


def is_set(name: str) -> bool:
    """True if a variable is set and is not an off value."""
    return os.environ.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")


# The rows of docs/reference/environment.md. Other names are misspelt.
NAMES = frozenset((
    "EBB", "EBB_MODULES", "EBB_BUDGET", "EBB_DISABLE", "EBB_STRICT", "EBB_VERIFY", "EBB_REPORT",
    "EBB_AHEAD", "EBB_CONFIG",
))  # fmt: skip
# These change only how regions behave. EBB, EBB_BUDGET or the program makes the regions.
NEED_REGIONS = ("EBB_AHEAD", "EBB_CONFIG", "EBB_REPORT", "EBB_VERIFY")
# Variables for builds, tests and benchmarks of ebb.
PREFIXES = (
    "EBB_BENCH_", "EBB_BUILD_DIR", "EBB_CMAKE_ARGS", "EBB_CUDA", "EBB_SANITIZE", "EBB_TEST_",
    "EBB_TESTING", "EBB_TORCH_DIR",
)  # fmt: skip


def unknown_names() -> list[str]:
    """Environment variables that begin with ``EBB_`` and that ebb does not know."""
    return [
        name
        for name in os.environ
        if name.startswith("EBB_") and name not in NAMES and not name.startswith(PREFIXES)
    ]


def meant_by(name: str) -> str:
    """The variable that a user who wrote `name` probably means; empty if no name is close."""
    from difflib import get_close_matches  # noqa: PLC0415 - seldom needed

    rest_of_names = [known[4:] for known in sorted(NAMES - {"EBB"})]
    close = get_close_matches(name[4:100].upper(), rest_of_names, 1, 0.8)
    return f"EBB_{close[0]}" if close else ""


# Launchers that do not set RANK set one of these: srun, mpirun, Lightning (LOCAL_RANK).
_RANKS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "LOCAL_RANK")
_LAUNCHERS = (
    "torch.distributed.launcher.api",
    "accelerate.commands.launch",
    "deepspeed.launcher.runner",
    "deepspeed.launcher.launch",
)


def number_in(variable: str) -> int:
    """The number in an environment variable; 0 if it has none from 0 to 2**31 - 1."""
    try:
        value = int(os.environ.get(variable, ""))
    except ValueError:
        return 0
    return value if 0 <= value < 2**31 else 0


def launched_rank() -> int:
    """The rank that the launcher gave to this process; 0 if it gave none."""
    if "RANK" in os.environ:
        return number_in("RANK")
    return next(filter(None, map(number_in, _RANKS)), 0)


def is_child() -> bool:
    """True if multiprocessing started this process."""
    from multiprocessing import current_process, parent_process  # noqa: PLC0415 - imported by torch

    # A spawned process imports the main module before it knows its parent.
    return parent_process() is not None or hasattr(current_process(), "_inheriting")


def is_launcher() -> bool:
    """True if this process only starts the training processes."""
    return "RANK" not in os.environ and any(name in sys.modules for name in _LAUNCHERS)
