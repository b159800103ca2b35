"""The file of the disk tier, for tests that replace it or fill its disk."""

from __future__ import annotations

import contextlib
import os
import warnings

from ebb_tests.programs.offloaded import forward, gradients


def descriptor_of_the_file(folder):
    """The descriptor of the disk tier's file. The file has no name, so /proc/self/fd lists it."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(f"{folder}/"):
                return int(name)
    raise AssertionError("no file is open in the folder")


@contextlib.contextmanager
def replaced_by(path, descriptor, flags):
    """Makes `descriptor` refer to another file inside the with-block."""
    saved = os.dup(descriptor)
    other = os.open(path, flags)
    os.dup2(other, descriptor)
    try:
        yield
    finally:
        os.dup2(saved, descriptor)
        os.close(saved)
        os.close(other)


@contextlib.contextmanager
def full_disk(folder, x):
    """Each write to the disk tier fails in the with-block. Yields the list of warnings."""
    gradients(forward(x, 9), x)  # the file grows before the disk is full
    with (
        replaced_by("/dev/full", descriptor_of_the_file(folder), os.O_RDWR),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        yield caught
