"""Pinned memory by CUDA's runtime, for which a small library stands in."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

RUNTIME = r"""
#include <stdio.h>
#include <stdlib.h>
int cudaHostRegister(void* memory, size_t nbytes, unsigned flags) {
  ((char*)memory)[nbytes - 1] = 1;
  printf("register %zu\n", nbytes);
  return getenv("FAKE_FULL") ? 2 : 0;
}
int cudaHostUnregister(void* memory) { return puts("unregister") < 0; }
int cudaGetLastError(void) { return puts("forget the error") < 0; }
int cudaDeviceGetPCIBusId(char* id, int length, int device) {
  snprintf(id, length, device == 0 ? "%s" : "FFFF:00:00.%d", getenv("FAKE_BUS"), device);
  return 0;
}
"""
PROGRAM = """
import sys, ebb
nodes = [ebb._C._testing.pinned_memory_node(int(sys.argv[1]), device) for device in (0, 0, 1)]
print("nodes", nodes, flush=True)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runtime")
    source = folder / "runtime.c"
    source.write_text(RUNTIME)
    library = folder / "libcudart.so.0"
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def run(library: Path, nbytes: int, bus: str, **environment: str) -> tuple[list[str], str]:
    preload = f"{os.environ.get('LD_PRELOAD', '')} {library}".strip()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(nbytes)],
        env=os.environ | {"LD_PRELOAD": preload, "FAKE_BUS": bus} | environment,
        capture_output=True,
        text=True,
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


def test_pinned_memory_is_of_whole_pages_near_the_device(library):
    with device_of_node("0") as device:
        printed, errors = run(library, 5000, device)

    each = ["register 8192", "unregister"]
    assert printed == [*each, *each, *each, "nodes [0, 0, -1]"], errors


def test_where_the_system_names_no_node_none_is_preferred(library):
    with device_of_node("-1") as device:
        printed, errors = run(library, 4096, device)

    assert printed[-1] == "nodes [-1, -1, -1]", errors


def test_what_cuda_refuses_to_pin_leaves_no_error_behind(library):
    """torch would take the error that is left for that of its next kernel."""
    printed, errors = run(library, 4096, "FFFF:00:00.0", FAKE_FULL="1")

    assert printed[:2] == ["register 4096", "forget the error"], errors
