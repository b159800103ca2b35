"""This process's place in its job, which decides its file names and the lines that it prints."""

from __future__ import annotations

import multiprocessing
import os
import sys
import zlib

import torch.distributed as dist

from ebb._support.shown import print_stderr

# Launchers that do not set RANK set one of these: srun, mpirun, Lightning (LOCAL_RANK).
_OTHERS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "LOCAL_RANK")
# How many ranks run on a node: torchrun, mpirun, MPICH, srun.
_LOCAL_SIZES = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_NTASKS_PER_NODE",
)
_LAUNCHERS = (
    "torch.distributed.launcher.api",
    "accelerate.commands.launch",
    "deepspeed.launcher.runner",
    "deepspeed.launcher.launch",
)
_TOLD = "_EBB_TOLD"  # lines already printed, inherited by child processes


class _Known:
    """Values to remember, because a later call cannot read them again."""

    rank: int | None = None  # from torch.distributed, which loses it at shutdown
    inherited = os.environ.get("RANK")  # the value when ebb was imported


def _number(variable: str) -> int:
    try:
        value = int(os.environ.get(variable, ""))
    except ValueError:
        return 0
    return value if 0 <= value < 2**31 else 0


def rank() -> int:
    """The rank of this process in its job; 0 if it is alone. Child processes inherit the rank."""
    if dist.is_available() and dist.is_initialized():
        _Known.rank = dist.get_rank()
    if _Known.rank is not None:
        return _Known.rank
    if "RANK" in os.environ:
        return _number("RANK")
    return next(filter(None, map(_number, _OTHERS)), 0)


def ranks_of_node(name: str) -> int:
    """How many ranks of the job run on this machine; `name` is the setting that needs it.

    Raises:
        ValueError: the job has several ranks, and its launcher does not say how many run here.
    """
    found = next(filter(None, map(_number, _LOCAL_SIZES)), 0)
    if found:
        return found
    size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if max(size, _number("WORLD_SIZE")) > 1:
        raise ValueError(
            f"ebb: {name} is given per node, but the launcher does not say how many ranks run on "
            "this node; set LOCAL_WORLD_SIZE, or give the limit of one rank"
        )
    return 1


def is_helper() -> bool:
    """True if multiprocessing started this process and it has no rank of its own."""
    if multiprocessing.parent_process() is None:
        return False
    return _Known.rank is None and os.environ.get("RANK") == _Known.inherited


def is_first() -> bool:
    """True if this process prints for its job."""
    return rank() == 0 and not is_helper()


def is_launcher() -> bool:
    """True if this process only starts the training processes."""
    return "RANK" not in os.environ and any(name in sys.modules for name in _LAUNCHERS)


def label() -> str:
    """The part of file names that identifies this process in its job; empty for the first."""
    number = rank()
    started_by_another = multiprocessing.parent_process() is not None
    if not is_helper():
        return f"rank{number}" if number > 0 or started_by_another else ""
    which = "-".join(map(str, multiprocessing.current_process()._identity))
    return (f"rank{number}." if number > 0 else "") + f"process{which}"


def print_first(line: str) -> None:
    """Prints a line to stderr in the job's first process."""
    if is_first():
        print_stderr(line)


def print_once(line: str) -> None:
    """Prints a line to stderr once in a job: child processes inherit the list of printed lines."""
    mark = f"{zlib.crc32(line.encode(errors='replace')):x}"
    told = os.environ.get(_TOLD, "").split(",")
    if is_first() and mark not in told:
        os.environ[_TOLD] = ",".join([*filter(None, told), mark])
        print_stderr(line)
