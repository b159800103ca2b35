"""What ebb has of its own in each thread: room for other libraries, and an end with the thread."""

from __future__ import annotations

import ctypes
import struct
import threading
from pathlib import Path

import pytest
import torch

import ebb
from ebb import _testing
from ebb_tests.exactness import resident_kib, run_process
from ebb_tests.memory_use import least_growth
from ebb_tests.other_threads import in_thread, run_in_threads

PT_TLS, PT_DYNAMIC = 7, 2
DT_FLAGS, DF_STATIC_TLS = 30, 0x10
KEPT = []  # functions that a thread may be about to return from
# libebb_cuda is loaded late and takes none of the static kind.
LIBRARIES = [Path(ebb._C.__file__), Path(ebb._C.__file__).with_name("libebb.so")]


def segments(library, kind):
    """Offset and sizes, in the file and in memory, of an ELF file's segments of a kind."""
    header = struct.unpack_from("<16sHHIQQQIHHH", library)
    assert header[0][:5] == b"\x7fELF\x02", "a 64-bit ELF file"
    start, size, count = header[5], header[9], header[10]
    for number in range(count):
        found, _, offset, _, _, in_file, in_memory, _ = struct.unpack_from(
            "<IIQQQQQQ", library, start + number * size
        )
        if found == kind:
            yield offset, in_file, in_memory


def thread_local_bytes(path):
    return sum(in_memory for _, _, in_memory in segments(path.read_bytes(), PT_TLS))


def takes_static_tls(path):
    library = path.read_bytes()
    for offset, size, _ in segments(library, PT_DYNAMIC):
        for tag, value in struct.iter_unpack("<qQ", library[offset : offset + size]):
            if tag == DT_FLAGS and value & DF_STATIC_TLS:
                return True
    return False


def loss_of(x):
    with ebb.region():
        return x.sin().exp().sum()


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name.split(".")[0])
def test_thread_locals_of_a_library_are_under_64_bytes(library):
    assert thread_local_bytes(library) < 64


def test_all_libraries_together_take_under_64_bytes_of_static_tls():
    assert any(takes_static_tls(library) for library in LIBRARIES)
    assert sum(thread_local_bytes(path) for path in LIBRARIES if takes_static_tls(path)) < 64


def test_threads_that_come_and_go_leave_no_memory_behind():
    x = torch.randn(8, requires_grad=True)

    def threads(count):
        for _ in range(count):
            run_in_threads(lambda: loss_of(x))  # the thread frees the graph

    threads(100)
    # A chunk of the arena and a table are 20 KiB a thread.
    assert least_growth(lambda: threads(200)) < 1000


@pytest.mark.sweep
@pytest.mark.parametrize("count", [1, 300])
def test_regions_one_after_the_other_leave_no_memory_behind(count):
    """What an operator with many arguments needs has memory of its own."""
    x = torch.randn(8, requires_grad=True)

    def regions():
        for _ in range(600):
            with ebb.region():
                loss = torch.cat([x.sin().exp().cos()] * count).sin().sum()
            torch.autograd.grad(loss, x)

    regions()
    assert least_growth(regions) < 1000


def resident():
    """KiB, when the allocator has given back to the system what it can."""
    ctypes.CDLL(None).malloc_trim(0)
    return resident_kib()


LARGE_GRAPH = """
import ctypes, torch, ebb

def resident():
    ctypes.CDLL(None).malloc_trim(0)
    status = open("/proc/self/status").read()
    return int(status.split("VmRSS:")[1].split()[0])

x = torch.randn(1, requires_grad=True)

def graph(count):
    with ebb.region(ebb.policies.recompute_all):
        h = x
        for _ in range(count):
            h = h * 2
    return h

graph(1000)
before = resident()
large = graph(30_000)
while_there = resident() - before
del large
print(while_there, resident() - before)
"""


@pytest.mark.not_sanitized
def test_a_large_graph_leaves_no_memory_behind():
    """In a process of its own: what other tests have freed may be there to be used again."""
    while_there, after = map(int, run_process(["-c", LARGE_GRAPH]).split())
    assert while_there > 20_000
    assert after < 8_000


def test_operators_with_many_arguments_leave_no_memory_behind():
    x = torch.randn(1, requires_grad=True)

    def join():
        with ebb.region(ebb.policies.recompute_all):
            torch.cat([x.sin()] * 20_000).sin()

    for _ in range(3):
        join()
    before = resident()
    for _ in range(60):
        join()
    assert resident() - before < 20_000


def test_many_threads_make_and_drop_what_regions_consist_of():
    """As fast as they can."""
    assert _testing.arena_objects_are_apart(4, 100_000)


def test_a_thread_that_enters_a_region_when_its_thread_locals_are_gone():
    x = torch.randn(8, requires_grad=True)
    libc = ctypes.CDLL(None)
    key = ctypes.c_uint()
    losses = []
    ended = threading.Event()

    # glibc calls the destructors of pthread keys after those of C++ thread_locals.
    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def late(_):
        losses.clear()  # the memory of the thread's graphs is for others to use now
        losses.append(loss_of(x))
        in_thread(lambda: losses.extend(loss_of(x) for _ in range(50)))
        ended.set()

    KEPT.append(late)
    assert libc.pthread_key_create(ctypes.byref(key), late) == 0

    def work():
        losses.append(loss_of(x))
        libc.pthread_setspecific(key, ctypes.c_void_p(1))

    threading.Thread(target=work).start()

    assert ended.wait(60)
    expected = torch.autograd.grad(x.sin().exp().sum(), x)[0]
    assert len(losses) == 51
    for loss in losses:
        assert torch.equal(torch.autograd.grad(loss, x)[0], expected)
