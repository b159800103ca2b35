"""Pinned memory by CUDA's runtime, for which a small library stands in."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebb_tests import fake_cuda, fork_server

RUNTIME = r"""
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
int cudaHostRegister(void* memory, size_t nbytes, unsigned flags) {
  ((char*)memory)[nbytes - 1] = 1;
  printf("register %zu\n", nbytes);
  return getenv("FAKE_FULL") ? 2 : 0;
}
int cudaHostUnregister(void* memory) { return puts("unregister") < 0; }
int cudaGetLastError(void) { return puts("forget the error") < 0; }
static int asking = 0;
int cudaDeviceGetPCIBusId(char* id, int length, int device) {
  if (__atomic_add_fetch(&asking, 1, __ATOMIC_SEQ_CST) > 1) puts("two ask at a time");
  printf("where is %d\n", device);
  fflush(stdout);
  usleep(100000);
  __atomic_sub_fetch(&asking, 1, __ATOMIC_SEQ_CST);
  if (getenv("FAKE_LOST")) return 101;
  snprintf(id, length, device == 0 ? "%s" : "FFFF:00:00.%d", getenv("FAKE_BUS"), device);
  return 0;
}
"""
PROGRAM = """
import sys, ebb._testing
testing = ebb._testing
nodes = [
    testing.preferred_node(testing.pinned_memory(int(sys.argv[1]), device)) for device in (0, 0, 1)
]
print("nodes", nodes, flush=True)
"""


def compiled(code: str, library: Path) -> Path:
    source = library.with_name("source.c")
    source.write_text(code)
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return library


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    fake_cuda.skip_where_torch_has_the_real_one()
    return compiled(RUNTIME, tmp_path_factory.mktemp("runtime") / "libcudart.so.0")


def run(
    library: Path, nbytes: int, bus: str, program: str = PROGRAM, **environment: str
) -> tuple[list[str], str]:
    preload = f"{os.environ.get('LD_PRELOAD', '')} {library}".strip()
    done = fork_server.run(
        ["-c", program, str(nbytes)],
        env=os.environ | {"LD_PRELOAD": preload, "FAKE_BUS": bus} | environment,
    )
    return done.stdout.splitlines(), done.stderr


@contextlib.contextmanager
def device_of_node(node: str) -> Iterator[str]:
    """What leads from the system's folder of PCI devices to one of our own."""
    devices = Path("/sys/bus/pci/devices")
    if not devices.is_dir():
        pytest.skip("the system shows no PCI devices")
    with tempfile.TemporaryDirectory(prefix="ebb", dir="/tmp") as device:
        Path(device, "numa_node").write_text(node + "\n")
        yield "../" * (len(devices.resolve().parts) - 1) + device.lstrip("/")


def test_pinned_memory_has_whole_pages_near_the_device(library):
    with device_of_node("0") as device:
        printed, errors = run(library, 5000, device)

    each = ["register 8192", "unregister"]
    first, second = ["where is 0", *each], ["where is 1", *each]
    assert printed == [*first, *each, *second, "nodes [0, 0, -1]"], errors


@pytest.mark.sweep
def test_unknown_place_of_a_device_leaves_no_cuda_error(library):
    printed, errors = run(library, 4096, "", FAKE_LOST="1")

    assert printed[:3] == ["where is 0", "forget the error", "register 4096"], errors
    assert printed[-1] == "nodes [-1, -1, -1]", errors


SEVERAL_THREADS = """
import threading
import ebb._testing
pin = ebb._testing.pinned_memory
threads = [threading.Thread(target=pin, args=(4096, device)) for device in (0, 1)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.sweep
def test_one_thread_at_a_time_asks_for_places_of_devices(library):
    printed, errors = run(library, 4096, "FFFF:00:00.0", program=SEVERAL_THREADS)

    assert {"where is 0", "where is 1"} < {*printed}, errors
    assert "two ask at a time" not in printed


@pytest.mark.parametrize(
    ("node", "spelled", "nodes"),
    [
        ("0", str.upper, [0, 0, -1]),  # the system writes names of devices in lower case
        ("-1", str, [-1, -1, -1]),
        ("1024", str, [-1, -1, -1]),
        ("1000000", str, [-1, -1, -1]),
    ],
)
def test_preferred_node_is_that_of_the_system(library, node, spelled, nodes):
    with device_of_node(node) as device:
        printed, errors = run(library, 4096, spelled(device))

    assert printed[-1] == f"nodes {nodes}", errors


@pytest.mark.sweep
def test_refused_registration_leaves_no_cuda_error(library):
    """torch would take the error that is left for that of its next kernel."""
    printed, errors = run(library, 4096, "FFFF:00:00.0", FAKE_FULL="1")

    assert printed[1:3] == ["register 4096", "forget the error"], errors
    assert len(printed) == 3, "it is neither used nor unregistered"


@pytest.fixture(scope="module")
def cuda(tmp_path_factory):
    """Beside the runtime, torch's guard for CUDA; the runtime's name is as in torch's archives."""
    return fake_cuda.build(tmp_path_factory.mktemp("cuda"))


@pytest.mark.sweep
def test_memory_is_registered_on_its_own_device(cuda):
    """Elsewhere the registration would make a context, in each rank the first of all on GPU 0."""
    printed = fake_cuda.run(cuda, "testing.pinned_memory(4096, 1)")

    assert printed[0].startswith("register 4096 on 1")


def test_runtime_linked_into_torch_comes_first(tmp_path, library):
    """torch may be linked with it, and another package bring a library of its own."""
    of_torch = shutil.copy(library, tmp_path / "libtorch_stand_in.so")
    others = (
        "#include <stdio.h>\n"
        'int cudaHostRegister(void* m, size_t n, unsigned f) { return puts("of others") < 0; }\n'
        "int cudaHostUnregister(void* memory) { return 0; }\n"
        "int cudaGetLastError(void) { return 0; }\n"
    )
    of_others = compiled(others, tmp_path / "libcudart.so.0")
    program = f"import ctypes\nctypes.CDLL({str(of_others)!r})\n" + PROGRAM
    printed, errors = run(of_torch, 4096, "FFFF:00:00.0", program)

    assert "register 4096" in printed, errors
    assert "of others" not in printed


MANY = """
def mapped():
    return int(open("/proc/self/statm").read().split()[0]) * 4096

before = mapped()
for _ in range(20):
    testing.pinned_memory(16 << 20, 0)
print("grown", (mapped() - before) >> 20)
"""


def test_freed_memory_is_unmapped(cuda):
    grown = int(fake_cuda.run(cuda, MANY)[-1].removeprefix("grown "))

    assert grown < 100


SHOWN_BY_THE_SYSTEM = """
def flags(memory):
    start = f"{memory.data_ptr():x}-"
    lines = iter(open("/proc/self/smaps"))
    next(line for line in lines if line.startswith(start))
    return next(line for line in lines if line.startswith("VmFlags")).split()

small, large = testing.pinned_memory(4096, 0), testing.pinned_memory(64 << 20, 0)
print("wf" in flags(small), "hg" in flags(small), "wf" in flags(large), "hg" in flags(large))
"""


def test_large_memory_has_huge_pages_and_is_touched_before_registration(cuda):
    printed = fake_cuda.run(cuda, SHOWN_BY_THE_SYSTEM)

    assert printed[0] == "register 4096 on 0, 0% there"
    threads = len(os.sched_getaffinity(0)) > 1
    assert not threads or printed[1] == f"register {64 << 20} on 0, 100% there"
    huge = Path("/sys/kernel/mm/transparent_hugepage").exists()
    assert printed[2] == f"True False True {huge}"


FORK = """
memory = testing.pinned_memory(8192, 0).fill_(7)
child = os.fork()
if child == 0:
    print("child", memory.max().item(), flush=True)
    del memory
    os._exit(0)
print("parent", os.waitpid(child, 0)[1], memory.min().item(), flush=True)
"""


def test_forked_child_has_no_pinned_memory_and_unregisters_none(cuda):
    printed = fake_cuda.run(cuda, FORK)

    assert printed[1:] == ["child 0", "parent 0 7", "unregister"]


CAPTURES = """
for which, error in ((0, 0), (7, 0), (0, 906), (7, 900), (0, 710), (0, 0)):
    cuda.fake_cuda_capture(which, error)
    print(which, error, *testing.cuda_capture(0))
"""


def test_capture_of_the_cuda_runtime(cuda):
    """Where another capture is why it does not tell, it counts as one; no error is left behind."""
    printed = fake_cuda.run(cuda, CAPTURES)

    forgotten = ["forget the error"] * 2
    assert printed == [
        "0 0 False 1",
        "7 0 True 7",
        *forgotten,
        "0 906 True 1",
        *forgotten,
        "7 900 True 7",
        *forgotten,
        "0 710 False 1",
        "0 0 False 1",
    ]
