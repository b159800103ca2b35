"""A training job: ``python training_job.py STEPS [KIND LAYERS [synchronised]]``.

Prints the allocator's statistics after each step, and the step's launches, in JSON. An error ends
it as it ends any job.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from ebb_tests import dry_cuda
from ebb_tests.dry_cuda.models import BATCH, LAYERS, LENGTH, WIDTH, Stack


def main(steps: int, kind: str = "GPT", layers: int = LAYERS, synchronised: str = "") -> None:
    torch.manual_seed(0)
    model = Stack(kind, layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows: list[dict[str, Any]] = []
    for _ in range(steps):
        x = torch.randn(BATCH, LENGTH, WIDTH, device="cuda")
        launches = dry_cuda.launches()
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
        if synchronised:
            torch.cuda.synchronize()
        counts = torch.cuda.memory_stats()
        rows.append(
            {
                "launches": dry_cuda.launches() - launches,
                "allocated": counts["allocated_bytes.all.current"],
                "allocated_peak": counts["allocated_bytes.all.peak"],
                "reserved": counts["reserved_bytes.all.current"],
                "reserved_peak": counts["reserved_bytes.all.peak"],
            }
        )
    print(json.dumps(rows))


if __name__ == "__main__":
    steps, *others = sys.argv[1:]
    kind, layers, synchronised = [*others, *["GPT", LAYERS, ""][len(others) :]]
    main(int(steps), str(kind), int(layers), str(synchronised))
