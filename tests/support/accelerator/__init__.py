"""A device for tests, "late": built when it is first asked for, by torch version.

It is registered for the whole process, and torch's accelerator from then on.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils import cpp_extension

HERE = Path(__file__).parent
BUILD = Path(__file__).resolve().parents[3] / "build" / "late"
DRAWS = ("from device", "from cpu", "from both", "from hidden")


def _library() -> Path:
    """The compiled library; ten to sixty seconds the first time."""
    made_of = [Path(__file__), HERE / "late.cpp", *sorted(HERE.glob("*.h"))]
    key = hashlib.sha256(b"".join(file.read_bytes() for file in made_of)).hexdigest()[:12]
    library = BUILD / f"late-{torch.__version__}-{key}.so"
    if not library.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        made = library.with_suffix(f".{os.getpid()}")
        command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O1", "-fPIC", "-shared", "-w"]
        command += [f"-isystem{path}" for path in cpp_extension.include_paths()]
        command += [str(HERE / "late.cpp"), "-o", str(made)]
        command += [f"-L{path}" for path in cpp_extension.library_paths()]
        command += ["-ltorch_cpu", "-lc10"]
        subprocess.run(command, check=True)
        made.replace(library)
    return library


def load() -> torch.device:
    """Registers the device, once."""
    if "late" not in sys.modules:
        torch.ops.load_library(_library())
        module = types.ModuleType("late")
        for name, function in {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "_is_in_bad_fork": lambda: False,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "manual_seed": torch.ops.late.manual_seed,
            "manual_seed_all": torch.ops.late.manual_seed,
        }.items():
            setattr(module, name, function)
        sys.modules["late"] = module
        torch.utils.rename_privateuse1_backend("late")
        torch._register_device_module("late", module)
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return torch.device("late", 0)


@contextlib.contextmanager
def drawing(whose: str, *, generator: bool = True) -> Iterator[None]:
    """Inside, random operators on the device draw from a generator of DRAWS; `generator`: whether
    the device says that it has one."""
    torch.ops.late.draw_from(DRAWS.index(whose))
    torch.ops.late.have_generator(generator)
    try:
        yield
    finally:
        torch.ops.late.draw_from(0)
        torch.ops.late.have_generator(True)
