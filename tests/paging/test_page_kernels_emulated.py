"""The CUDA kernels of page pools on the CPU, in thousands of random schedules: each byte is what
the CPU's mover makes of it, and no access is out of bounds or in a race."""

from __future__ import annotations

import re
import subprocess

import emulated_cuda
import pytest

KERNELS = emulated_cuda.POOL / "mover_cuda.cu"
SCHEDULES = 3000


def fuzz(kernels, schedules):
    """What became of so many schedules: the words of the first fault, or a count for each thing
    that happened."""
    host = (emulated_cuda.HERE / "fuzz.cpp", emulated_cuda.POOL / "mover_cpu.cpp")
    program = emulated_cuda.build(kernels, *host)
    ended = subprocess.run([program, "0", str(schedules)], capture_output=True, text=True)
    if ended.returncode != 0:
        return ended.stdout + ended.stderr
    return {name: int(count) for count, name in re.findall(r"(\d+) (.+)", ended.stdout)}


def test_the_kernels_do_what_the_cpu_does():
    counts = fuzz(KERNELS.read_text(), SCHEDULES)

    assert isinstance(counts, dict), counts
    assert counts["schedules"] == SCHEDULES
    happened = ["stashes", "restores", "failed restores", "spills", "given back", "resets"]
    happened += [f"error {1 << bit}" for bit in range(6)]
    assert [name for name in happened if counts.get(name, 0) < 100] == []


# What is wrong, how it shows, what it replaces, and what it is replaced by. Of several places it is
# the first, unless there is a number.
PLANTED = [
    ("a block too few", "race|differs", "== gridDim.x - 1", "== gridDim.x - 2"),
    ("counts one too far", "differs|race", "blocksDone, gridDim.x - 1)", "blocksDone, gridDim.x)"),
    (
        "published early",
        "race",
        "isLastBlock(pool) && threadIdx.x == 0",
        "blockIdx.x + threadIdx.x == 0",
    ),
    (
        "published early, in restore",
        "race",
        "isLastBlock(pool) && threadIdx.x == 0",
        "blockIdx.x + threadIdx.x == 0",
        1,
    ),
    ("no barrier before the count", "race", "__syncthreads();", ""),
    ("no barrier after the count", "race|unwritten", "__syncthreads();", "", 1),
    ("no barrier before giving back", "race", "__syncthreads();", "", 2),
    ("no fence before the count", "race", "__threadfence();", ""),
    ("no fence after the count", "race", "__threadfence();", "", 1),
    ("a row is skipped", "differs", "row < plan.rows;", "row < plan.rows - 1;"),
    ("a row too many comes back", "out of|differs", "row < plan.rows;", "row <= plan.rows;", 1),
    ("rows in two blocks", "race", "row += gridDim.x", "row += 1"),
    ("a wrong stride", "differs", "i += blockDim.x", "i += blockDim.x + 1"),
    ("rows too close", "differs|race|misaligned", "* pool.rowBytes;", "* (pool.rowBytes - 1);"),
    ("dead rows stay", "differs", "if (!copies && fill.deadRows", "if (false && fill.deadRows"),
    ("dead rows overrun", "out of", "begin + first; at < end;", "begin + first; at <= end;"),
    ("first row after an error", "differs", "fill.failed", "fill.dead"),
    (
        "an id by another thread",
        "differs",
        "pageRows == 0 && threadIdx.x == 0",
        "pageRows == 0 && threadIdx.x == 1",
    ),
    (
        "an id in the next place",
        "differs|out of",
        "pages()[slot] = page",
        "pages()[slot + 1] = page",
    ),
    ("freed where pages are taken", "differs|race", "(tier.tail + slot)", "(tier.head + slot)"),
    ("vectors too wide", "misaligned", "fits(16)", "fits(8)"),
    ("errors stay", "differs", "pool->errors = 0;", ""),
]


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug[0])
def test_a_planted_bug_is_seen(bug):
    _, shows, old, new, *which = bug
    source = KERNELS.read_text()
    places = [match.start() for match in re.finditer(re.escape(old), source)]
    at = places[which[0] if which else 0]

    found = fuzz(source[:at] + new + source[at + len(old) :], SCHEDULES)

    assert isinstance(found, str)
    assert re.search(f": ({shows})", found), found


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
    program = emulated_cuda.build(source)
    return subprocess.run([program, name, "50"], capture_output=True, text=True)


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
        ("constexpr int kThreads = 3;\nconstexpr int kThreads = 3;", "2 times"),
    ],
)
def test_what_the_conversion_does_not_know_is_an_error(line, words):
    with pytest.raises(emulated_cuda.ConversionError, match=words):
        emulated_cuda.convert(f"void f() {{\n{line}\n}}\n")
