"""The disk tier: on its own on the CPU, and in a child of fork()."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import resource
import stat
import time
import warnings

import pytest
import torch

import ebb
from ebb import _testing
from ebb_tests import TESTS, fork_server
from ebb_tests.disk_tier_files import descriptor_of_the_file, full_disk
from ebb_tests.exactness import run_process, same_bits
from ebb_tests.programs.offloaded import (
    OFFLOAD_ALL,
    POLICIES,
    SINES,
    assert_exact,
    chain_of_sines,
    check_random_schedule,
    forward,
    gradients,
    overwritten,
    sine_and_cosine,
)
from ebb_tests.stand_ins import fake_accelerator
from ebb_tests.time_limits import HANGS

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path):
    """A disk tier to which CPU tensors of any size go."""
    ebb.config.update(offload_disk=tmp_path, offload_min_bytes=0)
    return tmp_path


@pytest.fixture
def x():
    return torch.randn(1000, requires_grad=True)


@pytest.mark.parametrize("settings", [{}, {"in_flight_bytes": 0, "prefetch_bytes": 0}])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("elements", [1, 1023, 3 * MIB])
def test_cpu_tensors_go_to_disk_and_come_back(disk, elements, policy, settings):
    x = torch.randn(elements, requires_grad=True)
    expected = gradients(chain_of_sines(x).sum(), x)[0]
    ebb.config.update({f"offload.{name}": value for name, value in settings.items()})
    before = ebb.stats()["offload"]
    for _ in range(3):
        assert same_bits(gradients(forward(x, policy=policy), x)[0], expected)
    if policy is OFFLOAD_ALL:
        sent = ebb.stats()["offload"]["bytes_sent"] - before["bytes_sent"]
        assert 3 * 4 * 5 * elements <= sent <= 3 * 4 * 6 * elements
    assert os.listdir(disk) == []


def test_file_has_no_name_and_only_the_owner_reads_it(disk, x):
    before = os.umask(0)  # lets all users read what a program creates without care
    try:
        y = forward(x)
        file = os.stat(descriptor_of_the_file(disk))
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.st_mode) == 0o600
    assert file.st_nlink == 0
    assert os.listdir(disk) == []
    gradients(y, x)


def test_room_in_the_file_is_reused(disk):
    x = torch.randn(100_000, requires_grad=True)
    used = []
    for _ in range(4):
        y = forward(x, 8)
        used.append(ebb.stats()["offload"]["disk_bytes_used"])
        gradients(y, x)
        while ebb.stats()["offload"]["in_flight_bytes"]:
            time.sleep(0.001)  # what was needed before it was written is still being written
    assert used == used[:1] * 4
    assert ebb.stats()["offload"]["disk_bytes_used"] == 0
    ebb.config.offload.disk = ""
    assert ebb.stats()["offload"]["disk_bytes_used"] == 0


@pytest.mark.sweep
def test_resident_memory_is_lower(tmp_path):
    program = (
        "import sys, torch, ebb\n"
        "torch.set_num_threads(1)\n"
        "if sys.argv[1]: ebb.config.update(\n"
        "    offload_disk=sys.argv[1], offload_in_flight_bytes='16MiB',\n"
        "                                      offload_prefetch_bytes='16MiB')\n"
        "def resident():\n"
        "    return int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        "x = torch.randn(1 << 20, requires_grad=True)\n"
        "start = resident()\n"
        "with ebb.region(ebb.Policy(default=ebb.OFFLOAD)):\n"
        "    y = x\n"
        "    for _ in range(40): y = y.sin()\n"
        "print(resident() - start)\n"
        "y.sum().backward()\n"
    )
    resident = {}
    for folder in ("", str(tmp_path)):
        resident[bool(folder)] = int(run_process(["-W", "ignore", "-c", program, folder]))
    assert resident[False] > 150 * MIB  # 40 tensors of 4 MiB
    assert resident[True] < 0.3 * resident[False]


@pytest.mark.parametrize("seed", range(3))
def test_random_schedules_on_disk(disk, seed):
    draw = random.Random(seed)
    x = torch.randn(5000, requires_grad=True)
    ebb.config.update(
        offload_in_flight_bytes=draw.choice([0, 40_000, MIB]),
        offload_prefetch_bytes=draw.choice([0, 40_000, MIB]),
        offload_disk_limit=draw.choice([MIB // 2, 64 * MIB]),
        offload_keep_last=draw.choice([0, 2]),
    )
    check_random_schedule(draw, x, steps=300)
    _testing.drain_offload()  # reads and writes go on by themselves
    assert ebb.stats()["offload"]["stashes"] == 0


def test_in_place_write_waits_until_the_old_state_is_on_disk(disk):
    x = torch.randn(MIB, requires_grad=True)
    with ebb.region(SINES):
        y = overwritten(x).sum()
    assert torch.equal(gradients(y, x)[0], gradients(overwritten(x).sum(), x)[0])


# What may go wrong


def test_invalid_folder_raises(tmp_path):
    before = ebb.config.to_dict()
    for folder in (tmp_path / "missing", __file__):
        with pytest.raises(ValueError, match="cannot create a file for the disk tier in"):
            ebb.config.offload.disk = folder
        assert ebb.config.to_dict() == before
    with pytest.raises(TypeError, match="disk must be a path"):
        ebb.config.offload.disk = 3
    with pytest.raises(ValueError, match="disk_limit must be"):
        ebb.config.offload.disk_limit = "much"


def test_values_come_back_after_the_folder_was_deleted(tmp_path, disk, x):
    os.rmdir(disk)
    assert_exact(forward(x), x)


def test_full_disk_tier_recomputes_or_saves(disk, x):
    ebb.config.offload.disk_limit = 8192
    y = forward(x, 5, name="full")
    counts = ebb.stats()["regions"]["full"]
    assert counts["bytes_offloaded"] >= 8000  # room that is not needed any more is used again
    assert counts["bytes_fell_back"] > 0
    assert_exact(y, x, 5)


@pytest.mark.sweep
def test_full_disk_recomputes_or_saves_and_warns(tmp_path):
    """The process may not make files as large as the tier's."""
    program = (
        "import resource, signal, sys, torch, ebb\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 22, 1 << 22))\n"
        "ebb.config.update(offload_disk=sys.argv[1])\n"
        "x = torch.randn(1 << 18, requires_grad=True)\n"
        "def f(x):\n"
        "    for _ in range(8): x = x.sin().cos()\n"
        "    return x.sum()\n"
        "for _ in range(2):\n"
        "    with ebb.region(ebb.Policy(default=ebb.OFFLOAD)): y = f(x)\n"
        "    assert ebb.stats()['total']['bytes_fell_back'] > 0\n"
        "    g = torch.autograd.grad(y, x)[0]\n"
        "    assert torch.equal(g, torch.autograd.grad(f(x), x)[0])\n"
        "print(ebb.stats()['offload']['bytes_sent'] > 0)\n"
    )
    done = fork_server.run(["-c", program, str(tmp_path)])
    assert done.stdout == "True\n", done.stderr
    assert done.stderr.count("cannot grow up to its limit") == 1


NO_NEW_THREADS = """
import ctypes, sys, threading, torch, ebb
torch.set_num_threads(1)
libc = ctypes.CDLL(None)
attributes = ctypes.create_string_buffer(128)  # larger than a pthread_attr_t
def stacks_of(nbytes):
    libc.pthread_attr_init(attributes)
    libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(nbytes))
    assert libc.pthread_setattr_default_np(attributes) == 0
stacks_of(1 << 47)  # more than the address space, so that no thread can start
try:
    threading.Thread(target=int).start()
except RuntimeError as error:
    print(error)
"""


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "pthread_setattr_default_np"), reason="a function of glibc"
)
@pytest.mark.parametrize("pinned", [None, 12_000])
def test_values_go_to_disk_and_come_back_while_no_thread_can_start(tmp_path, pinned):
    program = NO_NEW_THREADS + (
        "sys.path.append(sys.argv[2])\n"
        "from ebb_tests.programs.offloaded import assert_exact, forward\n"
        "from ebb_tests.stand_ins import fake_accelerator\n"
        "x = torch.randn(1000, requires_grad=True)\n"
        "def steps():\n"
        "    for _ in range(2): assert_exact(forward(x, 9), x, 9)\n"
        + (
            "ebb.config.update(offload_disk=sys.argv[1], offload_min_bytes=0)\n"
            if pinned is None
            else f"fake = fake_accelerator(disk=sys.argv[1], pinned_limit={pinned})\n"
            "fake.__enter__()\n"
        )
        + "steps()\n"
        "stacks_of(1 << 20)\n"
        "steps()\n"
        "print(ebb.stats()['offload']['bytes_sent'] > 0)\n"
    )
    done = fork_server.run(["-c", program, str(tmp_path), str(TESTS)], timeout=60)
    assert done.stdout == "can't start new thread\nTrue\n", done.stderr


def test_failed_write_keeps_the_tensor_in_memory(disk, x):
    with full_disk(disk, x) as caught:
        y = forward(x)
        _testing.drain_offload()
    assert len(caught) == 1  # though each write fails
    assert "stays in memory: writing 4000 bytes" in str(caught[0].message)
    assert "No space left" in str(caught[0].message)
    assert_exact(y, x)


@pytest.mark.parametrize("pinned", [None, 12_000])
def test_truncated_file_raises(tmp_path, pinned, x):
    with contextlib.ExitStack() as stack:
        if pinned is None:
            ebb.config.update(offload_disk=tmp_path, offload_min_bytes=0, offload_prefetch_bytes=0)
        else:
            stack.enter_context(fake_accelerator(disk=tmp_path, pinned_limit=pinned))
        y = forward(x, 9, name="short")
        _testing.drain_offload()
        os.ftruncate(descriptor_of_the_file(tmp_path), 0)
        with pytest.raises(RuntimeError, match="the file is shorter than it was") as raised:
            gradients(y, x)
        message = str(raised.value)
        del raised, y  # the traceback holds the graph
        assert "region 'short'" in message
        assert "aten::" in message
        assert "ebb.config.offload.disk = ''" in message


def test_many_values_share_one_file_descriptor(disk):
    """All values share one file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        x = torch.randn(10, requires_grad=True)
        gradients(forward(x, 300), x)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_new_folder_is_used_at_once(tmp_path, disk, x):
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        ebb.config.offload.disk = folder
        for _ in range(2):
            y = forward(x)
            assert ebb.stats()["offload"]["disk_bytes_used"] > 0
            assert_exact(y, x)
    _testing.drain_offload()
    ebb.config.offload.disk = ""
    with pytest.raises(AssertionError, match="no file is open"):
        descriptor_of_the_file(tmp_path)


def test_folder_may_change_while_values_are_on_disk(tmp_path, disk, x):
    (tmp_path / "b").mkdir()
    for folder in ("", tmp_path / "b", ""):
        y = forward(x)
        ebb.config.offload.disk = folder
        assert_exact(y, x)


def test_room_in_an_old_file_is_not_reused(tmp_path, disk, x):
    """It comes back after the folder has changed; nobody needs that file any more."""
    for name in ("a", "b", "c"):
        folder = tmp_path / name
        folder.mkdir()
        y = forward(x)
        _testing.drain_offload()
        ebb.config.offload.disk = folder
        gradients(y, x)
        del y
        while ebb.stats()["offload"]["stashes"]:
            pass
        y = forward(x)
        assert ebb.stats()["offload"]["disk_bytes_used"] > 0
        del y


def test_storage_freed_while_it_is_written_raises(disk):
    """An error, not a crash."""
    x = torch.randn(16 * MIB, requires_grad=True)
    with ebb.region(SINES):
        h, y = sine_and_cosine(x)
    h.untyped_storage().resize_(0)
    del h
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match="freed or resized while it was being copied"):
            gradients(y.sum(), x)
        _testing.drain_offload()


def test_failed_disk_write_copies_the_tensor_before_an_in_place_write(disk, x):
    """The old state is needed and could not leave: it is copied."""
    with full_disk(disk, x) as caught:
        with ebb.region(SINES):
            y = overwritten(x).sum()
        assert torch.equal(gradients(y, x)[0], gradients(overwritten(x).sum(), x)[0])
    assert "stays in memory: writing 4000 bytes" in str(caught[0].message)


# In a child of fork()


def run_forking(program, *arguments):
    done = fork_server.run(["-c", FORKS + program, *map(str, arguments)], timeout=HANGS)
    assert done.stdout == "fine\n", done.stderr
    return done.stderr


FORKS = (
    "import os, sys, torch, ebb._testing\n"
    "torch.set_num_threads(1)\n"
    "ebb.config.update(offload_disk=sys.argv[1], offload_min_bytes=0, offload_prefetch_bytes=0)\n"
    "policy = ebb.Policy({'aten::sin': ebb.OFFLOAD})\n"
    "def forward():\n"
    "    with ebb.region(policy): return f(x)\n"
    "def check(y):\n"
    "    g = torch.autograd.grad(y, x)[0]\n"
    "    assert torch.equal(g, torch.autograd.grad(f(x), x)[0])\n"
)


@pytest.mark.sweep
@pytest.mark.parametrize("first", ["forward", "backward", "configure"])
def test_forked_child_has_its_own_file(tmp_path, first):
    program = (
        "policy = ebb.Policy(default=ebb.OFFLOAD)\n"
        "x = torch.randn(1000, requires_grad=True)\n"
        "def f(x):\n"
        "    for _ in range(5): x = x.sin().cos()\n"
        "    return x.sum()\n"
        "for _ in range(3): check(forward())\n"
        "y = forward()\n"
        "ebb._testing.drain_offload(); ebb.stats()['offload']\n"
        "child = os.fork()\n"
        "if child == 0 and sys.argv[2] == 'configure':\n"
        "    ebb.config.update(offload_prefetch_bytes=4000)\n"
        "if child != 0 or sys.argv[2] != 'backward':\n"
        "    check(forward())\n"
        "if child == 0:\n"
        "    try:\n"
        "        check(y)\n"
        "        status = 1\n"
        "    except RuntimeError as error:\n"
        "        status = 0 if 'before the process forked' in str(error) else 2\n"
        "    check(forward())\n"
        "    os._exit(status)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "check(y)\n"
        "print('fine')\n"
    )
    assert "stays in memory" not in run_forking(program, tmp_path, first)


@pytest.mark.sweep
@pytest.mark.parametrize("first", ["ebb.stats()['offload']", "ebb._testing.drain_offload()"])
def test_fork_during_a_write_keeps_the_tensor_in_the_child(tmp_path, first):
    """The child still has the tensor in memory, and no thread there completes the write."""
    program = (
        "x = torch.randn(1 << 24, requires_grad=True)\n"
        "def f(x): return torch.dot(x.sin(), x)\n"
        "y = forward()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        f"    {first}\n"
        "    assert ebb.stats()['offload']['in_flight_bytes'] == 0\n"
        "    ebb.config.update(offload_in_flight_bytes=0)\n"
        "    check(forward())\n"
        "    check(y)\n"
        "    os._exit(0)\n"
        "status = os.waitpid(child, 0)[1]\n"
        "check(y)\n"
        "print('fine' if status == 0 else status)\n"
    )
    said = run_forking(program, tmp_path)

    assert "on its way to or from disk when the process forked" in said


@pytest.mark.sweep
def test_forked_child_does_not_reuse_room_of_its_parent(tmp_path):
    """Neither what was free nor what it drops itself."""
    program = (
        "x = torch.randn(1000, requires_grad=True)\n"
        "def f(x): return x.sin().cos().sum()\n"
        "y = forward()\n"
        "ebb._testing.drain_offload()\n"
        "check(forward())\n"
        "while ebb.stats()['offload']['in_flight_bytes']: pass\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    ebb.stats()['offload']\n"
        "    del y\n"
        "    z = forward()\n"
        "    ebb._testing.drain_offload()\n"
        "    check(z)\n"
        "    os._exit(0)\n"
        "status = os.waitpid(child, 0)[1]\n"
        "check(y)\n"
        "print('fine' if status == 0 else status)\n"
    )
    assert "stays in memory" not in run_forking(program, tmp_path)
