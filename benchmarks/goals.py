"""The project's goals, each with the measured value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from systems import EVERYTHING_SAVED, NOTHING

Row = dict[str, Any]
Results = dict[str, Any]

NOT_MEASURED = "not measured"

# Workload, system, goal: the largest step time over eager's.
RATIOS = [
    ("Llama block, tiny", "ebb torchtitan", 1.20),
    ("Llama block, tiny", "ebb recompute_all", 1.25),
    ("256 ops on 4 x 8", "ebb recompute_all", 1.20),
    ("256 ops on 4 x 8", "ebb save_matmuls", 1.16),
    ("4 pre-LN blocks, width 64", "ebb recompute_all", 1.27),
    ("4 pre-LN blocks, width 64", "ebb save_matmuls", 1.05),
    ("4 pre-LN blocks, width 512", "ebb recompute_all", 1.225),
    ("4 pre-LN blocks, width 512", "ebb save_matmuls", 1.01),
]


def row_of(rows: list[Row], **columns: object) -> Row | None:
    return next((r for r in rows if all(r.get(k) == v for k, v in columns.items())), None)


def ratio(results: Results, workload: str, system: str) -> str:
    row = row_of(results["steps"], workload=workload, system=system)
    return f"{row['ratio']:.3f}" if row else NOT_MEASURED


def slope(results: Results, system: str, *columns: str) -> str:
    row = row_of(results["slopes"], system=system)
    if row is None or any(row[column] is None for column in columns):
        return NOT_MEASURED
    return f"{sum(row[column] for column in columns):.2f}"


def outside(results: Results) -> str:
    found = results["outside"]
    if not found:
        return NOT_MEASURED
    return f"{found['ratio_of_medians']:.3f} (equal processes differ by {found['noise']:.3f})"


def host_memory(results: Results) -> str:
    row = row_of(results["host_memory"], system="ebb recompute_all")
    return f"{row['added_bytes_per_op']:.0f}" if row else NOT_MEASURED


def bytes_against_peers(results: Results, column: str) -> str:
    """Text: how often ebb needs no more bytes than the best other tool of its family, and the
    worst excess. `column` names the kind of bytes."""
    cases = 0
    excesses: list[tuple[int, str]] = []
    rows = results["steps"]
    for ours in rows:
        if not ours["system"].startswith("ebb") or ours["family"] == EVERYTHING_SAVED:
            continue
        peers = [
            row[column]
            for row in rows
            if row["workload"] == ours["workload"]
            and row["family"] == ours["family"] != NOTHING
            and not row["system"].startswith("ebb")
        ]
        if peers:
            cases += 1
            excess = ours[column] - min(peers)
            if excess > 0:
                excesses.append((excess, f"{ours['workload']}, {ours['family']}"))
    if not cases:
        return NOT_MEASURED
    text = f"in {cases - len(excesses)} of {cases} cases"
    if excesses:
        excess, case = max(excesses)
        text += f"; most above: {excess:,} bytes ({case})"
    return text


def unevenness(results: Results, series: str) -> str:
    rows = results["scaling"].get("unevenness", [])
    row = row_of(rows, series=series, system="ebb recompute_all")
    eager = row_of(rows, series=series, system="eager")
    if row is None or eager is None:
        return NOT_MEASURED
    return (
        f"{row['added_us_per_op']:.2f}; per further op {row['added_us_per_further_op']:.2f}"
        f" (eager's own time per op: {eager['us_per_op']:.2f})"
    )


def goals(results: Results) -> list[Row]:
    """One row for each goal: the quantity, its goal and its measured value."""
    found = [
        (f"{workload}: {system}, time over eager's", f"{most:g}", ratio(results, workload, system))
        for workload, system, most in RATIOS
    ]
    others: list[tuple[str, str, Callable[[], str]]] = [
        (
            "recording, us per op",
            "0.35",
            lambda: slope(results, "ebb recompute_all", "recording"),
        ),
        (
            "replay, us per op over the op's forward in eager",
            "at most 0",
            lambda: slope(results, "ebb recompute_all", "replay"),
        ),
        (
            "saved tensor that is recomputed: pack + unpack, us",
            "0.15",
            lambda: slope(results, "ebb recompute_all", "pack", "unpack"),
        ),
        (
            "saved tensor that is kept: pack + unpack, us",
            "0.15",
            lambda: slope(results, "ebb save_all", "pack", "unpack"),
        ),
        (
            "region entry + exit, us",
            "3",
            lambda: slope(results, "ebb recompute_all", "region"),
        ),
        (
            "outside any region: time over that of torch without ebb",
            "no measurable difference",
            lambda: outside(results),
        ),
        (
            "held bytes at most the lowest of the peers at the same policy",
            "always",
            lambda: bytes_against_peers(results, "held_bytes"),
        ),
        (
            "peak bytes at most the lowest of the peers at the same policy",
            "always",
            lambda: bytes_against_peers(results, "peak_bytes"),
        ),
        ("host memory per recorded op, bytes", "500", lambda: host_memory(results)),
        (
            "added time per op, 10 to 100,000 ops in a region: largest over smallest",
            "1.10",
            lambda: unevenness(results, "ops_per_region"),
        ),
        (
            "added time per op, 1 to 64 regions: largest over smallest",
            "1.10",
            lambda: unevenness(results, "regions"),
        ),
    ]
    found += [(what, goal, measured()) for what, goal, measured in others]
    return [{"what": what, "goal": goal, "measured": measured} for what, goal, measured in found]
