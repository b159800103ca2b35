"""Measures paging: bandwidth of stash and restore, host time per tensor, pool sizes.

    python benchmarks/paging.py
    python benchmarks/paging.py --output results

Bandwidth and bytes are those of the GPU, or of the CPU if there is no GPU. The exit status is 1 if
a gradient differs from eager's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from environment import device, gather, publish, quick
from report import environment_line, table

import ebb
from ebb._testing import PagePool

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
PAGES = ebb.Policy({"aten::sin": ebb.PAGE})
SAVES = ebb.Policy({"aten::sin": ebb.SAVE})
Row = dict[str, Any]


def seconds(function: Callable[[], object]) -> float:
    """Duration of `function`. On a GPU, time on the device: a sleep kernel lets the host launch
    all kernels before the first one runs."""
    if device().type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000)
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3
    return host_seconds(function)


def host_seconds(function: Callable[[], object]) -> float:
    if device().type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def interleaved_minima(
    functions: list[Callable[[], object]],
    rounds: int,
    measure: Callable[[Callable[[], object]], float] = seconds,
) -> list[float]:
    best = [float("inf")] * len(functions)
    for _ in range(rounds):
        for i, function in enumerate(functions):
            best[i] = min(best[i], measure(function))
    return best


def bandwidth(rounds: int) -> list[Row]:
    """Bandwidth of stash and restore, in pages and in a stack, over that of plain copies."""
    sizes = (4, 64) if device().type == "cuda" else (16,)
    return [
        one_bandwidth(rounds, mebibytes, row_bytes)
        for mebibytes in sizes
        for row_bytes in (256, 1024, 4096, 16384)
    ]


def one_bandwidth(rounds: int, mebibytes: int, row_bytes: int) -> Row:
    count = mebibytes * MIB // row_bytes
    data = torch.randint(0, 256, (count, row_bytes), dtype=torch.uint8, device=device())
    target = torch.empty_like(data)
    live = torch.tensor(count, device=device())
    pages = PagePool(device(), row_bytes, 64, count // 64)
    stack = PagePool(device(), row_bytes, 1, count, stack=True)
    tickets = {pool: [pool.make_ticket(count) for _ in range(rounds)] for pool in (pages, stack)}

    def there_and_back(pool: PagePool) -> None:
        ticket = tickets[pool].pop()
        pool.stash(ticket, data, live)
        pool.restore(ticket, target)

    def copy() -> None:
        target.copy_(data)
        data.copy_(target)

    plain, paged, stacked = interleaved_minima(
        [copy, lambda: there_and_back(pages), lambda: there_and_back(stack)], rounds
    )
    return {
        "mebibytes": mebibytes,
        "row_bytes": row_bytes,
        "copy_gib_per_second": 2 * mebibytes / 1024 / plain,
        "pages_of_copy": plain / paged,
        "stack_of_copy": plain / stacked,
    }


def host_cost(rounds: int, tensors: int) -> Row:
    """Added host time of paging a small tensor instead of saving it, in forward and backward."""
    x = torch.randn(64, 16, device=device(), requires_grad=True)
    live = torch.tensor(48, device=device())

    def step(policy: ebb.Policy) -> None:
        with ebb.region(policy):
            y = ebb.experimental.mark_rows(x * 1, live)
            for _ in range(tensors):
                y = y.sin()
        y[:48].sum().backward()
        x.grad = None

    ebb.experimental.paging.reset()
    step(PAGES)  # the recorded step, which sizes the pools
    saved, paged = interleaved_minima(
        [lambda: step(SAVES), lambda: step(PAGES)], rounds, host_seconds
    )
    return {"tensors": tensors, "microseconds": (paged - saved) / tensors * 1e6}


def pool_sizes() -> list[Row]:
    """Sizes of the pools for six layers, at each capacity factor, in two pipeline schedules."""
    rows = []
    for factor in (2, 4, 8, 16):
        for order in ("forward, backward", "1F1B"):
            rows.append(one_size(factor, order))
    return rows


def one_size(factor: int, order: str) -> Row:
    most, width = 4096, 64
    generator = torch.Generator().manual_seed(factor)
    x = torch.randn(most, width, generator=generator).to(device())
    w = torch.randn(width, width, generator=generator).to(device()).div(8).requires_grad_()
    counts = torch.full((6,), most // factor, device=device())

    def forward(i: int, policy: ebb.Policy | None) -> torch.Tensor:
        if policy is None:
            y = (x * i).sin() @ w
        else:
            with ebb.region(policy, f"layers.{i}"):
                y = ebb.experimental.mark_rows(x * i, counts[i]).sin() @ w
        return y[: most // factor].square().sum()

    def gradient(policy: ebb.Policy | None) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        for i in range(6):
            losses.append(forward(i, policy))
            if order == "1F1B" and i >= 3:
                losses.pop(0).backward()
        while losses:
            losses.pop().backward()
        assert w.grad is not None
        found, w.grad = w.grad, None
        return found

    expected = gradient(None)
    ebb.experimental.paging.reset()
    same = (
        all(torch.equal(expected, gradient(PAGES)) for _ in range(3))
        and ebb.experimental.paging.step_ok()
    )
    stats = ebb.stats()["paging"]
    return {
        "capacity_factor": factor,
        "order": order,
        "padded_mib": stats["padded_bytes"] / MIB,
        "live_of_padded": stats["live_bytes"] / stats["padded_bytes"],
        "pools_of_padded": stats["pool_bytes"] / stats["padded_bytes"],
        "kind": "stack" if stats["pools"][0]["stack"] else "pages",
        "identical": same,
    }


def goals(found: Row) -> dict[str, bool]:
    gpu = device().type == "cuda"
    least = 0.85 if gpu else 0.7
    wide = [row for row in found["bandwidth"] if row["row_bytes"] >= 4096]
    at_four = [row for row in found["pool_sizes"] if row["capacity_factor"] == 4]
    return {
        f"at least {least} of a copy's bandwidth for rows of 4 KiB and more": all(
            min(row["pages_of_copy"], row["stack_of_copy"]) >= least for row in wide
        ),
        "at most 0.3 of padded bytes at capacity factor 4": all(
            row["pools_of_padded"] <= 0.3 for row in at_four
        ),
        "gradients are eager's": all(row["identical"] for row in found["pool_sizes"]),
    }


def page(found: Row) -> str:
    lines = [
        "# Paging",
        "",
        f"{environment_line(found['environment'])}. Written by `benchmarks/paging.py`.",
        "",
        "Stash and restore of a tensor against two copies of the same bytes, least times:",
        "",
        table(
            ["MiB", "bytes of a row", "copy, GiB/s", "pages", "stack"],
            (
                [
                    str(row["mebibytes"]),
                    str(row["row_bytes"]),
                    f"{row['copy_gib_per_second']:.1f}",
                    f"{row['pages_of_copy']:.2f}",
                    f"{row['stack_of_copy']:.2f}",
                ]
                for row in found["bandwidth"]
            ),
        ),
        "",
        "Host time of a tensor of 4 KiB that is paged, over one that is saved, by their number:",
        "",
        table(
            ["tensors in a region", "us each"],
            ([str(row["tensors"]), f"{row['microseconds']:.1f}"] for row in found["host_cost"]),
        ),
        "",
        "Pools of six layers, with a tenth to spare, over the padded rows that they stand for:",
        "",
        table(
            ["capacity factor", "order", "padded MiB", "live", "pools", "kind", "gradients"],
            (
                [
                    str(row["capacity_factor"]),
                    row["order"],
                    f"{row['padded_mib']:.1f}",
                    f"{row['live_of_padded']:.3f}",
                    f"{row['pools_of_padded']:.3f}",
                    row["kind"],
                    "identical" if row["identical"] else "DIFFER",
                ]
                for row in found["pool_sizes"]
            ),
        ),
        "",
        *(f"* {what}: {'yes' if met else '**no**'}" for what, met in found["goals"].items()),
    ]
    return "\n".join(lines) + "\n"


def measure(rounds: int) -> Iterator[Row]:
    yield {"bandwidth": bandwidth(rounds)}
    yield {"host_cost": [host_cost(rounds, count) for count in (100, 1_000, 10_000)]}
    yield {"pool_sizes": pool_sizes()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3 if quick() else 60)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    output = None if quick() else options.output
    found = gather(measure(options.rounds), output, "paging")
    found["goals"] = goals(found)
    publish(found, page(found), output, "paging")
    return 0 if found["goals"]["gradients are eager's"] else 1


if __name__ == "__main__":
    sys.exit(main())
