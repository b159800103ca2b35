"""Snapshots of CUDA's memory name the regions of replays."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from ebb_tests import dry_cuda

# In a process of its own, since ebb gives no memory back once history is recorded.
PROGRAM = """
import json, torch, ebb
memory = torch.cuda.memory
memory._record_memory_history(global_record_annotations=True)
x = torch.ones(64, 64, device="cuda", requires_grad=True)
with ebb.region(name="layers.3"):
    loss = x.sin().exp().sum()
loss.backward()
print(json.dumps([found["name"] for found in memory._snapshot()["external_annotations"]]))
"""


def test_snapshots_name_the_region_of_each_replay():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | dry_cuda.environment(),
        capture_output=True,
        text=True,
        check=True,
    )

    names = json.loads(done.stdout)
    assert {"ebb::replay layers.3 aten::sin.default"} <= set(names)
