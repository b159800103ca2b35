"""Two gloo ranks in one process.

One rank is not enough: in a group of one rank most collectives change nothing.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ebb_tests.other_threads import together
from ebb_tests.time_limits import HANGS

Group = Any


def two_ranks() -> list[Group]:
    """Process groups 0 and 1 of one world. Their collectives run on gloo's own threads."""
    store = dist.HashStore()
    groups: list[Any] = [None, None]

    def make(rank: int) -> None:
        group = dist.ProcessGroup(store, rank, 2)
        backend = dist.PrefixStore("gloo", store)
        gloo = dist.ProcessGroupGloo(backend, rank, 2, timedelta(seconds=HANGS))
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        group._set_group_name(f"two ranks {rank}")
        torch._C._distributed_c10d._register_process_group(group.group_name, group)
        groups[rank] = group

    together(make, 2)
    return groups
