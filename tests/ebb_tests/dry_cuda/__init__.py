"""A CUDA runtime without a GPU: torch's own CUDA allocator, streams, captures and dispatch run on
it. See Note [Dry CUDA runtime] in dry.h. Needs a CUDA build of torch.

``python -m ebb_tests.dry_cuda program.py`` builds it, and runs a program on it. ``environment()``
has the variables of a process on it. ``dry_cuda.give_values()`` in such a process gives kernels
results.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib.util
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path

import torch

HERE = Path(__file__).parent
BUILD = HERE.parents[2] / "build" / "dry_cuda" / torch.__version__
RUNTIME, DRIVER, VALUES = "libdry_cuda.so", "libcuda.so.1", "dry_cuda_values.so"

# Operators that keep torch's CUDA kernel: they allocate, copy between devices, or only look.
KEPT = [
    "_copy_from",
    "_copy_from_and_resize",
    "_to_copy",
    "_local_scalar_dense",
    "empty",
    "empty_strided",
    "resize_",
    "set_",
    "view",
    "as_strided",
    "_reshape_alias",
    "record_stream",
    "is_pinned",
    "_pin_memory",
    "pin_memory",
    "_resize_output_",
    "_fused_dropout",
    "native_dropout",
    "_efficientzerotensor",
]


def _compile(target: Path, sources: list[str], flags: list[str]) -> None:
    files = [HERE / source for source in sources]
    newest = max(path.stat().st_mtime for path in [*files, HERE / "dry.h", Path(__file__)])
    if target.exists() and target.stat().st_mtime > newest:
        return
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O1", "-w", "-shared", "-fPIC"]
    subprocess.run([*command, *map(str, files), *flags, "-o", f"{target}.part"], check=True)
    Path(f"{target}.part").rename(target)


def _cuda_headers() -> list[str]:
    """CUDA's headers: of the packages that torch came with, or of an installed CUDA."""
    packages = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "include"
    installed = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
    return [f"-isystem{path}" for path in (packages, installed) if path.exists()]


def build() -> Path:
    """Builds what is out of date. Returns the folder."""
    from torch.utils import cpp_extension

    BUILD.mkdir(parents=True, exist_ok=True)
    headers = _cuda_headers()
    _compile(BUILD / DRIVER, ["driver.cpp"], [f"-Wl,-soname,{DRIVER}"])
    runtime = ["devices.cpp", "memory.cpp", "streams.cpp", "kernels.cpp"]
    _compile(BUILD / RUNTIME, runtime, headers)
    torch_flags = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    torch_flags += [f"-isystem{sysconfig.get_path('include')}", *headers]
    torch_flags += [f"-L{path}" for path in cpp_extension.library_paths()]
    torch_flags += ["-ltorch", "-ltorch_cpu", "-lc10", "-lc10_cuda"]
    _compile(BUILD / VALUES, ["values.cpp"], torch_flags)
    return BUILD


def environment(**settings: object) -> dict[str, str]:
    """The variables of a process on the runtime.

    Args:
        settings: of the runtime, such as ``memory=330 << 20``, ``kernel_us=40``, ``log=path``: see
            Note [Dry CUDA runtime]. ``values=1``: see `gives_values`.
    """
    made = {"LD_PRELOAD": str(BUILD / RUNTIME), "LD_LIBRARY_PATH": str(BUILD)}
    return made | {f"DRY_CUDA_{name.upper()}": str(value) for name, value in settings.items()}


def run(
    program: str,
    *arguments: object,
    variables: Mapping[str, str] | None = None,
    seconds: float = 300,
    **settings: object,
) -> subprocess.CompletedProcess[str]:
    """Runs a program of this folder on the runtime.

    Args:
        variables: environment variables of the process, such as EBB_BUDGET.
        settings: as for `environment`.
    """
    command = [sys.executable, str(HERE / program), *map(str, arguments)]
    variables = os.environ | environment(**settings) | dict(variables or {})
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=seconds)


def is_loaded() -> bool:
    """True in a process on the runtime."""
    return os.environ.get("LD_PRELOAD", "").endswith(RUNTIME)


def gives_values() -> bool:
    """True if kernels shall give values: tests then call `give_values`, and so does ``python -m
    ebb_tests.dry_cuda VALUES=1`` before it runs its program."""
    return is_loaded() and os.environ.get("DRY_CUDA_VALUES") == "1"


@functools.cache
def give_values() -> int:
    """Gives kernels results from now on. Call it before the first call of CUDA. Attention is then
    not fused, and convolutions are not cuDNN's. Replayed graphs and the page pools' kernels stay
    without results; random numbers come from the CPU's generator.

    Returns: the number of replaced kernels.
    """
    torch.backends.cudnn.enabled = False
    for fused in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{fused}_sdp")(False)
    spec = importlib.util.spec_from_file_location("dry_cuda_values", BUILD / VALUES)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    stderr, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # torch warns of each replaced kernel
    try:
        return module.install(set(KEPT))
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)


def launches() -> int:
    """The number of kernels that this process has launched."""
    return ctypes.CDLL(None).dry_cuda_launches()


def used(device: int = 0) -> int:
    """Bytes of a device that are allocated by the process."""
    function = ctypes.CDLL(None).dry_cuda_used
    function.restype = ctypes.c_size_t
    return function(device)


def mark(text: str) -> None:
    """Writes a line into the log."""
    ctypes.CDLL(None).dry_cuda_mark(text.encode())


# torch 2.14 gives each backward a Python context, which the backward's thread drops some time after
# the backward. Where the interpreter is gone by then the process aborts, in plain eager too.
if is_loaded():
    atexit.register(time.sleep, 0.1)
