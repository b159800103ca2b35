"""The machine and the software of a run."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from report import write_figures, write_results

import ebb


def device() -> torch.device:
    """The GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment() -> dict[str, Any]:
    on_gpu = device().type == "cuda"
    return {
        "processor": processor(),
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "torch": torch.__version__,
        "ebb": ebb.__version__,
        "torch-remat": version("torch-remat"),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }


def gather(parts: Iterable[Mapping[str, Any]], folder: Path | None, name: str) -> dict[str, Any]:
    """The environment, and all parts of a benchmark's results; written after each part."""
    found = {"environment": environment()}
    for part in parts:
        found |= part
        keep(found, folder, name)
    return found


def keep(found: dict[str, Any], folder: Path | None, name: str = "") -> None:
    """Writes the figures so far: a benchmark that is ended has those."""
    if folder is not None:
        write_figures(base(found, folder, name), found)


def publish(found: dict[str, Any], page: str, folder: Path | None, name: str) -> None:
    """Prints the page of a benchmark, and writes its results, if there is a folder for them."""
    print(page)
    if folder is not None:
        write_results(base(found, folder, name), found, page)


def base(found: dict[str, Any], folder: Path, name: str = "") -> Path:
    """The path of a benchmark's results without its suffix. `name`: empty for `run.py`."""
    machine = slug(found["environment"])
    return folder / (f"{machine}-{name}" if name else machine)


def slug(found: dict[str, Any]) -> str:
    """The file name of the results: the name of the GPU, or without a GPU of the processor."""
    name = str(found["gpu"] or found["processor"]).lower()
    return "-".join("".join(c if c.isalnum() else " " for c in name).split())


def quick() -> bool:
    """True if EBB_BENCH_QUICK=1: tiny workloads, to test the benchmarks themselves."""
    return os.environ.get("EBB_BENCH_QUICK") == "1"
