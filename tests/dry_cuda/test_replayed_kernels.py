"""A replay launches kernels of the forward, as the runtime's log shows: their names, grids, blocks
and shared memory. Alignment and workspaces change these, and with them the bits."""

from __future__ import annotations

import json

from ebb_tests import dry_cuda

# ebb fills the bytes of a buffer that the forward wrote and the replay must not write.
FILLS_BYTES = "FillFunctorIhE"


def test_replays_launch_kernels_of_the_forward(tmp_path):
    done = dry_cuda.run("replayed_kernels.py", log=tmp_path / "log")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])

    assert found["compared"] > 200
    others = [
        (name, launch)
        for name, launches in found["different"].items()
        for launch in launches
        if FILLS_BYTES not in launch
    ]
    assert others == []
