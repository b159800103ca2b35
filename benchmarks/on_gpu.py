"""Tests and benchmarks that need a GPU, for `make gpu`; and `make gpu-archive`, which needs none.

    python benchmarks/on_gpu.py --archive 90       # on any machine, with the GPU machine's torch
    python benchmarks/on_gpu.py --seconds 540      # on a machine with a GPU
    python benchmarks/on_gpu.py --rehearse         # the same on the dry CUDA runtime, without a GPU

The archive has ebb built for a GPU of that compute capability, and the packages that the tests
need. On the machine with the GPU, the command unpacks an archive that fits, or builds ebb. What
measures no time runs together with others, at most 8, the rest alone. The same command again
continues with what is left, and then repeats what failed. The exit status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from report import write_results

Row = dict[str, Any]
ROOT = Path(__file__).resolve().parents[1]
ARCHIVE = "build/gpu_archive/ebb.tgz"
PACKAGES = "build/gpu_packages"
WORK = "build/on_gpu"
RESULTS, REHEARSAL = Path("benchmarks/results"), Path("build/rehearsal")
PYTHON = sys.executable
FOLDER = "{folder}"  # in a command: the folder of the item's files
CPP = ("src", "include", "tests/native", "cmake", "CMakeLists.txt", "setup.py", "pyproject.toml")
TOGETHER = min(8, max(2, os.cpu_count() or 1))  # items that run at the same time
# Kernels run on the CPU, and benchmarks are small: see tests/ebb_tests/dry_cuda.
DRY = ("-m", "ebb_tests.dry_cuda", "VALUES=1", f"MEMORY={16 << 30}")
SLOWER = 10  # on the dry runtime
PAGES = "page pools run kernels of ebb"  # so such an item cannot run there
LINES = 60  # of the list of failures


@dataclass(frozen=True)
class Item:
    """Something to run.

    Attributes:
        command: the program and its arguments. Its pages {folder}/*.md go into the results.
        expected: seconds; with less time left, the item does not start.
        limit: seconds after which it is ended.
        alone: True if it measures time or fills the device's memory.
        not_dry: why it cannot run on the dry CUDA runtime; empty if it can.
    """

    name: str
    command: Sequence[str]
    expected: float
    limit: float
    alone: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    not_dry: str = ""

    @property
    def file_name(self) -> str:
        return "-".join(re.findall(r"[a-z0-9]+", self.name.lower()))


def pytest_item(name: str, expected: float, *arguments: str, alone: bool = False) -> Item:
    options = ["-v", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=60"]
    command = [PYTHON, "-m", "pytest", *options, f"--junitxml={FOLDER}/junit.xml", *arguments]
    return Item(name, command, expected, 3 * expected, alone)


def gpu_tests(name: str, expected: float, *arguments: str, alone: bool = False) -> Item:
    return pytest_item(
        name, expected, f"tests/gpu/test_{arguments[0]}.py", *arguments[1:], alone=alone
    )


def sanitizer(tool: str, *options: str) -> Item:
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *options]
    command += [PYTHON, "tests/gpu/page_pool_program.py"]
    variables = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return Item(f"compute-sanitizer, {tool}", command, 40, 90, False, variables, PAGES)


def bench(name: str, expected: float, *arguments: str, not_dry: str = "") -> Item:
    command = [PYTHON, *arguments, "--output", FOLDER]
    return Item(name, command, expected, 2 * expected, alone=True, not_dry=not_dry)


def rehearsed(item: Item) -> Item:
    """The item on the dry CUDA runtime."""
    return replace(
        item,
        command=[PYTHON, *DRY, *item.command[1:]],
        limit=SLOWER * item.limit,
        variables={"EBB_BENCH_QUICK": "1"},
    )


def items() -> list[Item]:
    """What a run starts, in this order: first the items that run together."""
    run, plans = "benchmarks/run.py", "benchmarks/plans_on_gpu.py"
    nearly_full, speed = "nearly_full", "as_fast_as_torchs"
    devices = ["region/test_devices", "core/test_rule07_randomness"]
    devices += ["core/test_rule12_threads_and_streams"]
    return [
        gpu_tests("replays ahead", 25, "replays_ahead_on_gpu"),
        gpu_tests("captures", 40, "captures_on_gpu"),
        gpu_tests("offload", 25, "offload_on_gpu"),
        gpu_tests("random numbers", 25, "random_numbers_on_gpu"),
        gpu_tests("failures", 60, "failures_on_gpu"),
        gpu_tests("plans", 60, "plans_on_gpu", "-k", "not does_not_fit"),
        gpu_tests("kernels repeat", 25, "kernels_repeat"),
        gpu_tests("allocators", 40, "allocators_on_gpu"),
        gpu_tests("verify mode", 20, "verify_on_gpu"),
        gpu_tests("page pools", 20, "page_pools_on_gpu", "-k", "not bandwidth"),
        gpu_tests("paging", 20, "paging_on_gpu"),
        gpu_tests("cuDNN", 25, "cudnn_on_gpu", "-k", f"not {nearly_full}"),
        gpu_tests("host memory", 20, "host_memory_on_gpu", "-k", f"not {speed}"),
        pytest_item(
            "devices and streams", 25, "-m", "needs_cuda", *(f"tests/{d}.py" for d in devices)
        ),
        sanitizer("memcheck", "--report-api-errors", "no"),
        sanitizer("racecheck"),
        pytest_item("random schedules", 30, "-m", "needs_cuda", "tests/paging/test_page_pool.py"),
        gpu_tests("two GPUs", 15, "two_gpus"),
        gpu_tests("waits", 30, "waits_on_gpu", alone=True),
        gpu_tests("memory nearly full", 15, "memory_nearly_full", alone=True),
        gpu_tests("cuDNN, memory full", 15, "cudnn_on_gpu", "-k", nearly_full, alone=True),
        gpu_tests("plan that must fit", 15, "plans_on_gpu", "-k", "does_not_fit", alone=True),
        gpu_tests("bandwidth", 12, "page_pools_on_gpu", "-k", "bandwidth", alone=True),
        gpu_tests("host memory, speed", 12, "host_memory_on_gpu", "-k", speed, alone=True),
        bench("plans and replays", 95, plans, "--seconds", "1.5"),
        bench("language model", 70, run, "--only", "Llama-shaped", "--sections", "steps"),
        bench("offloading", 40, "benchmarks/offload_on_gpu.py"),
        bench("paging of rows", 35, "benchmarks/paging.py", "--rounds", "10", not_dry=PAGES),
        bench("plans, small kernels", 30, plans, "--seconds", "0.3", "--small"),
        bench("cost per op", 45, run, "--sections", "slopes"),
    ]


class Running:
    """An item's process and its log."""

    def __init__(self, item: Item, folder: Path, limit: float, environment: Row) -> None:
        self.item, self.own, self.began = item, folder / item.file_name, time.monotonic()
        self.until, self.process = self.began + limit, None
        shutil.rmtree(self.own, ignore_errors=True)
        self.own.mkdir(parents=True)
        with (self.own / "log").open("wb") as log:
            try:
                self.process = subprocess.Popen(
                    [part.replace(FOLDER, str(self.own)) for part in item.command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment | dict(item.variables),
                    start_new_session=True,
                )
            except OSError as error:
                log.write(f"{item.command[0]}: {error.strerror}\n".encode())

    def row(self) -> Row | None:
        """The result; None while it runs."""
        if self.process is None:
            return self._judged("not installed")
        status = self.process.poll()
        if status is None and time.monotonic() < self.until:
            return None
        self.end()
        text = (self.own / "log").read_text(errors="replace")
        if status is None:
            return self._judged("TIMED OUT")
        refused = "Device not supported" in text and "compute-sanitizer" in self.item.command[0]
        return self._judged("not installed" if refused else "FAILED" if status else "passed")

    def end(self) -> None:
        """Ends the process and all that it started."""
        if self.process is None:
            return
        for number, patience in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 5.0)):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(patience)
            except ProcessLookupError:
                return
            except subprocess.TimeoutExpired:
                continue

    def _judged(self, result: str) -> Row:
        seconds = round(time.monotonic() - self.began, 1)
        row: Row = {"name": self.item.name, "result": result, "seconds": seconds}
        row |= tests_of(self.own / "junit.xml")
        lines = (self.own / "log").read_text(errors="replace").strip().splitlines()
        if result in ("FAILED", "TIMED OUT") and not row.get("failed"):
            started = [line for line in lines if "::" in line]
            last = (started if result == "TIMED OUT" and started else lines)[-1:]
            row["failed"] = {self.item.name: without_places(" ".join(last))}
        pages = [file.read_text() for file in sorted(self.own.glob("*.md"))]
        return row | ({"pages": pages} if pages else {})


def tests_of(file: Path) -> Row:
    """Counts of tests by result, the failed ones with the first line of their error, and what tests
    have recorded."""
    try:
        cases = list(ET.parse(file).getroot().iter("testcase"))
    except (OSError, ET.ParseError):
        return {}
    counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
    failed: dict[str, str] = {}
    recorded: dict[str, dict[str, str]] = {}
    for case in cases:
        name = f"{(case.get('classname') or '').rpartition('.')[2]}::{case.get('name')}"
        for one in case.iter("property"):
            recorded.setdefault(name, {})[str(one.get("name"))] = str(one.get("value"))
        found = [child for child in case if child.tag in ("failure", "error", "skipped")]
        kind = "passed" if not found else "skipped" if found[0].tag == "skipped" else "failed"
        counts[kind] += 1
        if kind == "failed":
            lines = (found[0].text or "").splitlines()
            errors = [line[1:].strip() for line in lines if line.startswith("E  ")] or lines[-1:]
            failed[name] = without_places(" ".join(errors[:1]))
    found = {"failed": failed, "recorded": recorded}
    return {"tests": counts} | {kind: rows for kind, rows in found.items() if rows}


def without_places(line: str) -> str:
    return re.sub(r"(?<![\w.])/(?:[\w.+@-]+/)+", "", line)[:200]


def run_items(
    chosen: Iterable[Item], seconds: float, folder: Path, tell: Callable[[Row], None]
) -> list[Item]:
    """Runs the items whose expected time fits. Returns the others."""
    until = time.monotonic() + seconds
    environment = os.environ | variables()
    waiting, left = list(chosen), []
    running: list[Running] = []
    try:
        while waiting or running:
            while waiting and may_start(waiting[0], running):
                item, rest = waiting.pop(0), until - time.monotonic()
                if item.expected > rest:
                    left.append(item)
                else:
                    running.append(Running(item, folder, min(item.limit, rest), environment))
            time.sleep(0.05)
            for one in list(running):
                if (row := one.row()) is not None:
                    running.remove(one)
                    tell(row)
    finally:  # also when the command is ended
        for one in running:
            one.end()
    return left


def may_start(item: Item, running: Sequence[Running]) -> bool:
    if not running:
        return True
    return not item.alone and not running[0].item.alone and len(running) < TOGETHER


def variables() -> dict[str, str]:
    folders = [str(Path(PYTHON).parent), os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    path = [str(ROOT / folder) for folder in ("python", "tests", PACKAGES)]
    path.append(os.environ.get("PYTHONPATH", ""))
    return {
        "PATH": os.pathsep.join(filter(None, folders)),
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONUNBUFFERED": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS gives the same bits each time
    }


def digest(places: Iterable[str]) -> str:
    """A hash of sources."""
    found = hashlib.sha256()
    for place in places:
        path = ROOT / place
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.is_file() and not {"_native", "__pycache__"} & set(file.parts):
                found.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:12]


def native() -> Path:
    release = importlib.metadata.version("torch").partition("+")[0]
    return Path("python/ebb/_native") / f"torch-{release}"


def stamp(capability: str) -> str:
    """What a build must have been made of and for."""
    made = {"sources": digest(CPP), "torch": native().name, "capability": capability}
    return json.dumps(made | {"python": sys.implementation.cache_tag})


def build(capability: str) -> None:
    """Builds in place, with the module of the tests."""
    more = f"{os.environ.get('EBB_CMAKE_ARGS', '')} -DCMAKE_CUDA_ARCHITECTURES={capability}"
    setting = {"EBB_CUDA": "1", "EBB_TESTING": "1", "EBB_CMAKE_ARGS": more.strip()}
    command = [PYTHON, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(command, cwd=ROOT, env=os.environ | variables() | setting, check=True)
    (ROOT / native() / "stamp.json").write_text(stamp(capability))


def make_archive(capability: str) -> None:
    build(capability)
    shutil.rmtree(ROOT / PACKAGES, ignore_errors=True)
    install = [PYTHON, "-m", "pip", "-q", "install", "--target", str(ROOT / PACKAGES)]
    subprocess.run([*install, "pytest", "hypothesis"], check=True)
    subprocess.run([*install, "--no-deps", "torch-remat"], check=True)
    archive = ROOT / ARCHIVE
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:gz") as packed:
        for folder in (str(native()), PACKAGES):
            packed.add(ROOT / folder, folder)
    print(f"{ARCHIVE}: {archive.stat().st_size / 2**20:.1f} MiB, for {stamp(capability)}")


def prepare(capability: str) -> None:
    """Unpacks the archive, or builds, unless an earlier command has done that."""
    made, archive, wanted = ROOT / native() / "stamp.json", ROOT / ARCHIVE, stamp(capability)
    if made.exists() and made.read_text() == wanted:
        return
    if archive.exists():
        shutil.unpack_archive(archive, ROOT)
        if made.exists() and made.read_text() == wanted:
            return
        print(f"{ARCHIVE} does not fit {wanted}; make it again with `make gpu-archive`. Building.")
    build(capability)


ASK = """
import json, torch
print(json.dumps({"GPU": torch.cuda.get_device_name(0), "torch": torch.__version__,
                  "CUDA": torch.version.cuda,
                  "capability": "".join(map(str, torch.cuda.get_device_capability(0)))}))
"""


def ask_torch(*options: str) -> dict[str, str]:
    """The machine. Exits with 2 where torch finds no GPU."""
    command, environment = [PYTHON, *options, "-c", ASK], os.environ | variables()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        print(f"make gpu: {PYTHON} finds no GPU with torch: {last}", file=sys.stderr)
        sys.exit(2)
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(chosen: Sequence[Item], machine: dict[str, str], output: Path, seconds: float) -> int:
    """Runs what has no result with this ebb, then what failed; writes results after each item."""
    folder, ebb = ROOT / WORK, digest((*CPP, "python", "tests", "benchmarks"))
    base = folder / "results"
    old = json.loads(Path(f"{base}.json").read_text()) if Path(f"{base}.json").exists() else {}
    same = old.get("machine") == machine and old.get("ebb") == ebb
    rows: dict[str, Row] = {row["name"]: row for row in old["items"]} if same else {}
    new = [item for item in chosen if item.name not in rows]
    again = [i for i in chosen if i.name in rows and rows[i.name].get("failed")]
    ran: list[Row] = []
    name = f"{'-'.join(re.findall('[a-z0-9]+', machine['GPU'].lower()))}-gpu.md"

    def tell(row: Row) -> None:
        rows[row["name"]] = row
        ran.append(row)
        print(line_of(row), flush=True)
        ordered = [rows[item.name] for item in chosen if item.name in rows]
        found = {"machine": machine, "ebb": ebb, "items": ordered}
        write_results(base, found, page(found))
        (output / name).write_text(page(found))

    output.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        left = run_items([*new, *again], seconds, folder, tell)
    finally:
        with tarfile.open(output / "logs.tgz", "w:gz") as packed:
            packed.add(folder, "logs")
        print("\n".join(["", *failures(ran)[:LINES]]), flush=True)
    if left:
        print(f"left for the next such command: {', '.join(item.name for item in left)}")
    return int(any(row.get("failed") for row in ran))


def failures(rows: Iterable[Row]) -> list[str]:
    return [f"{test}: {why}" for row in rows for test, why in row.get("failed", {}).items()]


def line_of(row: Row) -> str:
    counts = ", ".join(f"{n} {kind}" for kind, n in row.get("tests", {}).items() if n)
    return f"{row['name']:26} {row['result']:13} {row['seconds']:6.1f} s  {counts}"


def page(found: Row) -> str:
    """The results, what tests have recorded (if it is not empty), and the pages of benchmarks."""
    machine, rows = found["machine"], found["items"]
    lines = ["# On a GPU", "", ", ".join(f"{k} {v}" for k, v in machine.items()) + ".", ""]
    lines += ["```", *map(line_of, rows), "```", "", *(f"* {one}" for one in failures(rows))]
    for row in rows:
        for test, values in row.get("recorded", {}).items():
            found = {name: value for name, value in values.items() if value not in ("[]", "False")}
            lines += [f"* {test}: {name} {value}" for name, value in found.items()]
    for row in rows:
        for text in row.get("pages", []):
            _, _, body = text.partition("\n")  # without its heading
            lines += ["", f"## {row['name']}", re.sub("^#", "##", body.rstrip(), flags=re.M)]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--archive", metavar="CAPABILITY", help="make the archive, such as 90")
    parser.add_argument("--rehearse", action="store_true", help="on the dry CUDA runtime")
    parser.add_argument("--seconds", type=float, help="default: 540; with --rehearse 3600")
    parser.add_argument("--output", type=Path, help=f"default: {RESULTS}, {REHEARSAL}")
    options = parser.parse_args()
    os.chdir(ROOT)
    if options.archive:
        make_archive(options.archive)
        return 0
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also ends what runs
    chosen, seconds, output = items(), 540, RESULTS
    if options.rehearse:
        chosen = [rehearsed(item) for item in chosen if not item.not_dry]
        seconds, output = 3600, REHEARSAL
    machine = ask_torch(*(DRY if options.rehearse else ()))
    prepare(machine["capability"])
    rest = (options.seconds or seconds) - (time.monotonic() - began)
    rest -= 8  # to end processes and pack logs
    return run(chosen, machine, (options.output or output).resolve(), rest)


if __name__ == "__main__":
    sys.exit(main())
