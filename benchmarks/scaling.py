"""How the cost per op and the memory per op depend on the number of ops and of regions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from host_memory import bytes_held_by
from slopes import negatives
from steps import check_exactness
from systems import EAGER, System
from timing import Trial, interleaved, time_step
from workloads import Workload, blocks_in_turn, chain_of_elementwise

OPS_PER_REGION = (10, 100, 1_000, 10_000, 100_000)
REGIONS = (1, 2, 4, 8, 16, 32, 64)
OPS_PER_REGION_OF_MANY = 100

Row = dict[str, Any]


def chain(regions: int, operations: int) -> Workload:
    x = torch.randn(8, requires_grad=True)
    # Without gradient, since reentrant AC sums a shared weight's gradient in another order.
    scale = torch.randn(8)
    block = chain_of_elementwise(operations)
    return blocks_in_turn(f"{regions} x {operations} ops", [block] * regions, x, scale)


def time_chain(
    systems: Sequence[System],
    region_cost: dict[str, float],
    regions: int,
    operations: int,
    seconds: float,
) -> list[Row]:
    """One row for each system: a step's time per op, and the part that the system adds to eager.

    Args:
        region_cost: for each system, microseconds to enter and leave a region. The added time per
            op does not include them.
    """
    torch.manual_seed(0)
    workload = chain(regions, operations)
    check_exactness(workload, systems)
    cpu = torch.device("cpu")
    steps = max(1, 1_000 // (regions * operations))  # short steps are timed several at once

    def trial(system: System) -> Trial:
        def run_steps() -> None:
            for _ in range(steps):
                workload.step(system.run)

        def run() -> dict[str, float]:
            workload.clear_gradients()
            return time_step(run_steps, cpu)

        return run

    times = interleaved({s.name: trial(s) for s in systems}, seconds, rounds=4)
    rows = []
    for system in systems:
        total = times[system.name]["step"].least * 1e6 / steps
        eager = times[EAGER.name]["step"].least * 1e6 / steps
        added = total - eager
        added -= region_cost.get(system.name, 0.0) * regions
        rows.append(
            {
                "system": system.name,
                "regions": regions,
                "ops_per_region": operations,
                "us_per_op": total / (regions * operations),
                "added_us_per_op": added / (regions * operations),
                "ratio": total / eager,
            }
        )
    return rows


def add_marginal_cost(rows: Sequence[Row]) -> None:
    """Adds to each row the cost of one more op: the slope from the previous row of its system.

    The slope does not include the fixed cost of a step.
    """
    before: dict[str, tuple[int, float]] = {}
    for row in rows:
        operations = row["regions"] * row["ops_per_region"]
        added = row["added_us_per_op"] * operations
        fewer, less = before.get(row["system"], (0, 0.0))
        row["added_us_per_further_op"] = (
            (added - less) / (operations - fewer) if row["system"] in before else None
        )
        before[row["system"]] = operations, added


def unevenness(rows: Sequence[Row], system: str, column: str) -> float:
    """The largest over the smallest value of a column among one system's rows."""
    found = [row[column] for row in rows if row["system"] == system]
    values = [value for value in found if value is not None]
    return max(values) / min(values) if min(values) > 0 else float("inf")


def measure_scaling(
    systems: Sequence[System],
    region_cost: dict[str, float],
    seconds: float,
    largest: int,
    most_regions: int,
) -> dict[str, Any]:
    """Measures chains in one region, and many regions; and how constant the cost per op is."""
    series: dict[str, list[Row]] = {"ops_per_region": [], "regions": []}
    for operations in OPS_PER_REGION:
        if operations <= largest:
            series["ops_per_region"] += time_chain(systems, region_cost, 1, operations, seconds)
    for regions in (count for count in REGIONS if count <= most_regions):
        series["regions"] += time_chain(
            systems, region_cost, regions, OPS_PER_REGION_OF_MANY, seconds
        )
    for rows in series.values():
        add_marginal_cost(rows)
    uneven = [
        {
            "series": name,
            "system": system.name,
            "us_per_op": unevenness(rows, system.name, "us_per_op"),
            "added_us_per_op": (
                None if system is EAGER else unevenness(rows, system.name, "added_us_per_op")
            ),
            "added_us_per_further_op": (
                None
                if system is EAGER
                else unevenness(rows, system.name, "added_us_per_further_op")
            ),
            "ratio": unevenness(rows, system.name, "ratio"),
        }
        for name, rows in series.items()
        for system in systems
    ]
    return {**series, "unevenness": uneven}


def measure_host_memory(systems: Sequence[System], operations: int) -> list[Row]:
    """Bytes of host memory per op that the result of a chain and its graph hold.

    Autograd saves one tensor, at the end of the chain. So ebb keeps the recipes of the whole
    chain, and no other tensor is alive.
    """
    x = torch.randn(8, requires_grad=True)
    block = negatives(operations)
    rows: list[Row] = []
    eager = None
    for system in systems:
        total = bytes_held_by(lambda run=system.run: run(block, x))  # type: ignore[misc]
        if total is None:
            return []
        if system is EAGER:
            eager = total
        rows.append(
            {
                "system": system.name,
                "ops": operations,
                "bytes_per_op": total / operations,
                "added_bytes_per_op": None if eager is None else (total - eager) / operations,
            }
        )
    return rows
