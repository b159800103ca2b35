"""Measures the cost of offloading and of placeholders.

    python benchmarks/offload.py
    python benchmarks/offload.py --output results

Measures the engine's own host time per tensor, the restoring of discarded tensors, and the disk
tier. No GPU is needed; offload_on_gpu.py has the measurements on a GPU. The exit status is 1 if a
gradient differs from eager's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from environment import environment, publish, quick
from report import environment_line
from timing import interleaved
from torch.profiler import ProfilerActivity, profile, record_function

import ebb

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))
from ebb_tests.stand_ins import instant_accelerator  # noqa: E402

MIB = 1 << 20
HELD = 24 * MIB  # bytes of each discarded output
RESTORE = "ebb.benchmark.restore"
Row = dict[str, Any]


def chain(x: torch.Tensor, length: int) -> torch.Tensor:
    for _ in range(length):
        x = x.sin()
    return x


def check(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if not torch.equal(found, expected):
        sys.exit(f"{what}: other gradients than eager")


def host_time(lengths: list[int], seconds: float) -> list[Row]:
    """Times chains of ops on 64 bytes: eager, with results saved, and with results offloaded.

    A fake accelerator completes each copy at once. The limits allow as many 64-byte tensors as the
    default limits allow 1-MiB tensors.
    """
    x = torch.randn(16, requires_grad=True)
    rows = []
    limits = {"prefetch_bytes": 512 * 64, "in_flight_bytes": 1024 * 64}
    with instant_accelerator(**limits) as accelerator:
        for length in lengths:
            check_chain(x, length)
            trials: dict[str, Callable[[], dict[str, float]]] = {
                name: timed(partial(step, x, length, policy))
                for name, policy in {
                    "eager": None,
                    "saved": ebb.policies.save_all,
                    "offloaded": ebb.Policy(default=ebb.OFFLOAD),
                }.items()
            }
            trials["copies"] = timed(partial(accelerator.transfer_only, length, 64))
            trials["engine"] = timed(partial(accelerator.send_and_fetch, length, 64))
            found = interleaved(trials, seconds)
            microseconds = {k: 1e6 * v["all"].least / length for k, v in found.items()}
            added = microseconds["offloaded"] - microseconds["saved"] - microseconds["copies"]
            rows.append({"tensors": length, **microseconds, "added": added})
            rows[-1]["engine"] -= microseconds["copies"]
    return rows


def step(x: torch.Tensor, length: int, policy: ebb.Policy | None) -> torch.Tensor:
    if policy is None:
        y = chain(x, length)
    else:
        with ebb.region(policy):
            y = chain(x, length)
    return torch.autograd.grad(y.sum(), x)[0]


def check_chain(x: torch.Tensor, length: int) -> None:
    check(step(x, length, ebb.Policy(default=ebb.OFFLOAD)), step(x, length, None), "offloaded")


def timed(function: Callable[[], object]) -> Callable[[], dict[str, float]]:
    def trial() -> dict[str, float]:
        start = time.perf_counter()
        function()
        return {"all": time.perf_counter() - start}

    return trial


def restoring(counts: list[int], nbytes: int) -> list[Row]:
    """Discards outputs after they were read, as Megatron-LM does, and restores them in backward.

    Returns:
        For each count: ``peak``, the peak of the bytes allocated while ebb restores the outputs, as
        a multiple of the outputs' bytes; ``copies``, the number of copies meanwhile.
    """
    rows = []
    for count in counts:
        inputs = [torch.randn(nbytes // 4, requires_grad=True) for _ in range(count)]
        rows.append({"outputs": count, "bytes": count * nbytes, **restore(inputs)})
    return rows


def restore(inputs: list[torch.Tensor]) -> Row:
    with ebb.region():
        outputs = [ebb.experimental.discardable(x.tanh()) for x in inputs]
    total = torch.stack([(y * y).sum() for y in outputs]).sum()
    for y in outputs:
        ebb.experimental.discard(y, restore_at=total)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        # Restores run before this hook is called. The rest of backward is not measured.
        marks: list[Any] = [record_function(RESTORE)]
        handle = total.register_hook(lambda _: marks[0].__exit__(None, None, None))
        marks[0].__enter__()
        found = torch.autograd.grad(total, inputs)
        handle.remove()
    expected = torch.autograd.grad(
        torch.stack([(y * y).sum() for y in map(torch.tanh, inputs)]).sum(), inputs
    )
    for f, e in zip(found, expected, strict=True):
        check(f, e, "restored")
    assert profiler.profiler is not None
    return within_restore(profiler, sum(x.nbytes for x in inputs))


def within_restore(profiler: Any, nbytes: int) -> Row:
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    (mark,) = (e for e in events if e.name() == RESTORE)
    inside = [e for e in events if mark.start_ns() <= e.start_ns() <= mark.end_ns()]
    now = peak = 0
    for event in inside:
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    copies = sum(event.name() in ("aten::copy_", "aten::clone") for event in inside)
    return {"peak": peak / nbytes, "copies": copies}


def ten_steps() -> None:
    """Checks that ten steps give eager's parameters if each block's first half is discarded."""

    def train(discards: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        up = [torch.nn.Linear(64, 256) for _ in range(4)]
        down = [torch.nn.Linear(256, 64) for _ in range(4)]
        parameters = [p for layer in up + down for p in layer.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        for _ in range(10):
            h = torch.randn(32, 64)
            for first, second in zip(up, down, strict=True):
                if discards:
                    y = ebb.checkpoint(
                        lambda t, f=first: torch.nn.functional.gelu(f(t)), h, discard_output=True
                    )
                    z = second(y)
                    ebb.experimental.discard(y, restore_at=z)
                else:
                    z = second(torch.nn.functional.gelu(first(h)))
                h = h + z
            h.square().mean().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        return parameters

    for found, expected in zip(train(True), train(False), strict=True):
        check(found, expected, "ten steps with discarded outputs")


DISK = """
import sys, time, torch, ebb
torch.set_num_threads(1)
folder, length, elements = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if folder:
    ebb.config.update(
        offload_disk=folder, offload_in_flight_bytes="64MiB", offload_prefetch_bytes="64MiB"
    )
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
x = torch.randn(elements, requires_grad=True)

start, least, held = resident(), float("inf"), 0
for _ in range(4):
    began = time.perf_counter()
    with ebb.region(ebb.Policy(default=ebb.OFFLOAD if folder else ebb.SAVE)):
        y = x
        for _ in range(length):
            y = torch.erf(y)
    held = max(held, resident() - start)
    y.sum().backward()
    least = min(least, time.perf_counter() - began)
    x.grad = None
print(held, least)
"""


def disk(length: int, elements: int) -> Row:
    """Measures a chain on the CPU with and without the disk tier, each in its own process."""
    found: Row = {"bytes": 4 * length * elements}
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        for name, argument in (("in memory", ""), ("on disk", folder)):
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", DISK, argument, str(length), str(elements)],
                capture_output=True,
                text=True,
                check=True,
            )
            held, seconds = done.stdout.split()
            found[name] = {"resident": int(held), "seconds": float(seconds)}
    return found


def markdown(results: Row) -> str:
    lines = [
        "# Offloading and placeholders",
        "",
        f"{environment_line(results['environment'])}. Written by `benchmarks/offload.py`.",
        "",
    ]
    lines += [
        "## The engine's own host time",
        "",
        "Chains of ops on 64 bytes; microseconds per op, forward and backward. Copies are done at "
        "once by a fake accelerator with a caching allocator; *added* is what offloading costs "
        "beyond saving and those copies; goal: at most 2. *Engine* is what its pool and queues "
        "take of that, measured without autograd; goal: the same for any number of tensors.",
        "",
        "| tensors | eager | saved | offloaded | copies | added | engine |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in results["host"]:
        columns = ("eager", "saved", "offloaded", "copies", "added", "engine")
        numbers = " | ".join(f"{row[column]:.2f}" for column in columns)
        lines.append(f"| {row['tensors']:,} | {numbers} |")
    lines += [
        "",
        "## Restoring discarded outputs",
        "",
        "Outputs that `ebb.experimental.discard` gave up come back in backward. "
        "Peak: bytes allocated at most "
        "meanwhile, as a multiple of what the outputs hold; goal: 1 x, and no copy. Ten training "
        "steps gave eager's parameters, bit for bit.",
        "",
        "| outputs | MiB in all | peak | copies |",
        "|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row['outputs']} | {row['bytes'] / MIB:.0f} | {row['peak']:.2f} x | {row['copies']} |"
        for row in results["restoring"]
    ]
    tier = results["disk"]
    memory, onto = tier["in memory"], tier["on disk"]
    lines += [
        "",
        "## The disk tier on the CPU",
        "",
        f"A chain of ops that saves {tier['bytes'] / MIB:.0f} MiB, each run in a process of its "
        "own. Resident: memory of the process between forward and backward, beyond what it had.",
        "",
        "| | resident, MiB | step, s |",
        "|:--|--:|--:|",
        f"| in memory | {memory['resident'] / MIB:.0f} | {memory['seconds']:.2f} |",
        f"| on disk | {onto['resident'] / MIB:.0f} | {onto['seconds']:.2f} |",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, help="folder for the results; default: benchmarks/results"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    lengths = [10, 100] if quick() else [10, 100, 1_000, 10_000, 100_000]
    results: Row = {"environment": environment()}
    results["host"] = host_time(lengths, 0 if quick() else 10)
    results["restoring"] = restoring([1, 2, 4], MIB if quick() else HELD)
    ten_steps()
    results["disk"] = disk(*((4, MIB) if quick() else (40, 4 * MIB)))
    folder = options.output or (None if quick() else ROOT / "benchmarks" / "results")
    publish(results, markdown(results), folder, "offload")


if __name__ == "__main__":
    main()
