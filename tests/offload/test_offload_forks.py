"""The disk tier in a child of fork()."""

from __future__ import annotations

import fork_server
import pytest
from limits import HANGS


def run(program, *arguments):
    done = fork_server.run(["-c", program, *map(str, arguments)], timeout=HANGS)
    assert done.stdout == "fine\n", done.stderr
    return done.stderr


FORKS = (
    "import os, sys, torch, ebb._testing\n"
    "torch.set_num_threads(1)\n"
    "ebb.offload.configure(disk=sys.argv[1], min_bytes=0, prefetch_bytes=0)\n"
    "policy = ebb.Policy({'aten::sin': ebb.OFFLOAD})\n"
    "def forward():\n"
    "    with ebb.region(policy): return f(x)\n"
    "def check(y):\n"
    "    g = torch.autograd.grad(y, x)[0]\n"
    "    assert torch.equal(g, torch.autograd.grad(f(x), x)[0])\n"
)


@pytest.mark.sweep
@pytest.mark.parametrize("first", ["forward", "backward", "configure"])
def test_a_forked_child_has_a_file_of_its_own(tmp_path, first):
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
        "    ebb.offload.configure(prefetch_bytes=4000)\n"
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
    assert "stays in memory" not in run(FORKS + program, tmp_path, first)


@pytest.mark.sweep
@pytest.mark.parametrize("first", ["ebb.stats()['offload']", "ebb._testing.drain_offload()"])
def test_a_fork_while_something_is_written(tmp_path, first):
    """The child has it in memory; nobody ends the write for it."""
    program = (
        "x = torch.randn(1 << 24, requires_grad=True)\n"
        "def f(x): return torch.dot(x.sin(), x)\n"
        "y = forward()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        f"    {first}\n"
        "    ebb.offload.configure(in_flight_bytes=0)\n"
        "    check(forward())\n"
        "    check(y)\n"
        "    os._exit(0)\n"
        "status = os.waitpid(child, 0)[1]\n"
        "check(y)\n"
        "print('fine' if status == 0 else status)\n"
    )
    said = run(FORKS + program, tmp_path)

    assert "on its way to or from disk when the process forked" in said


@pytest.mark.sweep
def test_a_forked_child_uses_no_room_of_its_parents(tmp_path):
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
    assert "stays in memory" not in run(FORKS + program, tmp_path)
