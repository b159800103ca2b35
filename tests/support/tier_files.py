"""The file of the disk tier, for tests that replace it or fill its disk."""

from __future__ import annotations

import contextlib
import os

from offloading import OFFLOAD_ALL, chain_of_sines, gradients

import ebb


def descriptor_of_the_file(folder):
    """The file has no name, but the process has it open."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(f"{folder}/"):
                return int(name)
    raise AssertionError("no file is open in the folder")


@contextlib.contextmanager
def replaced_by(path, descriptor, flags):
    """`descriptor` leads to another file for a while."""
    saved = os.dup(descriptor)
    other = os.open(path, flags)
    os.dup2(other, descriptor)
    try:
        yield
    finally:
        os.dup2(saved, descriptor)
        os.close(saved)
        os.close(other)


def preallocate(x):
    """The file grows now; later there is no room for more than that."""
    with ebb.region(OFFLOAD_ALL):
        y = chain_of_sines(x, 9).sum()
    gradients(y, x)
