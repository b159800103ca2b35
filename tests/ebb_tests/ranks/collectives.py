"""Every way in which torch.distributed writes to a tensor, as code of users has it.

Each function in WRITES overwrites or changes `t`, a contiguous tensor of four rows, and gives what
is still to be waited for; those that know no `async_op` wait themselves.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

WRITES: dict[str, Any] = {}


def writes(function: Any) -> Any:
    WRITES[function.__name__] = function
    return function


def rank() -> int:
    return dist.get_rank()


def peer() -> int:
    return 1 - rank()


def source(like: torch.Tensor, part: int = 1) -> torch.Tensor:
    """What this rank sends: other numbers on each, and none that depend on `like`'s."""
    rows = like.shape[0] // part
    numbers = torch.arange(rows * like[0].numel(), dtype=like.dtype)
    return ((numbers + 1) * (0.1 + 0.25 * rank())).reshape(rows, *like.shape[1:])


@writes
def all_reduce(t, async_op):
    return [dist.all_reduce(t, async_op=async_op)]


@writes
def all_reduce_of_the_largest(t, async_op):
    return [dist.all_reduce(t, dist.ReduceOp.MAX, async_op=async_op)]


@writes
def broadcast(t, async_op):
    return [dist.broadcast(t, 0, async_op=async_op)]


@writes
def reduce(t, async_op):
    return [dist.reduce(t, 0, async_op=async_op)]


@writes
def all_gather(t, async_op):
    return [dist.all_gather([torch.empty_like(t), t], source(t), async_op=async_op)]


@writes
def all_gather_into_views(t, async_op):
    return [dist.all_gather(list(t.chunk(2)), source(t, 2), async_op=async_op)]


@writes
def all_gather_into_tensor(t, async_op):
    return [dist.all_gather_into_tensor(t, source(t, 2), async_op=async_op)]


@writes
def gather(t, async_op):
    lists = [torch.empty_like(t), t] if rank() == 0 else None
    return [dist.gather(source(t), lists, 0, async_op=async_op)]


@writes
def scatter(t, async_op):
    lists = [source(t), source(t) * 3] if rank() == 0 else None
    return [dist.scatter(t, lists, 0, async_op=async_op)]


@writes
def reduce_scatter(t, async_op):
    return [dist.reduce_scatter(t, [source(t), source(t) * 3], async_op=async_op)]


@writes
def reduce_scatter_tensor(t, async_op):
    both = torch.cat([source(t), source(t) * 3])
    return [dist.reduce_scatter_tensor(t, both, async_op=async_op)]


@writes
def all_to_all(t, async_op):
    outputs = list(t.chunk(2))
    return [dist.all_to_all(outputs, list(source(t).chunk(2)), async_op=async_op)]


@writes
def all_to_all_single(t, async_op):
    return [dist.all_to_all_single(t, source(t), async_op=async_op)]


@writes
def all_to_all_single_by_splits(t, async_op):
    ours, theirs = ([1, 3], [1, 3]) if rank() == 0 else ([3, 1], [3, 1])
    return [dist.all_to_all_single(t, source(t), ours, theirs, async_op=async_op)]


@writes
def send_and_recv(t, async_op):
    if rank() == 0:
        dist.send(source(t), peer())
        dist.recv(t, peer())
    else:
        dist.recv(t, peer())
        dist.send(source(t), peer())
    return []


@writes
def recv_from_anybody(t, async_op):
    sent = dist.isend(source(t), peer())
    dist.recv(t)
    return [sent]


@writes
def isend_and_irecv(t, async_op):
    return [dist.irecv(t, peer()), dist.isend(source(t), peer())]


@writes
def batch_isend_irecv(t, async_op):
    operations = [
        dist.P2POp(dist.isend, source(t), peer()),
        dist.P2POp(dist.irecv, t, peer()),
    ]
    return dist.batch_isend_irecv(operations)


@writes
def coalesced_all_reduce(t, async_op):
    with dist._coalescing_manager(async_ops=async_op) as work:
        dist.all_reduce(t[:2])
        dist.all_reduce(t[2:])
    return [work] if async_op else []


@writes
def coalesced_all_gather(t, async_op):
    with dist._coalescing_manager(async_ops=async_op) as work:
        dist.all_gather_into_tensor(t[:2], source(t, 4))
        dist.all_gather_into_tensor(t[2:], source(t, 4) * 3)
    return [work] if async_op else []


@writes
def coalesced_reduce_scatter(t, async_op):
    with dist._coalescing_manager(async_ops=async_op) as work:
        dist.reduce_scatter_tensor(t[:2], source(t))
        dist.reduce_scatter_tensor(t[2:], source(t) * 3)
    return [work] if async_op else []


@writes
def all_reduce_coalesced(t, async_op):
    return [dist.all_reduce_coalesced([t[:1], t[1:]], async_op=async_op)]


@writes
def all_gather_coalesced(t, async_op):
    lists = [[torch.empty_like(t)], [t]]
    return [dist.all_gather_coalesced(lists, [source(t)], async_op=async_op)]


@writes
def broadcast_of_objects(t, async_op):
    objects = [source(t).tolist() if rank() == 0 else None]
    dist.broadcast_object_list(objects, 0)
    t.copy_(torch.tensor(objects[0]))
    return []


@writes
def functional_all_reduce_in_place(t, async_op):
    functional = torch.ops._c10d_functional
    functional.wait_tensor(functional.all_reduce_(t, "sum", "0"))
    return []


@writes
def functional_broadcast_in_place(t, async_op):
    functional = torch.ops._c10d_functional
    functional.wait_tensor(functional.broadcast_(t, 0, "0"))
    return []


@writes
def functional_all_gather_out(t, async_op):
    functional = torch.ops._c10d_functional
    functional.wait_tensor(functional.all_gather_into_tensor_out(source(t, 2), 2, "0", out=t))
    return []


def wait(works):
    for work in works:
        if work is not None:
            work.wait()


WAYS = ("sync", "async", "late")


def write(name, t, way="sync", meanwhile=None):
    """Write to `t`; "late": the other rank comes only after `meanwhile` has run on this one."""
    if way == "late" and rank() == 1:
        meanwhile and meanwhile()
        works = WRITES[name](t, True)
    else:
        works = WRITES[name](t, way != "sync")
        meanwhile and meanwhile()
    wait(works)
