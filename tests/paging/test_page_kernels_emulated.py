"""The CUDA kernels of page pools on the CPU, in thousands of random schedules: each byte is what
the CPU's mover makes of it, and no access is out of bounds or in a race."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

from ebb_tests import emulated_cuda

KERNELS = emulated_cuda.POOL / "mover_cuda.cu"
SCHEDULES = 3000


def fuzz(kernels, schedules):
    """What became of so many schedules: the words of the first fault, or a count for each thing
    that happened."""
    host = (emulated_cuda.HERE / "fuzz.cpp", emulated_cuda.POOL / "mover_cpu.cpp")
    program = emulated_cuda.build(kernels, *host, sizes=emulated_cuda.SIZES)
    ended = emulated_cuda.run(program, "0", str(schedules))
    if ended.returncode != 0:
        return ended.stdout + ended.stderr or f": signal {-ended.returncode}"
    return {name: int(count) for count, name in re.findall(r"(\d+) (.+)", ended.stdout)}


@pytest.mark.sweep
def test_the_kernels_do_what_the_cpu_does():
    counts = fuzz(KERNELS.read_text(), SCHEDULES)

    assert isinstance(counts, dict), counts
    assert counts["schedules"] == SCHEDULES
    happened = ["stashes", "restores", "failed restores", "spills", "given back", "resets"]
    happened += ["kept pages", "calls on stacks", "misaligned tensors"]
    happened += [f"dead rows, fill {fill}" for fill in range(3)]
    happened += [f"error {1 << bit}" for bit in range(6)]
    assert [name for name in happened if counts.get(name, 0) < 100] == []


class Bug(NamedTuple):
    """One to be planted in the source: at the first place that reads so, or at another."""

    name: str
    old: str
    new: str
    place: int = 0


BARRIER = "  __syncthreads();\n  if (threadIdx.x != 0) {\n    return false;\n  }\n"
FENCE = "  __threadfence();\n"
EARLY = "blockIdx.x + threadIdx.x == 0"
ORDER = [
    Bug("stash published early", "isLast(pool)", EARLY),
    Bug("restore published early", "isLast(pool)", EARLY, 1),
    Bug("no barrier before the count", "__syncthreads();", ""),
    Bug("no barrier before giving back", "__syncthreads();", "", 1),
    Bug("no fence before the count", "__threadfence();", ""),
    Bug("no fence after the count", "__threadfence();", "", 1),
    Bug(
        "a fence before the barrier, not after it", BARRIER + FENCE, "__threadfence();\n" + BARRIER
    ),
    Bug("a piece in two warps", "piece += warps", "piece += 1"),
    Bug("an id by all threads", "offset == 0 && threadIdx.x % kWarp == 0", "offset == 0"),
    Bug("reset by each block", "if (first == 0) {", "if (threadIdx.x == 0) {", 1),
]
OTHER = [
    Bug("a block too few", "== gridDim.x - 1", "== gridDim.x - 2"),
    Bug("counts one too far", "blocksDone, gridDim.x - 1)", "blocksDone, gridDim.x)"),
    Bug("all threads of a block count", "threadIdx.x != 0", "false"),
    Bug("stretches end too soon", "left <= 0", "left <= 1"),
    Bug("a piece overruns its stretch", "lesser(stretch - offset,", "lesser(kPiece,"),
    Bug("pieces too far apart", "perStretch * kPiece", "perStretch * (kPiece + 1)"),
    Bug("a wrong stride of vectors", "first += kInFlight", "first += 1 + kInFlight"),
    Bug("vectors in flight overlap", "first + i * kWarp", "first + i", 1),
    Bug("more in flight than there is room for", "i < kInFlight", "i <= kInFlight"),
    Bug("the tail is skipped", "bytes - vectors * kBytes; i", "head; i"),
    Bug("the tail overruns", "bytes - vectors * kBytes; i", "bytes - vectors * kBytes + 1; i"),
    Bug("vectors too wide", "skew % 16 == 0", "skew % 8 == 0"),
    Bug("a row's width is not looked at", "(to - from) | width", "to - from"),
    Bug("a row is not repeated", "from + at % width", "from + at"),
    Bug("pages too close", "= pool->pageRows *", "= (pool->pageRows - 1) *"),
    Bug("dead rows stay", "fill(destination + alive,", "if (false) fill(destination + alive,"),
    Bug("dead rows overrun", "alive, whole - alive, dead", "alive, whole, dead"),
    Bug("first rows overrun", "alive, whole - alive, first", "alive, whole, first"),
    Bug("another byte after an error", "dead.failed", "dead.dead"),
    Bug("no id of the first page", "offset == 0 &&", "offset == 0 && slot > 0 &&"),
    Bug("an id in the next place", "pages()[slot] = page", "pages()[slot + 1] = page"),
    Bug("freed where pages are taken", "tier.tail + slot", "tier.head + slot"),
    Bug("kept pages are freed", " && !dead.keepsPages", ""),
    Bug("errors stay", "pool->errors = 0;", ""),
]


@pytest.mark.parametrize("bug", ORDER + OTHER, ids=lambda bug: bug.name)
def test_a_planted_bug_is_seen(bug):
    source = KERNELS.read_text()
    at = [match.start() for match in re.finditer(re.escape(bug.old), source)][bug.place]

    found = fuzz(source[:at] + bug.new + source[at + len(bug.old) :], SCHEDULES)

    assert isinstance(found, str)
    assert re.search(
        ": race" if bug in ORDER else ": (race|differs|out of|misaligned|signal)", found
    )


RIGHT = ["adds last", "tells its block", "returns early", "writes wide"]
FAULTS = {
    "no barrier before the count": "race",
    "no fence before the count": "race",
    "no fence after the count": "race",
    "no barrier after shared memory": "unwritten|race",
    "nobody wrote shared memory": "unwritten",
    "waits in two lines": "barrier",
    "reads the count": "race",
    "writes past the end": "out of bounds",
    "writes where the host has memory": "out of bounds",
    "all write the same": "race",
    "writes wide, misaligned": "misaligned",
}


def run_small(name):
    source = (emulated_cuda.HERE / "faults.cu").read_text()
    return emulated_cuda.run(emulated_cuda.build(source), name, "50")


@pytest.mark.parametrize("name", RIGHT)
def test_the_emulation_runs_what_is_right(name):
    ended = run_small(name)

    assert ended.returncode == 0, ended.stdout


@pytest.mark.parametrize("name", FAULTS)
def test_the_emulation_sees_what_is_wrong(name):
    ended = run_small(name)

    assert ended.returncode == 1
    assert re.search(f": ({FAULTS[name]})", ended.stdout), ended.stdout


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("kernel<<<1, 2>>>();", "<<<"),
        ("extern __shared__ char all[];", "__shared__"),
        ("__shared__ int many[3];", "__shared__"),
        ("memcpy(to, from, 3);", "memcpy"),
    ],
)
def test_what_the_conversion_does_not_know_is_an_error(line, words):
    with pytest.raises(emulated_cuda.ConversionError, match=words):
        emulated_cuda.convert(f"void f() {{\n{line}\n}}\n")


def test_a_size_that_is_not_there_is_an_error():
    renamed = KERNELS.read_text().replace("kResetBlocks", "kBlocks")

    with pytest.raises(emulated_cuda.ConversionError, match="kResetBlocks is defined 0 times"):
        emulated_cuda.convert(renamed, emulated_cuda.SIZES)
