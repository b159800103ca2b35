"""Writes results: tables in Markdown, and all figures as JSON in a folder that git ignores."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Results = dict[str, Any]

REMAT = "torch-remat"
ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

# The workloads of the README's table and of the plot.
MAIN = [
    "Llama block, tiny",
    "256 ops on 4 x 8",
    "4 pre-LN blocks, width 64",
    "4 pre-LN blocks, width 512",
]


def write_results(base: Path, found: Results, page: str) -> None:
    """Writes `base`.md and the figures behind it."""
    base.parent.mkdir(parents=True, exist_ok=True)
    write_figures(base, found)
    Path(f"{base}.md").write_text(page)


def write_figures(base: Path, found: Results) -> None:
    """Writes JSON beside the page `base`.md, or to build/benchmarks for one in RESULTS."""
    folder = base.parent
    if folder.resolve() == RESULTS:
        folder = ROOT / "build" / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{base.name}.json").write_text(json.dumps(found, indent=1) + "\n")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def names(rows: Iterable[Row], column: str) -> list[str]:
    """The different values of a column, in order."""
    return list(dict.fromkeys(row[column] for row in rows))


def environment_line(found: Row) -> str:
    parts = [found["gpu"] or found["processor"], f"torch {found['torch']}", f"ebb {found['ebb']}"]
    parts += [f"torch-remat {found['torch-remat'] or 'not installed'}"]
    parts += [f"Python {found['python']}", f"threads: {found['threads']}"]
    return ", ".join(parts)


def steps_table(rows: list[Row], absent: Sequence[str] = ()) -> str:
    """A table of the systems on one workload. `absent`: systems that are not installed."""
    on_gpu = "host_seconds" in rows[0]
    header = ["system", "keeps", "time [median]", "held bytes", "peak bytes", ""]
    if on_gpu:
        header[3:3] = ["step ms", "host ms"]
        header[7:7] = ["peak reserved"]
    lines = []
    for row in rows:
        line = [
            row["system"],
            row["family"],
            f"{row['ratio']:.3f} [{row['ratio_of_medians']:.3f}]",
            f"{row['held_bytes']:,}",
            f"{row['peak_bytes']:,}",
            row["note"],
        ]
        if on_gpu:
            line[3:3] = [number(row["seconds"] * 1e3), number(row["host_seconds"] * 1e3)]
            line[7:7] = [f"{row['peak_reserved_bytes']:,}"]
        lines.append(line)
    lines += [[name, "not installed", *[""] * (len(header) - 2)] for name in absent]
    eager = rows[0]
    title = f"### {eager['workload']}\n\neager: {eager['seconds'] * 1e6:,.0f} us a step"
    return f"{title}; {eager['steps']} steps of each system\n\n{table(header, lines)}"


def slopes_table(rows: list[Row]) -> str:
    columns = {
        "recording": "recording",
        "recording_without_gradient": "recording, no gradient",
        "pack": "pack",
        "unpack": "unpack",
        "replay": "replay",
        "release": "release",
        "region": "region",
    }
    lines = [
        [row["system"], *(number(row[c]) for c in columns), number(row["residual"])]
        for row in rows
        if "recording" in row
    ]
    return table(["us per op, tensor or region", *columns.values(), "largest residual"], lines)


def outside_table(found: Row) -> str:
    return table(
        ["outside any region", "with ebb, us", "without, us", "ratio", "of medians", "noise"],
        [
            [
                "Llama block, tiny, eager",
                f"{min(found['with']) * 1e6:.1f}",
                f"{min(found['without']) * 1e6:.1f}",
                number(found["ratio"], 3),
                number(found["ratio_of_medians"], 3),
                number(found["noise"], 3),
            ]
        ],
    )


def summary_table(rows: list[Row]) -> str:
    """A table: each system's time and held bytes over eager's, on the main workloads."""
    workloads = [name for name in names(rows, "workload") if name in MAIN]
    cells = {(row["workload"], row["system"]): row for row in rows}
    lines = []
    for system in names(rows, "system"):
        line = [system]
        for workload in workloads:
            row, eager = cells[workload, system], cells[workload, "eager"]
            share = 100 * row["held_bytes"] / eager["held_bytes"]
            line.append(f"{row['ratio']:.2f}, {share:.0f} %")
        lines.append(line)
    return table(["time over eager's, held bytes", *workloads], lines)


def markdown(results: Results) -> str:
    """The page of all results."""
    parts = ["# Benchmark results", environment_line(results["environment"])]
    steps = results["steps"]
    if steps:
        parts += ["## Steps: time over eager's, ratio of minima [of medians]"]
    for workload in names(steps, "workload"):
        rows = [row for row in steps if row["workload"] == workload]
        parts.append(steps_table(rows, [] if results["environment"]["torch-remat"] else [REMAT]))
    if results["slopes"]:
        parts += ["## Slopes", slopes_table(results["slopes"])]
    if results["outside"]:
        parts += ["## Outside any region", outside_table(results["outside"])]
    return "\n\n".join(parts) + "\n"
