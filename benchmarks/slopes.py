"""The cost of one op, one saved tensor and one region: slopes of times over their number.

Two chains of n ops on eight elements: `neg`, for which autograd saves nothing, and `sin`, which
saves its input. Each phase is timed for several n, all systems and all n in turns, and a line is
fitted to the minima. A cost per op is a system's slope minus eager's:

* recording: the forward of the `neg` chain, with gradients and without (`requires_grad` False);
* pack: the additional cost of the `sin` chain's forward over that of the `neg` chain;
* replay: unpacks one tensor at the chain's end, which recomputes n ops. Eager's slope is that of
  its forward;
* unpack: the additional cost of the `sin` chain's backward, minus its replays and minus the
  additional cost of the `neg` chain's backward;
* release: frees the result of the `neg` chain, and with it the graph and the recipes.

The cost of a region's entry and exit is the slope over the number of empty regions (for other
tools: calls).

On a GPU these are host times; the device is idle at first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from analysis import Line, fit_line
from systems import EAGER, EVERYTHING_SAVED, System
from timing import Trial, interleaved
from torch import Tensor
from workloads import Block

LENGTHS = (40, 80, 160, 320, 640)
REGIONS = (8, 16, 32, 64)

Lines = dict[tuple[str, str, str], Line]  # by system, chain and phase


def negatives(length: int) -> Block:
    def block(h: Tensor) -> Tensor:
        for _ in range(length):
            h = h.neg()
        return h.sin()  # one saved tensor, to unpack

    return block


def sines(length: int) -> Block:
    def block(h: Tensor) -> Tensor:
        for _ in range(length):
            h = h.sin()
        return h

    return block


CHAINS = {"neg": negatives, "sin": sines}


def saved_by_last_sine(output: Tensor) -> Callable[[], Tensor] | None:
    """A function that unpacks the tensor saved by the chain's last `sin`; None if not found."""
    node: Any = output.grad_fn
    while node is not None and not hasattr(type(node), "_saved_self"):
        node = node.next_functions[0][0] if node.next_functions else None
    return None if node is None else lambda: node._saved_self


def seconds_now(x: Tensor) -> float:
    """Waits for the device, then reads the clock."""
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def forward_and_unpack(system: System, block: Block, x: Tensor) -> Trial:
    def trial() -> dict[str, float]:
        start = seconds_now(x)
        output = system.run(block, x)
        phases = {"forward": time.perf_counter() - start}
        unpack = saved_by_last_sine(output)
        if unpack is not None:
            start = seconds_now(x)
            unpack()
            phases["replay"] = time.perf_counter() - start
        return phases

    return trial


def backward_or_release(system: System, block: Block, x: Tensor, backward: bool) -> Trial:
    gradient = torch.ones_like(x)

    def trial() -> dict[str, float]:
        x.grad = None
        output = system.run(block, x)
        start = seconds_now(x)
        if backward:
            output.backward(gradient)  # type: ignore[no-untyped-call]
            return {"backward": time.perf_counter() - start}
        del output
        return {"release": time.perf_counter() - start}

    return trial


def empty_regions(system: System, count: int, x: Tensor) -> Trial:
    def nothing(x: Tensor) -> Tensor:
        return x

    def trial() -> dict[str, float]:
        start = seconds_now(x)
        for _ in range(count):
            system.run(nothing, x)
        return {"region": time.perf_counter() - start}

    return trial


def fit(times: Any) -> Lines:
    """Lines through the minima of each (system, chain) over the number of ops, in microseconds."""
    points: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
    for (system, chain, _, length), phases in times.items():
        for phase, seconds in phases.items():
            point = (length, seconds.least * 1e6)
            points.setdefault((system, chain, phase), []).append(point)
    return {key: fit_line(*zip(*found, strict=True)) for key, found in points.items()}


def measure_lines(
    systems: Sequence[System], device: torch.device, seconds: float, rounds: int
) -> Lines:
    x = torch.randn(8, device=device, requires_grad=True)
    plain = torch.randn(8, device=device)
    trials: dict[tuple[str, str, str, int], Trial] = {}
    for s in systems:
        for length in LENGTHS:
            for name, chain in CHAINS.items():
                block = chain(length)
                trials[s.name, name, "forward", length] = forward_and_unpack(s, block, x)
                trials[s.name, name, "backward", length] = backward_or_release(s, block, x, True)
            block = negatives(length)
            trials[s.name, "neg", "release", length] = backward_or_release(s, block, x, False)
            trials[s.name, "neg, no gradient", "forward", length] = forward_and_unpack(
                s, block, plain
            )
        for count in REGIONS:
            trials[s.name, "empty", "region", count] = empty_regions(s, count, x)
    return fit(interleaved(trials, seconds, rounds))


def slopes_of(system: System, lines: Lines) -> dict[str, Any]:
    """The costs that the module's docstring defines, in microseconds; None if not defined."""
    eager = EAGER.name

    def slope(name: str, chain: str, phase: str) -> float:
        return lines[name, chain, phase].slope

    def added(chain: str, phase: str) -> float:
        return slope(system.name, chain, phase) - slope(eager, chain, phase)

    recording = added("neg", "forward")
    pack = added("sin", "forward") - recording
    replay = unpack = None
    if (system.name, "neg", "replay") in lines:
        # Each backward replays its chain once. Without replays both slopes are zero.
        replay = slope(system.name, "neg", "replay")
        unpack = added("sin", "backward") - slope(system.name, "sin", "replay")
        unpack -= added("neg", "backward") - replay
        replay -= slope(eager, "neg", "forward")
    if system.family == EVERYTHING_SAVED:
        replay = None
    return {
        "recording": recording,
        "recording_without_gradient": added("neg, no gradient", "forward"),
        "pack": pack,
        "unpack": unpack,
        "replay": replay,
        "release": added("neg", "release"),
        "region": added("empty", "region"),
    }


def measure_slopes(
    systems: Sequence[System], device: torch.device, seconds: float, rounds: int
) -> list[dict[str, Any]]:
    """One row for each system but eager; eager's own slopes are in a row of their own."""
    lines = measure_lines(systems, device, seconds, rounds)
    rows: list[dict[str, Any]] = []
    for system in systems:
        found = {f"{c}: {p}": line for (s, c, p), line in lines.items() if s == system.name}
        rows.append(
            {
                "system": system.name,
                **({} if system is EAGER else slopes_of(system, lines)),
                "slopes": {name: line.slope for name, line in found.items()},
                "residual": max(line.residual for line in found.values()),
                "residuals": {name: line.residual for name, line in found.items()},
            }
        )
    return rows
