"""Memory that ebb gives back inside torch's CUDA allocator: see Note [Memory given back]."""

from __future__ import annotations

import json

import pytest

from ebb_tests import dry_cuda

MIB = 1 << 20


def run(memory: int, before: str = "nothing") -> dict[str, int]:
    done = dry_cuda.run("keeping_job.py", before, memory=memory, seconds=120)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, int] = json.loads(done.stdout)
    return found


def test_steps_end_because_memory_is_given_back():
    found = run(200 * MIB)

    assert found["shortages"] > 0
    assert not found["out_of_memory"]


@pytest.mark.parametrize("before", ["history", "trace"])
def test_nothing_is_given_back_while_torch_calls_python_for_each_free(before):
    """A free in the allocator would wait for the GIL, which waits for the allocator."""
    found = run(200 * MIB, before)

    assert found["shortages"] == 0
    assert found["out_of_memory"]


def test_one_large_early_piece_lets_regions_keep_what_fits():
    assert run(1000 * MIB, "large piece")["shortages"] == 0
