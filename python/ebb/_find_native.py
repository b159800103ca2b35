"""Finds the native library for the installed torch release. A wheel has several."""

from __future__ import annotations

import re
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

VERSION = "0.2.0.dev0"
_OLDEST = [2, 11]  # torch release that ebb can be built against
NATIVE = Path(__file__).parent / "_native"  # has a folder torch-<release> for each torch release


def release(version: str) -> str:
    """The public part of a version: CPU and CUDA builds of one release are compatible."""
    return version.split("+")[0]


def numbers(release: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", release)]


def find(running: str, native: Path = NATIVE) -> Path:
    """The folder of `ebb._C` for the torch release that is `running`. Raises ImportError before the
    dynamic linker can fail."""
    folders = {
        module.parent.name.removeprefix("torch-"): module.parent
        for module in native.glob(f"torch-*/_C{EXTENSION_SUFFIXES[0]}")
    }
    if not folders:
        raise ImportError(
            "ebb's C++ part is not built for this Python. Likely causes: 1. ebb is imported from a "
            "source checkout (run `pip install --no-build-isolation -e .` there); 2. the "
            "installation was interrupted, or belongs to another Python (install ebb again)."
        )
    if release(running) not in folders:
        releases = sorted(folders, key=numbers)
        is_too_old = numbers(release(running))[:2] < _OLDEST
        build = (
            ""
            if is_too_old
            else (
                f" Or build ebb against torch {release(running)}, in a checkout: "
                "pip install --no-build-isolation --no-deps --force-reinstall ."
            )
        )
        raise ImportError(
            f"ebb {VERSION} was built against torch {', '.join(releases)}, but torch "
            f"{running} is running (in {Path(torch.__file__).parent}). "
            "Likely causes: 1. torch was changed after ebb was installed; 2. another environment's "
            "torch comes first on sys.path. Install a torch that fits: pip install "
            f"torch=={releases[-1]}.{build}"
        )
    return folders[release(running)]
