"""The memory that a job may use, for `EBB_BUDGET=auto`."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import pytest
import torch

from ebb._launch.memory_limit import Limit, free, limit_of, there_is
from ebb._support import devices

MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # of the machine
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_accelerator(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)


def test_limit_is_read_from_the_budget():
    assert limit_of("auto:20GiB") == Limit(20 * 2**30)
    assert limit_of(" AUTO : 1MiB").nbytes(CPU) == 2**20


@pytest.mark.parametrize("text", ["", "40%", "20GiB", "automatic", "0.4"])
def test_other_budgets_give_no_limit(text):
    assert limit_of(text) is None


@pytest.mark.parametrize("text", ["auto:", "auto:0", "auto:banana", "auto:-3", "auto:40%"])
def test_invalid_limit_raises(text):
    with pytest.raises(ValueError, match="ebb: "):
        limit_of(text)


def limit_in(tmp_path, own, files):
    """`there_is` in these control groups; `files`: text by path."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    (tmp_path / "own").write_text(own + "\n")
    return there_is(CPU, str(tmp_path), str(tmp_path / "own"))


@pytest.mark.parametrize(
    ("own", "files"),
    [
        ("0::/", {"memory.max": f"{2**30}"}),
        ("0::/slurm/job/step", {"slurm/job/memory.max": f"{2**30}", "memory.max": "max"}),
        ("0::/a/b", {"a/b/memory.max": f"{2**30}", "a/memory.max": f"{2**31}"}),
        ("0::/a/b", {"a/b/memory.max": f"{2**31}", "a/memory.max": f"{2**30}"}),
        ("0::/not/mounted", {"memory.max": f"{2**30}"}),
        ("5:cpu:/c\n4:hugetlb,memory:/a/b\n0::/", {"memory/a/memory.limit_in_bytes": f"{2**30}"}),
        ("4:memory:/a", {"memory/memory.limit_in_bytes": f"{2**30}"}),
    ],
)
def test_smallest_limit_of_the_control_groups_of_the_process_counts(tmp_path, own, files):
    assert limit_in(tmp_path, own, files) == 2**30


@pytest.mark.parametrize(
    "files",
    [
        *({"a/memory.max": text} for text in ("max", f"{2**63 - 4096}", "", "0")),
        {"b/memory.max": f"{2**30}", "a/b/memory.max": f"{2**30}"},  # of other control groups
    ],
)
def test_without_a_limit_the_memory_of_the_machine_counts(tmp_path, files):
    assert limit_in(tmp_path, "0::/a", files) == MEMORY
    assert there_is(CPU, str(tmp_path), str(tmp_path / "none")) == MEMORY


def test_a_tenth_is_left_free():
    assert limit_of("auto").nbytes(CPU) == int(0.9 * there_is(CPU))


def test_address_space_limit_lowers_free_memory():
    most = f"resource.setrlimit(resource.RLIMIT_AS, (used + {2**28}, resource.RLIM_INFINITY))"
    code = (
        "import resource, torch; from ebb._launch.memory_limit import free, there_is\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "cpu = torch.device('cpu'); print(2**28 < free(cpu) <= there_is(cpu))\n"
        f"{most}; print(2**27 < free(cpu) <= 2**28)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", "True"]


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_memory_of_the_accelerator_counts_once_it_is_initialized(monkeypatch, kind):
    asked = []
    device, module = torch.device(kind), types.SimpleNamespace(is_available=lambda: False)
    module.is_initialized = lambda: False

    def memory(device=None):
        asked.append(kind)
        return 2**30, 2**31

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: device)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", memory)
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda _: 2**20)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda _: 2**19)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(devices, "allowed_of", lambda _: 2**40)

    assert there_is(CPU) < 2**60
    assert asked == []
    assert there_is(device) == 2**30 + 2**20
    assert free(device) == 2**30 + 2**19
    module.is_initialized = lambda: True
    assert there_is(CPU) == 2**30 + 2**20


def test_memory_fraction_of_a_cuda_device_is_a_limit(monkeypatch):
    device, properties = torch.device("cuda"), types.SimpleNamespace(total_memory=2**31)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda _: (2**31, 2**31))
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda _: 2**20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 0.25)

    assert there_is(device) == 2**29
    assert free(device) == 2**29 - 2**20
