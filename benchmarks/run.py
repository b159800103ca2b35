"""Measures ebb and other tools on the same programs, and writes the results.

    python benchmarks/run.py
    python benchmarks/run.py --only "Llama" --sections steps --output results

The exit status is 1 if any system gives other gradients than eager.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# torch reads these on import: repeatable cuBLAS, and no log lines of its profiler.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

import torch
from environment import base, device, environment, keep, quick, slug
from host_memory import keep_freed_memory
from language_model import BILLION, TINY, language_model
from outside import measure_outside
from plot import draw
from report import MAIN, RESULTS, ROOT, environment_line, markdown, summary_table, write_results
from slopes import measure_slopes
from steps import measure_steps
from systems import System, all_systems, offload_systems
from workloads import WORKLOADS, Workload

SECTIONS = ("steps", "slopes", "outside")
SLOPES_OF = (
    "eager",
    "AC, reentrant",
    "AC",
    "SAC matmuls",
    "torch-remat recompute all",
    "ebb recompute_all",
    "ebb save_all",
)
TOO_LONG_FOR_QUICK = [f"4 pre-LN blocks, width {width}" for width in (256, 512, 1024)]
README_MARKS = "<!-- benchmarks -->\n", "<!-- end of benchmarks -->\n"


def chosen_workloads(only: str) -> dict[str, Callable[[], Workload]]:
    found = dict(WORKLOADS)
    if quick():
        for name in TOO_LONG_FOR_QUICK:
            del found[name]
    if quick() or device().type == "cuda":
        shape = TINY if quick() else BILLION
        found[shape.name] = lambda: language_model(shape)
    return {name: make for name, make in found.items() if only.lower() in name.lower()}


def run_steps(
    systems: list[System], only: str, at_most: float = float("inf")
) -> Iterator[list[dict[str, Any]]]:
    """The rows of each workload."""
    for name, make in chosen_workloads(only).items():
        seconds = min(at_most, 40 if name in MAIN else 15)
        large = name in (BILLION.name, TINY.name)
        found = measure_steps(
            make,
            device(),
            [*systems, *offload_systems()] if large and device().type == "cuda" else systems,
            seconds=0 if quick() else seconds,
            rounds=1 if quick() else 5,
        )
        eager = found[0]
        print(f"\n{name}: eager {eager['seconds'] * 1e6:.0f} us, {eager['steps']} steps of each")
        print(f"  {'':28s} {'time':>6s} {'median':>8s} {'held':>12s} {'peak':>12s}")
        for row in found:
            print(
                f"  {row['system']:28s} {row['ratio']:6.3f} [{row['ratio_of_medians']:6.3f}]"
                f" {row['held_bytes']:12,} {row['peak_bytes']:12,}  {row['note']}",
                flush=True,
            )
        yield found


def run_slopes(systems: list[System]) -> list[dict[str, Any]]:
    rows = measure_slopes(
        [s for s in systems if s.name in SLOPES_OF],
        device(),
        seconds=0 if quick() else 45,
        rounds=1 if quick() else 5,
    )
    print("\nslopes, us")
    for row in rows:
        columns = {k: v for k, v in row.items() if isinstance(v, float)}
        print(f"  {row['system']:28s}", *(f"{k} {v:.3f} " for k, v in columns.items()), flush=True)
    return rows


def write(results: dict[str, Any], folder: Path, plot: bool) -> None:
    path = base(results, folder)
    written = ["md"]
    write_results(path, results, markdown(results))
    try:
        if plot:
            draw(results["steps"], path.with_suffix(".svg"))
            written.append("svg")
    except ModuleNotFoundError:
        print("matplotlib is not installed, so there is no plot: pip install -e '.[bench]'")
    print(f"\nwritten to {path} as {', '.join(written)}")


def update_readme(results: dict[str, Any]) -> None:
    """Puts the plot and the summary between the marks in the README."""
    begin, end = README_MARKS
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text().partition(begin)
    _, _, after = rest.partition(end)
    name = slug(results["environment"])
    parts = [
        f"![Time against bytes held](benchmarks/results/{name}.svg)\n",
        f"{environment_line(results['environment'])}:\n",
        summary_table(results["steps"]) + "\n",
        f"All results: [{name}.md](benchmarks/results/{name}.md).\n",
    ]
    readme.write_text(before + begin + "\n".join(parts) + end + after)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    parser.add_argument(
        "--sections", nargs="+", choices=SECTIONS, default=SECTIONS, help="default: all"
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="folder for the results; default: benchmarks/results for a complete run, else none",
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="the most for the steps of a workload"
    )
    parser.add_argument(
        "--readme", action="store_true", help="also put the plot and the summary into the README"
    )
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    sections = set(options.sections)
    complete = not quick() and not options.only and sections == set(SECTIONS)
    complete = complete and options.seconds == float("inf")
    folder = options.output or (RESULTS if complete else None)
    if options.readme and not complete:
        sys.exit("--readme needs a complete run")

    keep_freed_memory()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
    results: dict[str, Any] = {"environment": environment()}
    print(environment_line(results["environment"]))
    systems = all_systems()
    results["steps"] = []
    if "steps" in sections:
        for rows in run_steps(systems, options.only, options.seconds):
            results["steps"] += rows
            keep(results, folder)
    results["slopes"] = run_slopes(systems) if "slopes" in sections else []
    keep(results, folder)
    results["outside"] = (
        measure_outside(*((1, 0) if quick() else (8, 2.5))) if "outside" in sections else {}
    )
    if folder is not None:
        write(results, folder, plot=not options.only)
    if options.readme:
        update_readme(results)


if __name__ == "__main__":
    main()
