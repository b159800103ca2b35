"""Measures policies in eager mode and in compiled graphs.

The model is a stack of transformer layers, each a region. The script prints step time, bytes held
for backward and peak, in eager mode and with two backends of torch.compile, and compares gradients
with those of the same program without ebb:

    OMP_NUM_THREADS=1 python benchmarks/compiled.py
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
from frameworks import stack
from held_bytes import held_and_peak_of
from report import table
from timing import interleaved, steady_memory
from torch import Tensor

import ebb

BACKENDS = (None, "aot_eager", "inductor")  # None: eager mode
POLICIES = ("", "save_all", "save_matmuls", "recompute_all")  # "": without ebb


class Way:
    """The stack with a policy under a backend."""

    def __init__(self, backend: str | None, policy: str) -> None:
        torch._dynamo.reset()
        torch.manual_seed(1)
        self.layers, _ = stack(lambda layer: layer)
        self.x = torch.randn(4, 128, 256, requires_grad=True)
        if policy:
            ebb.apply(self.layers, getattr(ebb.policies, policy), "*")
        forward: Callable[[Tensor], Tensor] = torch.nn.Sequential(*self.layers)
        self.forward = torch.compile(forward, backend=backend) if backend else forward
        self.step()

    def loss(self) -> Tensor:
        return self.forward(self.x).square().mean()

    def step(self) -> dict[str, float]:
        start = time.perf_counter()
        self.loss().backward()  # type: ignore[no-untyped-call]
        return {"step": time.perf_counter() - start}

    def bits(self) -> list[Tensor]:
        self.layers.zero_grad()
        self.step()
        return [p.grad.clone() for p in self.layers.parameters() if p.grad is not None]


def main() -> None:
    torch.set_num_threads(1)
    seconds = float(os.environ.get("EBB_BENCH_SECONDS", "10"))
    rows = []
    for backend in BACKENDS:
        ways = {policy: Way(backend, policy) for policy in POLICIES}
        expected = ways[""].bits()
        with steady_memory():
            times = interleaved({policy: way.step for policy, way in ways.items()}, seconds)
        for policy, way in ways.items():
            found = held_and_peak_of(way.loss)
            ratio = times[policy]["step"].least / times[""]["step"].least
            held, peak = (found[f"{what}_bytes"] / 2**20 for what in ("held", "peak"))
            same = "yes" if all(map(torch.equal, way.bits(), expected)) else "no"
            named = [backend or "eager", policy or "without ebb"]
            rows.append([*named, f"{ratio:.2f}", f"{held:.1f}", f"{peak:.1f}", same])
    print(table(["", "", "time", "held MiB", "peak MiB", "identical"], rows))


if __name__ == "__main__":
    main()
