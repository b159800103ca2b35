"""A fake CUDA runtime and device guard for test processes: see fake_cuda.cpp."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from ebb_tests import fork_server

# The first lines of a test program. libtorch archives name the CUDA runtime like this.
LOAD = """
import ctypes, os, sys
import torch, ebb._testing
testing = ebb._testing
cuda = ctypes.CDLL(sys.argv[1])
cuda.fake_cuda_capture.argtypes = [ctypes.c_uint64, ctypes.c_int]
"""


def skip_where_torch_has_the_real_one() -> None:
    """Skips the test if torch is built with CUDA: its real runtime would find no driver."""
    if torch.version.cuda is not None:
        pytest.skip("torch is built with CUDA, whose runtime and guard are found first")


def build(folder: Path) -> Path:
    skip_where_torch_has_the_real_one()
    library = folder / "libcudart-0a1b2c3d.so.13"
    source = Path(__file__).with_suffix(".cpp")
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O1", "-fPIC", "-shared", "-w"]
    command += [f"-isystem{path}" for path in cpp_extension.include_paths()]
    command += [str(source), "-o", str(library)]
    command += [f"-L{path}" for path in cpp_extension.library_paths()]
    subprocess.run([*command, "-lc10"], check=True)
    return library


def run(library: Path, program: str) -> list[str]:
    """The lines that `program` prints. It runs after `LOAD`."""
    done = fork_server.run(
        ["-c", LOAD + program, library],
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()
