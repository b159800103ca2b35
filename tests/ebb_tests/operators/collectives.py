"""Each operator of torch's distributed packages, called on two gloo ranks in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ebb_tests.operators.hidden_writes import Finding, contents
from ebb_tests.operators.inputs import arguments_by_name, tensors_of
from ebb_tests.ranks.in_one_process import Group, two_ranks

Made = Any  # `Work` objects and tensors to wait for


def t(rank: int, *shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape) * (rank + 1)


def functional(name: str) -> Callable[..., Any]:
    return getattr(torch.ops._c10d_functional, name)


def with_autograd(name: str) -> Callable[..., Any]:
    return getattr(torch.ops._c10d_functional_autograd, name)


# Calls that each rank makes. r: rank, g: process group, n: name of the group.
CALLS: tuple[Callable[[int, Group, str], Made], ...] = (
    lambda r, g, n: g.allreduce([t(r, 4)]),
    lambda r, g, n: g.allreduce_coalesced([t(r, 4), t(r, 2)]),
    lambda r, g, n: g.broadcast(t(r, 4), 0),
    lambda r, g, n: g.reduce(t(r, 4), 0),
    lambda r, g, n: g.allgather([[t(5, 4), t(6, 4)]], [t(r, 4)]),
    lambda r, g, n: g._allgather_base(t(5, 8), t(r, 4)),
    lambda r, g, n: g.allgather_coalesced([[t(5, 4)], [t(6, 4)]], [t(r, 4)]),
    lambda r, g, n: g.allgather_into_tensor_coalesced([t(5, 8)], [t(r, 4)]),
    lambda r, g, n: g.reduce_scatter([t(5, 4)], [[t(r, 4), t(r, 4)]]),
    lambda r, g, n: g._reduce_scatter_base(t(5, 4), t(r, 8)),
    lambda r, g, n: g.reduce_scatter_tensor_coalesced([t(5, 4)], [t(r, 8)]),
    lambda r, g, n: g.gather([] if r else [[t(5, 4), t(6, 4)]], [t(r, 4)]),
    lambda r, g, n: g.scatter([t(5, 4)], [] if r else [[t(r, 4), t(r, 4)]]),
    lambda r, g, n: g.alltoall_base(t(5, 4), t(r, 4), [2, 2], [2, 2]),
    lambda r, g, n: g.barrier(),
    lambda r, g, n: g.send([t(r, 4)], 0, 3) if r else g.recv([t(5, 4)], 1, 3),
    lambda r, g, n: g.send([t(r, 4)], 0, 4) if r else g.recv_anysource([t(5, 4)], 4),
    lambda r, g, n: functional("all_reduce")(t(r, 4), "sum", n),
    lambda r, g, n: functional("all_reduce_")(t(r, 4), "sum", n),
    lambda r, g, n: functional("all_reduce_coalesced")([t(r, 4)], "sum", n),
    lambda r, g, n: functional("all_reduce_coalesced_")([t(r, 4)], "sum", n),
    lambda r, g, n: functional("all_gather_into_tensor")(t(r, 4), 2, n),
    lambda r, g, n: functional("all_gather_into_tensor_out")(t(r, 4), 2, n, out=t(5, 8)),
    lambda r, g, n: functional("all_gather_into_tensor_coalesced")([t(r, 4)], 2, n),
    lambda r, g, n: functional("reduce_scatter_tensor")(t(r, 4), "sum", 2, n),
    lambda r, g, n: functional("reduce_scatter_tensor_out")(t(r, 4), "sum", 2, n, out=t(5, 2)),
    lambda r, g, n: functional("reduce_scatter_tensor_coalesced")([t(r, 4)], "sum", 2, n),
    lambda r, g, n: functional("all_to_all_single")(t(r, 4), [2, 2], [2, 2], n),
    lambda r, g, n: functional("broadcast")(t(r, 4), 0, n),
    lambda r, g, n: functional("broadcast_")(t(r, 4), 0, n),
    lambda r, g, n: with_autograd("all_gather_into_tensor")(t(r, 4), 2, n),
    lambda r, g, n: with_autograd("reduce_scatter_tensor")(t(r, 4), "sum", 2, n),
    lambda r, g, n: with_autograd("all_to_all_single")(t(r, 4), [2, 2], [2, 2], n),
    lambda r, g, n: torch.ops._dtensor.shard_dim_alltoall(t(r, 4, 4), 0, 1, n),
)
if torch.__version__ >= (2, 12):
    CALLS += (
        lambda r, g, n: torch.ops.c10d.check_for_nan(t(r, 4)),
        lambda r, g, n: g.alltoall([t(5, 4), t(6, 4)], [t(r, 4), t(r, 4)]),
        lambda r, g, n: functional("isend" if r else "irecv")(t(r, 4), 1 - r, 5, n),
        lambda r, g, n: functional("batch_p2p_ops")(
            ["isend" if r else "irecv"], [1 - r], [6], [t(r, 4)], n
        ),
    )
if torch.__version__ >= (2, 15):
    CALLS += (
        lambda r, g, n: functional("wait_tensors")([functional("all_reduce")(t(r, 4), "sum", n)]),
    )


class Remember(TorchDispatchMode):
    """Records each collective's tensor arguments, and copies of their contents before the call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, dict[str, list[torch.Tensor]], dict[str, list[Any]]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name
        if "c10d" in name or "dtensor" in name:
            named = arguments_by_name(name, args, kwargs)
            tensors = {key: tensors_of(value) for key, value in named.items()}
            before = {key: [contents(x) for x in some] for key, some in tensors.items()}
            self.calls.append((name, tensors, before))
        return func(*args, **kwargs)


def wait_for(made: Made) -> None:
    for each in tree_leaves(made):
        if isinstance(each, torch.Tensor):
            torch.ops._c10d_functional.wait_tensor(each)
        elif each is not None:
            each.wait()


def run(call: Callable[[int, Group, str], Made], rank: int, group: Group) -> None:
    wait_for(call(rank, group, group.group_name))


def examine_collectives() -> dict[str, Finding]:
    """Runs each call of `CALLS` on two threads, one for each rank, and finds written arguments."""
    findings: dict[str, Finding] = {}
    groups = two_ranks()
    for call in CALLS:
        for rank in range(2):
            other = threading.Thread(target=run, args=(call, 1 - rank, groups[1 - rank]))
            other.start()
            with Remember() as remembered:
                run(call, rank, groups[rank])
            other.join()
            for name, tensors, before in remembered.calls:
                findings.setdefault(name, Finding()).note(name, tensors, before, "two ranks")
    return findings
