"""What `make test-gpu` and `make bench-gpu` run: everything that only a GPU can tell, in parts.

    python benchmarks/on_gpu.py tests
    python benchmarks/on_gpu.py tests --part 2
    python benchmarks/on_gpu.py bench --list

Builds ebb for the GPU that is found, in the checkout, with the Python and the torch that run this.
Goes on after a failure, ends with a table, and writes what it found, together with what other parts
found on the same machine, to benchmarks/results: one JSON and one Markdown file. Logs are in
build/on_gpu. The exit status is 1 if anything failed, 2 if the machine lacks what is needed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from gpu_machine import ROOT, ask_torch, described, missing, slug, variables
from items import (
    FOLDER,
    Item,
    Row,
    exit_status,
    merge,
    read_rows,
    run_part,
    show_list,
    table,
    write,
)

PART_SECONDS = 480.0  # three of these are 24 minutes
PYTHON = sys.executable
SANITIZER = "compute-sanitizer"
POOLS = "tests/gpu/page_pool_program.py"
# Of tests that run elsewhere too, those for a GPU. Files and not folders, since others there import
# what may not be installed.
NEEDS_CUDA = ("-m", "needs_cuda")
SCHEDULES = ("tests/paging/test_page_pool.py", "tests/paging/test_page_stack.py")
DEVICES = (
    "tests/region/test_devices.py",
    "tests/rules/test_rule07_randomness.py",
    "tests/rules/test_rule12_threads_and_streams.py",
)
TITLES = {"tests": "Tests on a GPU", "bench": "Benchmarks on a GPU"}


def build(capability: str) -> Item:
    return Item("build", 0, [PYTHON, "benchmarks/gpu_machine.py", capability], 150)


def tests_in(name: str, part: int, seconds: float, *arguments: str) -> Item:
    """Tests in a process of their own, so that what an error leaves behind stays there."""
    options = ["-v", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=60"]
    report = f"--junitxml={FOLDER}/junit.xml"
    return Item(name, part, [PYTHON, "-m", "pytest", *options, report, *arguments], seconds)


def sanitizer(tool: str, part: int, seconds: float, *options: str) -> Item:
    return Item(
        f"{SANITIZER}, {tool}",
        part,
        [SANITIZER, "--tool", tool, "--error-exitcode", "9", *options, PYTHON, POOLS],
        seconds,
        program=SANITIZER,
        refusal="Device not supported",
        variables={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )


def tests(capability: str) -> list[Item]:
    """From what all else needs to what all else can do without."""
    return [
        build(capability),
        Item("import", 1, [PYTHON, "-m", "ebb", "--version", "--verbose"], 30),
        tests_in("page pools", 1, 45, "tests/gpu/test_page_pools_on_gpu.py"),
        sanitizer("memcheck", 1, 55, "--report-api-errors", "no"),
        sanitizer("racecheck", 1, 55),
        tests_in("page pools, random schedules", 1, 80, *NEEDS_CUDA, *SCHEDULES),
        tests_in("devices and streams", 1, 60, *NEEDS_CUDA, *DEVICES),
        tests_in("offload", 2, 50, "tests/gpu/test_offload_on_gpu.py"),
        tests_in("paging", 2, 40, "tests/gpu/test_paging_on_gpu.py"),
        tests_in("random numbers", 2, 60, "tests/gpu/test_random_numbers_on_gpu.py"),
        tests_in("cuDNN", 2, 50, "tests/gpu/test_cudnn_on_gpu.py"),
        tests_in("captures", 2, 90, "tests/gpu/test_captures_on_gpu.py"),
        tests_in("verify mode", 2, 40, "tests/gpu/test_verify_on_gpu.py"),
        tests_in("waits", 3, 45, "tests/gpu/test_waits_on_gpu.py"),
        tests_in("host memory", 3, 45, "tests/gpu/test_host_memory_on_gpu.py"),
        tests_in("memory nearly full", 3, 50, "tests/gpu/test_memory_nearly_full.py"),
        tests_in("failures", 3, 160, "tests/gpu/test_failures_on_gpu.py"),
        tests_in("two GPUs", 3, 30, "tests/gpu/test_two_gpus.py"),
    ]


def program(name: str, part: int, seconds: float, *arguments: str) -> Item:
    return Item(name, part, [PYTHON, *arguments, "--output", FOLDER], seconds)


def bench(capability: str) -> list[Item]:
    run = "benchmarks/run.py"
    return [
        build(capability),
        program(
            "a model of 1.2 B parameters", 1, 180, run, "--only", "1.2 B", "--sections", "steps"
        ),
        program("cost per op", 1, 150, run, "--sections", "slopes"),
        program("offloading", 2, 150, "benchmarks/offload_on_gpu.py"),
        program("pinned memory", 2, 60, "benchmarks/pinned_memory.py"),
        program("paging", 2, 120, "benchmarks/paging.py", "--rounds", "20"),
        program("captures", 3, 90, "benchmarks/captures.py"),
        program(
            "small models",
            3,
            240,
            *(run, "--only", "block", "--sections", "steps", "--seconds", "8"),
        ),
    ]


LISTS = {"tests": tests, "bench": bench}


def without_environment(row: Row, gpu: str) -> Row:
    """Which machine it was is said once, and without its processor."""
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
    parser.add_argument("what", choices=LISTS)
    parser.add_argument("--part", type=int, help="only this one; default: all, one after the other")
    parser.add_argument("--list", action="store_true", help="show what would be run, and no more")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    if options.list:
        show_list(LISTS[options.what]("90"), PART_SECONDS)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what runs is ended with us
    found = ask_torch()
    lacking = [found["error"]] if "error" in found else missing(tests=options.what == "tests")
    items = LISTS[options.what](found.get("capability", ""))
    parts = sorted({item.part for item in items} - {0})
    if options.part is not None:
        if options.part not in parts:
            lacking.append(f"there is no part {options.part}; there are {parts}")
        parts = [options.part]
    for line in lacking:
        print(f"make {options.what.removesuffix('s')}-gpu: {line}", file=sys.stderr)
    if lacking:
        print(f"The Python is {PYTHON}; PYTHON=... names another.", file=sys.stderr)
        return 2
    return run(options.what, items, parts, described(found), options.output)


def run(
    what: str, items: list[Item], parts: list[int], machine: dict[str, str], output: Path
) -> int:
    order = [item.name for item in items]
    work = ROOT / "build" / "on_gpu" / what
    name = f"{slug(machine['GPU'])}-{what}"
    # Kept beside the builds too, for where a checkout is made anew between parts.
    places = [output.resolve() / name, work / name]
    os.chdir(ROOT)
    before: list[Row] = []
    for place in places:
        before = merge(before, read_rows(place.with_suffix(".json"), machine), order)
    print(", ".join(f"{k} {v}" for k, v in machine.items()), flush=True)
    rows: list[Row] = []

    def tell(row: Row) -> None:
        """Written after each item, so that nothing is lost if this is ended."""
        rows.append(without_environment(row, machine["GPU"]))
        for place in places:
            write(place, TITLES[what], machine, merge(before, rows, order), order)

    for part in parts:
        chosen = [item for item in items if item.part in (0, part)]
        run_part(chosen, PART_SECONDS, work, tell, variables())
    print(f"\n{table(merge([], rows, order))}")
    print(f"\nwritten to {os.path.relpath(places[0], ROOT)}.json and .md")
    return exit_status(rows)


if __name__ == "__main__":
    sys.exit(main())
