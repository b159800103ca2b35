"""This process's place in its job: which files are its own, and which lines it is to print."""

from __future__ import annotations

import multiprocessing
import os
import sys
import zlib

import torch.distributed as dist

from ebb._support.shown import tell

# Where launchers do not give RANK: srun, mpirun, and Lightning, which gives only the last.
_OTHERS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "LOCAL_RANK")
_LAUNCHERS = (
    "torch.distributed.launcher.api",
    "accelerate.commands.launch",
    "deepspeed.launcher.runner",
    "deepspeed.launcher.launch",
)
_TOLD = "_EBB_TOLD"  # what was said already, for the processes that this one starts


class _Known:
    """What was found out while it could be."""

    rank: int | None = None  # torch.distributed's, which forgets it when it is shut down
    inherited = os.environ.get("RANK")


def _number(variable: str) -> int:
    try:
        value = int(os.environ.get(variable, ""))
    except ValueError:
        return 0
    return value if 0 <= value < 2**31 else 0


def rank() -> int:
    """Of this process in its job; 0 if it is alone. What a rank starts has the same by default."""
    if dist.is_available() and dist.is_initialized():
        _Known.rank = dist.get_rank()
    if _Known.rank is not None:
        return _Known.rank
    if "RANK" in os.environ:
        return _number("RANK")
    return next(filter(None, map(_number, _OTHERS)), 0)


def _is_helper() -> bool:
    """Whether multiprocessing started this process, and nothing has given it a rank of its own."""
    if multiprocessing.parent_process() is None:
        return False
    return _Known.rank is None and os.environ.get("RANK") == _Known.inherited


def is_first() -> bool:
    """Whether this process speaks for its job."""
    return rank() == 0 and not _is_helper()


def is_launcher() -> bool:
    """Whether this process only starts those that train."""
    return "RANK" not in os.environ and any(name in sys.modules for name in _LAUNCHERS)


def label() -> str:
    """What tells this process's files from those of others in its job; empty for the first."""
    number = rank()
    started_by_another = multiprocessing.parent_process() is not None
    if not _is_helper():
        return f"rank{number}" if number > 0 or started_by_another else ""
    which = "-".join(map(str, multiprocessing.current_process()._identity))
    return (f"rank{number}." if number > 0 else "") + f"process{which}"


def say(line: str) -> None:
    """Prints a line to stderr, once in a job: workers inherit that their launcher has said it."""
    mark = f"{zlib.crc32(line.encode(errors='replace')):x}"
    told = os.environ.get(_TOLD, "").split(",")
    if is_first() and mark not in told:
        os.environ[_TOLD] = ",".join([*filter(None, told), mark])
        tell(line)
