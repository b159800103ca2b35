"""Measures the time to pin host memory, and the speed of copies to and from it.

    python benchmarks/pinned_memory.py --output results

Registers memory with CUDA as ebb does: with and without huge pages, and with pages that were
written before or not. Measures torch's own pinned memory for comparison.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from environment import gather, publish
from offload_on_gpu import seconds
from report import environment_line, table

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))
from ebb_tests.pinned_memory import Registered  # noqa: E402

MIB = 1 << 20
GIB = 1 << 30
Row = dict[str, Any]


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def registering(nbytes: int, rounds: int = 3) -> list[Row]:
    """Seconds per GiB to touch, register and unregister memory. Each round uses new memory."""
    rows = []
    for huge in (False, True):
        for touched in (False, True):
            least = {"touch": float("inf"), "register": float("inf"), "unregister": float("inf")}
            for _ in range(rounds):
                memory = Registered(nbytes, huge)
                found = {"touch": timed(memory.touch) if touched else 0.0}
                found["register"] = timed(memory.register)
                found["unregister"] = timed(memory.unregister)
                least = {name: min(least[name], found[name]) for name in least}
            per_gib = {name: took * GIB / nbytes for name, took in least.items()}
            rows.append({"huge": huge, "touched": touched} | per_gib)
    return rows


def torchs_own(nbytes: int) -> float:
    """Seconds per GiB to allocate torch's pinned memory, without torch's cache."""
    torch.empty(MIB, dtype=torch.uint8, pin_memory=True)
    return timed(lambda: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)) * GIB / nbytes


def bandwidths(nbytes: int) -> list[Row]:
    """GB/s of copies between the GPU and each kind of pinned memory."""
    on_device = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    memories = {
        "registered": Registered(nbytes),
        "registered, huge pages": Registered(nbytes, True),
    }
    for memory in memories.values():
        memory.register()
    hosts = {"torch's": torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)}
    hosts |= {name: memory.tensor() for name, memory in memories.items()}
    rows = [
        {
            "memory": name,
            "out": nbytes / 1e9 / seconds(lambda h=host: h.copy_(on_device, non_blocking=True)),
            "in": nbytes / 1e9 / seconds(lambda h=host: on_device.copy_(h, non_blocking=True)),
        }
        for name, host in hosts.items()
    ]
    for memory in memories.values():
        memory.unregister()
    return rows


def page(found: Row) -> str:
    def number(value: float) -> str:
        return f"{value:.3f}"

    lines = [
        "# Pinned memory",
        "",
        f"{environment_line(found['environment'])}. Written by `benchmarks/pinned_memory.py`.",
        "",
        "Seconds per GiB of host memory:",
        "",
        table(
            ["huge pages asked for", "pages", "first write", "register", "unregister"],
            (
                [
                    "yes" if row["huge"] else "no",
                    "there" if row["touched"] else "not there yet",
                    *(number(row[name]) for name in ("touch", "register", "unregister")),
                ]
                for row in found["registering"]
            ),
        ),
        "",
        f"torch's own pinned memory, the first time: {number(found['torch'])}.",
        "",
        f"GB/s of copies of {found['copied_mib']} MiB:",
        "",
        table(
            ["host memory", "out", "in"],
            (
                [row["memory"], f"{row['out']:.1f}", f"{row['in']:.1f}"]
                for row in found["bandwidths"]
            ),
        ),
    ]
    return "\n".join(lines) + "\n"


def measure(nbytes: int) -> Iterator[Row]:
    yield {"registering": registering(nbytes)}
    yield {"torch": torchs_own(nbytes)}
    yield {"copied_mib": 256, "bandwidths": bandwidths(256 * MIB)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="folder for the results; default: none")
    parser.add_argument("--mebibytes", type=int, default=1024, help="to register")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("pinned_memory.py: no CUDA device")
    torch.zeros(1, device="cuda")
    found = gather(measure(options.mebibytes * MIB), options.output, "pinned-memory")
    publish(found, page(found), options.output, "pinned-memory")


if __name__ == "__main__":
    main()
