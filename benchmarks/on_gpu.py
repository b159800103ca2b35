"""Tests and benchmarks that need a GPU, for `make gpu`, `make test-gpu` and `make bench-gpu`.

    python benchmarks/on_gpu.py all --seconds 570
    python benchmarks/on_gpu.py tests
    python benchmarks/on_gpu.py bench --list

Builds ebb in the checkout for this machine's GPU, with the Python and the torch that run this file.
Continues after a failure, and ends with a table. With --seconds it ends in that time; the same
command then continues with the remaining items. Results go to benchmarks/results, together with
those of earlier commands on such a machine: one JSON and one Markdown file for tests, and for
benchmarks. Logs are in build/on_gpu. The exit status is 1 if anything failed, 2 if the machine
lacks a requirement.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

from gpu_machine import (
    ALL_OF_EBB,
    ROOT,
    ask_torch,
    described,
    digest,
    missing,
    package,
    slug,
    variables,
)
from items import (
    FOLDER,
    Item,
    Results,
    Row,
    exit_status,
    pending,
    run_items,
    show_list,
    table,
)

TURN_SECONDS = 570.0  # enough for the build and the items of turn 1
RESULTS = "benchmarks/results"
WORK = "build/on_gpu"
PYTHON = sys.executable
SANITIZER = "compute-sanitizer"
POOLS = "tests/gpu/page_pool_program.py"
# The GPU tests in files that also have other tests. These are files, not folders, since other files
# there import packages that may be missing.
NEEDS_CUDA = ("-m", "needs_cuda")
SCHEDULES = ("tests/paging/test_page_pool.py",)
DEVICES = (
    "tests/region/test_devices.py",
    "tests/rules/test_rule07_randomness.py",
    "tests/rules/test_rule12_threads_and_streams.py",
)
TITLES = {"tests": "Tests on a GPU", "bench": "Benchmarks on a GPU"}


def build(capability: str) -> Item:
    return Item("build", 0, [PYTHON, "benchmarks/gpu_machine.py", capability], 150)


def tests_in(name: str, turn: int, seconds: float, *arguments: str) -> Item:
    """Tests in their own process, since a CUDA error makes the process unusable."""
    options = ["-v", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=60"]
    report = f"--junitxml={FOLDER}/junit.xml"
    return Item(name, turn, [PYTHON, "-m", "pytest", *options, report, *arguments], seconds)


def sanitizer(tool: str, turn: int, seconds: float, *options: str) -> Item:
    return Item(
        f"{SANITIZER}, {tool}",
        turn,
        [SANITIZER, "--tool", tool, "--error-exitcode", "9", *options, PYTHON, POOLS],
        seconds,
        program=SANITIZER,
        refusal="Device not supported",
        variables={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )


# Items of turn 1 test the basic functions on a GPU. Items of later turns test more details.
def tests() -> list[Item]:
    gpu = "tests/gpu/test_"
    return [
        Item("import", 1, [PYTHON, "-m", "ebb", "--version", "--verbose"], 30),
        tests_in("offload", 1, 50, f"{gpu}offload_on_gpu.py"),
        tests_in("replays ahead", 1, 60, f"{gpu}replays_ahead_on_gpu.py"),
        tests_in("captures", 1, 90, f"{gpu}captures_on_gpu.py"),
        tests_in("plans", 2, 180, f"{gpu}plans_on_gpu.py"),
        tests_in("page pools", 2, 45, f"{gpu}page_pools_on_gpu.py"),
        tests_in("waits", 2, 45, f"{gpu}waits_on_gpu.py"),
        tests_in("paging", 2, 40, f"{gpu}paging_on_gpu.py"),
        sanitizer("memcheck", 2, 55, "--report-api-errors", "no"),
        tests_in("random numbers", 2, 60, f"{gpu}random_numbers_on_gpu.py"),
        tests_in("memory nearly full", 2, 50, f"{gpu}memory_nearly_full.py"),
        tests_in("devices and streams", 2, 60, *NEEDS_CUDA, *DEVICES),
        tests_in("cuDNN", 2, 50, f"{gpu}cudnn_on_gpu.py"),
        tests_in("host memory", 3, 45, f"{gpu}host_memory_on_gpu.py"),
        tests_in("verify mode", 3, 40, f"{gpu}verify_on_gpu.py"),
        tests_in("failures", 3, 160, f"{gpu}failures_on_gpu.py"),
        tests_in("page pools, random schedules", 3, 80, *NEEDS_CUDA, *SCHEDULES),
        sanitizer("racecheck", 3, 55),
        tests_in("two GPUs", 3, 30, f"{gpu}two_gpus.py"),
    ]


def program(name: str, turn: int, seconds: float, *arguments: str) -> Item:
    return Item(name, turn, [PYTHON, *arguments, "--output", FOLDER], seconds)


def bench() -> list[Item]:
    run = "benchmarks/run.py"
    billion = ("--only", "1.2 B", "--sections", "steps")
    small = ("--only", "block", "--sections", "steps", "--seconds", "8")
    return [
        program("a model of 1.2 B parameters", 1, 180, run, *billion),
        program("plans and replays ahead", 2, 240, "benchmarks/plans_on_gpu.py"),
        program("offloading", 2, 150, "benchmarks/offload_on_gpu.py"),
        program("cost per op", 2, 150, run, "--sections", "slopes"),
        program("captures", 3, 90, "benchmarks/captures.py"),
        program("paging", 3, 120, "benchmarks/paging.py", "--rounds", "20"),
        program("pinned memory", 3, 60, "benchmarks/pinned_memory.py"),
        program("small models", 3, 240, run, *small),
    ]


LISTS = {"tests": tests, "bench": bench}
TARGETS = {"tests": "test-gpu", "bench": "bench-gpu", "all": "gpu"}


def items_of(what: str) -> list[Item]:
    """The items of one kind ("tests", "bench"), or of all kinds ("all")."""
    kinds = LISTS if what == "all" else {what: LISTS[what]}
    return [replace(item, kind=kind) for kind, listed in kinds.items() for item in listed()]


def without_environment(row: Row, gpu: str) -> Row:
    """Removes the machine's description from a row: the results name the machine once."""
    for figures in row.get("figures", {}).values():
        if isinstance(figures, dict):
            figures.pop("environment", None)
    if "pages" in row:
        row["pages"] = [
            "\n".join(line for line in page.splitlines() if not line.startswith(gpu))
            for page in row["pages"]
        ]
    return row


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=TARGETS)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="end in so many; default: run all"
    )
    parser.add_argument(
        "--again", action="store_true", help="also run items that have passed with this ebb"
    )
    parser.add_argument("--list", action="store_true", help="show the items, and run none")
    parser.add_argument("--output", type=Path, default=ROOT / RESULTS)
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    items = items_of(options.what)
    if options.list:
        show_list([build("90"), *items])
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also ends the running command
    found = ask_torch()
    lacking = [found["error"]] if "error" in found else missing(tests=options.what != "bench")
    for line in lacking:
        print(f"make {TARGETS[options.what]}: {line}", file=sys.stderr)
    if lacking:
        print(f"The Python is {PYTHON}; PYTHON=... names another.", file=sys.stderr)
        return 2
    capability = found["capability"]
    status = run(
        [build(capability), *items],
        described(found),
        options.output,
        options.seconds,
        options.again,
    )
    built = package(capability)
    if built.exists() and options.output.resolve() != ROOT / RESULTS:
        shutil.copy(built, options.output)  # another machine can unpack this build
    return status


def results_of(items: list[Item], machine: dict[str, str], output: Path) -> dict[str, Results]:
    """Results by kind. A second copy is in build/on_gpu, which git ignores."""
    always = [item.name for item in items if not item.kind]
    found = {}
    for kind in dict.fromkeys(item.kind for item in items if item.kind):
        order = always + [item.name for item in items if item.kind == kind]
        name = f"{slug(machine['GPU'])}-{kind}"
        write_to = [output.resolve() / name, ROOT / WORK / name]
        read_from = [ROOT / RESULTS / name, *write_to]
        found[kind] = Results(TITLES[kind], machine, order, read_from, write_to)
    return found


def run(
    items: list[Item],
    machine: dict[str, str],
    output: Path,
    seconds: float = float("inf"),
    again: bool = False,
) -> int:
    os.chdir(ROOT)
    results = results_of(items, machine, output)
    ebb = digest(ALL_OF_EBB)
    if again:
        for row in (row for found in results.values() for row in found.rows):
            row.pop("ebb", None)  # without this key, the row counts as one that is still to run
    print(", ".join(f"{k} {v}" for k, v in machine.items()), flush=True)

    def tell(item: Item, row: Row) -> None:
        row = without_environment(row | {"ebb": ebb}, machine["GPU"])
        for kind in [item.kind] if item.kind else results:
            results[kind].add(row)

    chosen = pending(items, results, ebb)
    rows, left = run_items(chosen, seconds, ROOT / WORK, tell, variables())
    print(f"\n{table(rows)}\n")
    if left:
        names = ", ".join(item.name for item in left)
        print(f"{len(left)} items are left for the next such command: {names}")
    for found in results.values():
        print(f"written to {os.path.relpath(found.write_to[0], ROOT)}.json and .md")
    return exit_status(rows)


if __name__ == "__main__":
    sys.exit(main())
