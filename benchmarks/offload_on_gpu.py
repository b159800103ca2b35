"""Measures offloading on a GPU: bandwidths, step time, freed memory.

    python benchmarks/offload_on_gpu.py --output results

The exit status is 1 if gradients differ from eager's. offload.py has the part that needs no GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from environment import gather, publish, quick
from report import environment_line, table

import ebb

MIB = 1 << 20


def seconds(work: Callable[[], object], repeats: int = 20) -> float:
    """The shortest duration of `work` on the GPU, measured with events."""
    least = float("inf")
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        least = min(least, start.elapsed_time(end) / 1e3)
    return least


def raw_bandwidths(nbytes: int) -> dict[str, float]:
    """GB/s of copies between pinned memory and the device: each direction, and both at once."""
    host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    gpu = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    side = torch.cuda.Stream()

    def both() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            gpu[1].copy_(host[1], non_blocking=True)
        host[0].copy_(gpu[0], non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)

    return {
        "out": nbytes / 1e9 / seconds(lambda: host[0].copy_(gpu[0], non_blocking=True)),
        "in": nbytes / 1e9 / seconds(lambda: gpu[0].copy_(host[0], non_blocking=True)),
        "both": 2 * nbytes / 1e9 / seconds(both),
    }


def until_idle(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds until the GPU has finished `work` and all copies; and the result of `work`."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = work()
    torch.cuda.synchronize()
    return time.perf_counter() - start, result


def engine_bandwidths(nbytes: int, count: int = 32) -> dict[str, float]:
    """GB/s of the offload engine's copies in steps that compute little besides copying.

    Forward offloads `count` tensors ("out"), backward fetches them ("in"). "both": the backward of
    one graph and the forward of the next.
    """
    ebb.config.update(
        offload_min_bytes=0, offload_in_flight_bytes="16GiB", offload_prefetch_bytes="16GiB"
    )
    x = torch.randn(nbytes // 4, device="cuda", requires_grad=True)
    policy = ebb.Policy({"aten::mul": ebb.OFFLOAD})

    def forward() -> torch.Tensor:
        with ebb.region(policy):
            return torch.stack([(x * k).sin().sum() for k in range(count)]).sum()

    def backward_and_forward(loss: torch.Tensor) -> torch.Tensor:
        torch.autograd.grad(loss, x)
        return forward()

    least = dict.fromkeys(("out", "in", "both"), float("inf"))
    for _ in range(6):  # the first rounds allocate memory
        out, loss = until_idle(forward)
        both, loss = until_idle(lambda loss=loss: backward_and_forward(loss))
        back, _ = until_idle(lambda loss=loss: torch.autograd.grad(loss, x))
        for name, duration in (("out", out), ("both", both), ("in", back)):
            least[name] = min(least[name], duration)
    total = count * nbytes / 1e9
    return {
        "out": total / least["out"],
        "in": total / least["in"],
        "both": 2 * total / least["both"],
    }


def offloaded_inputs(width: int, tokens: int, layers: int) -> dict[str, Any]:
    """Compares `offload_inputs` with `recompute_all` on a stack of blocks."""
    ebb.config.update(
        offload_min_bytes="1MiB", offload_in_flight_bytes="1GiB", offload_prefetch_bytes="512MiB"
    )
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    blocks = torch.nn.ModuleList(
        torch.nn.Sequential(
            torch.nn.LayerNorm(width, **options),
            torch.nn.Linear(width, 2 * width, **options),
            torch.nn.GELU(),
            torch.nn.Linear(2 * width, width, **options),
        )
        for _ in range(layers)
    )
    x = torch.randn(tokens, width, **options, requires_grad=True)

    def forward(policy: ebb.Policy) -> torch.Tensor:
        h = x * 1  # not x itself, which stays in memory
        for block in blocks:
            with ebb.region(policy):
                h = h + block(h)
        return h.float().square().mean()

    def run(policy: ebb.Policy) -> None:
        forward(policy).backward()  # type: ignore[no-untyped-call]

    def held(policy: ebb.Policy) -> int:
        torch.cuda.synchronize()
        ebb.stats()["offload"]
        ebb.reset_stats()
        before = torch.cuda.memory_allocated()
        loss = forward(policy)
        torch.cuda.synchronize()
        ebb.stats()["offload"]  # reading the statistics frees the memory of finished copies
        found = torch.cuda.memory_allocated() - before
        loss.backward()  # type: ignore[no-untyped-call]
        return found

    policies = {
        "recompute_all": ebb.policies.recompute_all,
        "offload_inputs": ebb.policies.offload_inputs,
    }
    found: dict[str, Any] = {}
    gradients = []
    waits_before = ebb.stats()["offload"]["host_waits"]
    for name, policy in policies.items():
        blocks.zero_grad()
        x.grad = None
        run(policy)
        gradients.append([x.grad, *(p.grad for p in blocks.parameters())])
        found[name] = {"seconds": seconds(lambda p=policy: run(p), 10), "held": held(policy)}
    if not all(map(torch.equal, *gradients)):
        sys.exit("offload_inputs: other gradients than recompute_all")
    recorded = ebb.stats()["total"]["bytes_offloaded"]  # by the forward in held()
    freed = found["recompute_all"]["held"] - found["offload_inputs"]["held"]
    waits = ebb.stats()["offload"]["host_waits"] - waits_before
    return found | {"recorded": recorded, "freed": freed, "host_waits": waits}


def measure() -> Iterator[dict[str, Any]]:
    mebibytes = (4,) if quick() else (4, 64)
    yield {"raw": {str(size): raw_bandwidths(size * MIB) for size in mebibytes}}
    yield {"engine": {str(size): engine_bandwidths(size * MIB) for size in mebibytes}}
    yield {"inputs": offloaded_inputs(*(64, 64, 2) if quick() else (8192, 16384, 8))}


def page(found: dict[str, Any]) -> str:
    rows = []
    for size, raw in found["raw"].items():
        ours = found["engine"][size]
        row = [size]
        for direction in ("out", "in", "both"):
            row += [f"{raw[direction]:.1f}", f"{ours[direction] / raw[direction]:.2f}"]
        rows.append(row)
    inputs = found["inputs"]
    ratio = inputs["offload_inputs"]["seconds"] / inputs["recompute_all"]["seconds"]
    lines = [
        "# Offloading on a GPU",
        "",
        f"{environment_line(found['environment'])}. Written by `benchmarks/offload_on_gpu.py`.",
        "",
        "Copies between the device and torch's pinned memory, GB/s, and what the engine's copies "
        "of tensors of that size have of it (goal: 0.90).",
        "",
        table(["MiB", "out", "engine", "in", "engine", "both ways", "engine"], rows),
        "",
        "Blocks whose inputs are offloaded and all else recomputed, against recomputing all:",
        "",
        f"* time of a step: {ratio:.3f} (goal: 1.03)",
        f"* freed, of the bytes recorded as offloaded: "
        f"{inputs['freed'] / max(inputs['recorded'], 1):.1%} (goal: 95 %)",
        f"* times that the host waited for a copy, in all steps: {inputs['host_waits']}",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="folder for the results; default: none")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("offload_on_gpu.py: no CUDA device")
    found = gather(measure(), options.output, "offload-on-gpu")
    publish(found, page(found), options.output, "offload-on-gpu")


if __name__ == "__main__":
    main()
