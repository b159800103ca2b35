"""Every way in which torch.distributed writes to a tensor, as code of users has it.

Each entry of WRITES overwrites or changes `t`, a contiguous tensor of four rows, and returns what
is still to be waited for. Entries that ignore `a`, which is async_op, wait themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def rank() -> int:
    return dist.get_rank()


def peer() -> int:
    return 1 - rank()


def source(like: Tensor, part: int = 1) -> Tensor:
    """The tensor that this rank sends. Its numbers differ between ranks, and are not `like`'s."""
    rows = like.shape[0] // part
    numbers = torch.arange(rows * like[0].numel(), dtype=like.dtype)
    return ((numbers + 1) * (0.1 + 0.25 * rank())).reshape(rows, *like.shape[1:])


def two(t: Tensor) -> list[Tensor]:
    return [source(t), source(t) * 3]


def on_first(parts: list[Any]) -> list[Any] | None:
    return parts if rank() == 0 else None


def waited_for(tensor: Tensor) -> list[Any]:
    functional.wait_tensor(tensor)
    return []


functional: Any = torch.ops._c10d_functional


def send_and_recv(t: Tensor, _async_op: bool) -> list[Any]:
    calls = [lambda: dist.send(source(t), peer()), lambda: dist.recv(t, peer())]
    for call in calls if rank() == 0 else reversed(calls):
        call()
    return []


def recv_from_anybody(t: Tensor, _async_op: bool) -> list[Any]:
    sent = dist.isend(source(t), peer())
    dist.recv(t)
    return [sent]


def batch_isend_irecv(t: Tensor, _async_op: bool) -> list[Any]:
    sent, received = (dist.isend, source(t)), (dist.irecv, t)
    return dist.batch_isend_irecv([dist.P2POp(*one, peer()) for one in (sent, received)])


def coalesced(collective: Callable[..., Any], *arguments: Callable[[Tensor], list[Any]]) -> Any:
    """One collective for each half of `t`. `arguments`: further ones, for each of the halves."""

    def call(t: Tensor, async_op: bool) -> list[Any]:
        with dist._coalescing_manager(async_ops=async_op) as work:
            for half, *rest in zip(t.chunk(2), *(of(t) for of in arguments), strict=True):
                collective(half, *rest)
        return [work] if async_op else []

    return call


def broadcast_of_objects(t: Tensor, _async_op: bool) -> list[Any]:
    objects = [source(t).tolist() if rank() == 0 else None]
    dist.broadcast_object_list(objects, 0)
    t.copy_(torch.tensor(objects[0]))
    return []


WRITES: dict[str, Callable[[Tensor, bool], list[Any]]] = {
    "all_reduce": lambda t, a: [dist.all_reduce(t, async_op=a)],
    "all_reduce of the largest": lambda t, a: [dist.all_reduce(t, dist.ReduceOp.MAX, async_op=a)],
    "broadcast": lambda t, a: [dist.broadcast(t, 0, async_op=a)],
    "reduce": lambda t, a: [dist.reduce(t, 0, async_op=a)],
    "all_gather": lambda t, a: [dist.all_gather([torch.empty_like(t), t], source(t), async_op=a)],
    "all_gather into views": lambda t, a: [
        dist.all_gather(list(t.chunk(2)), source(t, 2), async_op=a)
    ],
    "all_gather_into_tensor": lambda t, a: [
        dist.all_gather_into_tensor(t, source(t, 2), async_op=a)
    ],
    "gather": lambda t, a: [
        dist.gather(source(t), on_first([torch.empty_like(t), t]), 0, async_op=a)
    ],
    "scatter": lambda t, a: [dist.scatter(t, on_first(two(t)), 0, async_op=a)],
    "reduce_scatter": lambda t, a: [dist.reduce_scatter(t, two(t), async_op=a)],
    "reduce_scatter_tensor": lambda t, a: [
        dist.reduce_scatter_tensor(t, torch.cat(two(t)), async_op=a)
    ],
    "all_to_all": lambda t, a: [
        dist.all_to_all(list(t.chunk(2)), list(source(t).chunk(2)), async_op=a)
    ],
    "all_to_all_single": lambda t, a: [dist.all_to_all_single(t, source(t), async_op=a)],
    "all_to_all_single by splits": lambda t, a: [
        dist.all_to_all_single(
            t, source(t), *([[1, 3]] * 2 if rank() == 0 else [[3, 1]] * 2), async_op=a
        )
    ],
    "send and recv": send_and_recv,
    "recv from anybody": recv_from_anybody,
    "isend and irecv": lambda t, a: [dist.irecv(t, peer()), dist.isend(source(t), peer())],
    "batch_isend_irecv": batch_isend_irecv,
    "coalesced all_reduce": coalesced(dist.all_reduce),
    "coalesced all_gather": coalesced(
        dist.all_gather_into_tensor, lambda t: [source(t, 4), source(t, 4) * 3]
    ),
    "coalesced reduce_scatter": coalesced(dist.reduce_scatter_tensor, two),
    "all_reduce_coalesced": lambda t, a: [dist.all_reduce_coalesced([t[:1], t[1:]], async_op=a)],
    "all_gather_coalesced": lambda t, a: [
        dist.all_gather_coalesced([[torch.empty_like(t)], [t]], [source(t)], async_op=a)
    ],
    "broadcast of objects": broadcast_of_objects,
    "functional all_reduce_": lambda t, a: waited_for(functional.all_reduce_(t, "sum", "0")),
    "functional broadcast_": lambda t, a: waited_for(functional.broadcast_(t, 0, "0")),
    "functional all_gather, out": lambda t, a: waited_for(
        functional.all_gather_into_tensor_out(source(t, 2), 2, "0", out=t)
    ),
}


def reduced(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def reduced_later(x: Tensor) -> Tensor:
    dist.all_reduce(x, async_op=True).wait()
    return x


def into(collective: Callable[[Tensor, Tensor], Any], rows: float) -> Callable[[Tensor], Tensor]:
    """The collective with a new result, which has so many rows for each row of the input."""

    def call(x: Tensor) -> Tensor:
        received = x.new_empty(int(rows * len(x)), *x.shape[1:])
        collective(received, x.contiguous())
        return received

    return call


def wait(works: Iterable[Any]) -> None:
    for work in works:
        if work is not None:
            work.wait()


WAYS = ("sync", "async", "late")


def write(
    name: str, t: Tensor, way: str = "sync", meanwhile: Callable[[], None] = lambda: None
) -> None:
    """Write to `t`; "late": the other rank comes only after `meanwhile` has run on this one."""
    if way == "late" and rank() == 1:
        meanwhile()
        works = WRITES[name](t, True)
    else:
        works = WRITES[name](t, way != "sync")
        meanwhile()
    wait(works)
