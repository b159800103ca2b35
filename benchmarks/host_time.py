"""Step time of every system as a ratio to eager: one process, one thread, interleaved minima."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from measure import environment, interleaved_minima, quick, write_results
from systems import systems
from workloads import LlamaBlock, PreNormBlock

Workload = tuple[list[torch.nn.Module], tuple[torch.Tensor, ...]]


def llama() -> Workload:
    torch.manual_seed(0)
    inputs = torch.randn(1, 4, 16, requires_grad=True), torch.randn(4, 8), torch.randn(4, 8)
    return [LlamaBlock(16, heads=2, hidden=32)], inputs


def pre_norm(width: int) -> Callable[[], Workload]:
    def make() -> Workload:
        torch.manual_seed(0)
        blocks: list[torch.nn.Module] = [PreNormBlock(width) for _ in range(4)]
        return blocks, (torch.randn(2, 96, width, requires_grad=True),)

    return make


WORKLOADS = {
    "Llama block, tiny": (llama, 400),
    "4 pre-LN blocks, width 64": (pre_norm(64), 100),
    "4 pre-LN blocks, width 512": (pre_norm(512), 12),
}


def gradients(blocks: list[torch.nn.Module], inputs: tuple[torch.Tensor, ...]) -> list[Any]:
    tensors = [inputs[0], *(p for block in blocks for p in block.parameters())]
    found = [t.grad for t in tensors]
    for t in tensors:
        t.grad = None
    return found


def main() -> None:
    torch.set_num_threads(1)
    print(environment())
    rows = []
    for name, (make, rounds) in WORKLOADS.items():
        blocks, inputs = make()
        first, *others = inputs

        def step(run, blocks=blocks, first=first, others=tuple(others)):  # type: ignore[no-untyped-def]
            h = first
            for block in blocks:
                h = run(block, h, *others)
            h.square().mean().backward()

        expected = None
        for system, run in systems().items():
            gradients(blocks, inputs)
            step(run)
            found = gradients(blocks, inputs)
            expected = expected or found
            if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
                raise SystemExit(f"{system} gives other gradients than eager on {name}")
        best = interleaved_minima(
            {system: lambda run=run: step(run) for system, run in systems().items()},  # type: ignore[misc]
            rounds=5 if quick() else rounds,
        )
        print(f"\n{name}: eager {best['eager'] * 1e6:.0f} us")
        for system, seconds in best.items():
            ratio = seconds / best["eager"]
            print(f"  {system:30s} {ratio:6.3f}")
            rows.append({"workload": name, "system": system, "ratio": ratio, "seconds": seconds})
    if not quick():
        print(f"\nwritten to {write_results('host-time', rows)}")


if __name__ == "__main__":
    main()
