"""Measures steps in CUDA graphs: eager, recomputed, offloaded and paged.

    python benchmarks/captures.py --output results

Each system's step runs without a graph and then as the launch of a captured graph. The exit status
is 1 if a system gives other gradients than eager.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from environment import environment, keep, publish
from report import environment_line, table
from torch import Tensor
from torch.nn.functional import gelu, layer_norm

import ebb

Row = dict[str, Any]
Region = Callable[[], AbstractContextManager[object]]

SYSTEMS: dict[str, Region] = {
    "eager": torch.enable_grad,
    "ebb recompute_all": lambda: ebb.region(ebb.policies.recompute_all),
    "ebb save_all": lambda: ebb.region(ebb.policies.save_all),
    "ebb offload, static": lambda: ebb.region(ebb.Policy(default=ebb.OFFLOAD, inputs=ebb.OFFLOAD)),
    "ebb page": lambda: ebb.region(ebb.Policy(default=ebb.PAGE, inputs=ebb.PAGE)),
}


class Model:
    """Layers on padded rows. The number of valid rows is a tensor on the device."""

    def __init__(self, rows: int, width: int, layers: int) -> None:
        self.rows, self.width = rows, width
        self.weights = [
            torch.randn(width, width, device="cuda").div_(width**0.5).requires_grad_()
            for _ in range(layers)
        ]
        self.x = torch.randn(rows, width, device="cuda")
        self.count = torch.tensor(rows // 2, device="cuda")

    def gradients(self, region: Region, marks: bool) -> tuple[Tensor, ...]:
        lives = (torch.arange(self.rows, device="cuda") < self.count).unsqueeze(1)
        h = torch.where(lives, self.x, 0)
        for w in self.weights:
            with region():
                h = h * 1.5
                if marks:
                    h = ebb.experimental.mark_rows(h, self.count)
                h = layer_norm(gelu(h @ w), (self.width,))
        return torch.autograd.grad(torch.where(lives, h, 0).sin().sum(), self.weights)


def milliseconds(work: Callable[[], object], rounds: int) -> float:
    """The shortest time of `work` in ms, synchronised before and after."""
    least = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        least = min(least, time.perf_counter() - begin)
    return least * 1e3


def captured(work: Callable[[], tuple[Tensor, ...]]) -> tuple[Row, Callable[[], None], Any]:
    """Captures `work`: time and memory of the capture, a function that launches it, the results."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.memory_reserved()
    begin = time.perf_counter()
    with torch.cuda.graph(graph):
        results = work()
    took = time.perf_counter() - begin
    held = torch.cuda.memory_reserved() - before
    return {"capture_ms": took * 1e3, "graph_mib": held / (1 << 20)}, graph.replay, results


def one_system(model: Model, name: str, rounds: int, expected: list[Tensor]) -> Row:
    """Measures one system. The first, eager, fills `expected` with its gradients."""

    def work() -> tuple[Tensor, ...]:
        return model.gradients(SYSTEMS[name], marks=name == "ebb page")

    row: Row = {"system": name}
    found, replay, results = captured(work)
    row |= found
    row["eager_ms"] = milliseconds(work, rounds)
    row["replay_ms"] = milliseconds(replay, rounds)
    replay()
    expected += [] if expected else [result.clone() for result in results]
    row["identical"] = all(map(torch.equal, results, expected))
    return row


def measure(rows: int, width: int, layers: int, rounds: int) -> list[Row]:
    torch.manual_seed(0)
    model = Model(rows, width, layers)
    expected: list[Tensor] = []
    found = []
    for name in SYSTEMS:
        ebb.experimental.paging.reset()
        torch.cuda.empty_cache()
        try:
            found.append(one_system(model, name, rounds, expected))
        except RuntimeError as error:  # measure the other systems, too
            found.append({"system": name, "error": str(error).splitlines()[0]})
    return found


def page(found: Row) -> str:
    lines = [
        "# CUDA graphs",
        "",
        f"{environment_line(found['environment'])}. Written by `benchmarks/captures.py`.",
        "",
        "A forward and backward, as a step of its own and as a replay of a graph, in ms; capturing "
        "it once, in ms; and what the graph's memory pool holds.",
    ]
    for size, rows in found["models"].items():
        plain = next(row for row in rows if row["system"] == "eager")
        lines += [
            "",
            f"## {size}",
            "",
            table(
                ["system", "step", "replay", "over eager's replay", "capture", "MiB", "gradients"],
                (line(row, plain) for row in rows),
            ),
        ]
    return "\n".join(lines) + "\n"


def line(row: Row, plain: Row) -> list[str]:
    if "error" in row:
        return [row["system"], *["-"] * 5, row["error"].replace("|", "\\|")]
    ratio = row["replay_ms"] / plain["replay_ms"] if "replay_ms" in plain else float("nan")
    return [
        row["system"],
        f"{row['eager_ms']:.2f}",
        f"{row['replay_ms']:.2f}",
        f"{ratio:.3f}",
        f"{row['capture_ms']:.0f}",
        f"{row['graph_mib']:.0f}",
        "identical" if row["identical"] else "DIFFER",
    ]


SIZES = {
    "8 layers, 1024 rows of 256": (1024, 256, 8),
    "8 layers, 8192 rows of 2048": (8192, 2048, 8),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="folder for the results; default: none")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("captures.py: no CUDA device")
    ebb.config.offload.min_bytes = 0
    models: Row = {}
    found: Row = {"environment": environment(), "models": models}
    for name, size in SIZES.items():
        models[name] = measure(*size, options.rounds)
        keep(found, options.output, "captures")
    publish(found, page(found), options.output, "captures")
    rows = [row for rows in models.values() for row in rows]
    return 0 if all(row.get("identical") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
