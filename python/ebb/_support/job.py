"""This process's place in its job, which decides its file names and the lines that it prints."""

from __future__ import annotations

import multiprocessing
import os
import zlib

import torch.distributed as dist
from _ebb_switches import is_child, launched_rank, number_in

from ebb._support.shown import print_stderr

# How many ranks run on a node: torchrun, mpirun, MPICH, srun.
_LOCAL_SIZES = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_NTASKS_PER_NODE",
)
_TOLD = "_EBB_TOLD"  # lines already printed, inherited by child processes


class _Known:
    """Values to remember, because a later call cannot read them again."""

    rank: int | None = None  # from torch.distributed, which loses it at shutdown
    inherited = os.environ.get("RANK")  # the value when ebb was imported


def rank() -> int:
    """The rank of this process in its job; 0 if it is alone. Child processes inherit the rank."""
    if dist.is_available() and dist.is_initialized():
        _Known.rank = dist.get_rank()
    return launched_rank() if _Known.rank is None else _Known.rank


def ranks_of_node(name: str) -> int:
    """How many ranks of the job run on this machine; `name` is the setting that needs it."""
    found = next(filter(None, map(number_in, _LOCAL_SIZES)), 0)
    if found:
        return found
    size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if max(size, number_in("WORLD_SIZE")) > 1:
        raise ValueError(
            f"ebb: {name} is given per node, but the launcher does not say how many ranks run on "
            "this node; set LOCAL_WORLD_SIZE, or give the limit of one rank"
        )
    return 1


def is_helper() -> bool:
    """True if multiprocessing started this process and it has no rank of its own."""
    return is_child() and _Known.rank is None and os.environ.get("RANK") == _Known.inherited


def is_first() -> bool:
    """True if this process prints for its job."""
    return rank() == 0 and not is_helper()


def label() -> str:
    """The part of file names that identifies this process in its job; empty for the first."""
    number = rank()
    if not is_helper():
        return f"rank{number}" if number > 0 or is_child() else ""
    which = "-".join(map(str, multiprocessing.current_process()._identity))
    return (f"rank{number}." if number > 0 else "") + f"process{which}"


def print_first(line: str) -> None:
    """Prints a line to stderr in the job's first process."""
    if is_first():
        print_stderr(line)


def print_once(line: str, *, on_each_rank: bool = False) -> None:
    """Prints a line to stderr once in a job: child processes inherit the list of printed lines.
    `on_each_rank`: also on ranks other than 0, which may have another environment than rank 0, or
    run on another machine. They add their number."""
    mark = f"{zlib.crc32(line.encode(errors='replace')):x}"
    told = os.environ.get(_TOLD, "").split(",")
    if mark not in told and (not is_helper() if on_each_rank else is_first()):
        os.environ[_TOLD] = ",".join([*filter(None, told), mark])
        print_stderr(f"ebb: rank {rank()}: {line.removeprefix('ebb: ')}" if rank() else line)
