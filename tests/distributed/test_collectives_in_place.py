"""Collectives that write into what a region has computed, on two gloo ranks, as threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_calls import two_ranks
from exactness import POLICIES, same_bits

import ebb

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="torch was built without gloo"
)

Tensor = torch.Tensor


def other(rank: int, *shape: int) -> Tensor:
    return torch.full(shape or (4,), 0.25 * (rank + 1), dtype=torch.float64)


# What rank r does with a computed tensor h of four elements, in its group g.
COLLECTIVES: dict[str, Callable[[Any, int, Tensor], Any]] = {
    "allreduce": lambda g, r, h: g.allreduce([h]),
    "allreduce of a view": lambda g, r, h: g.allreduce([h[1:3]]),
    "allreduce_coalesced": lambda g, r, h: g.allreduce_coalesced([h, other(r)]),
    "broadcast": lambda g, r, h: g.broadcast(h, 0),
    "reduce": lambda g, r, h: g.reduce(h, 0),
    "allgather": lambda g, r, h: g.allgather([[h, other(r)]], [other(r)]),
    "allgather of it": lambda g, r, h: g.allgather([[other(r), other(r)]], [h]),
    "_allgather_base": lambda g, r, h: g._allgather_base(h, other(r, 2)),
    "allgather_coalesced": lambda g, r, h: g.allgather_coalesced([[h], [other(r)]], [other(r)]),
    "allgather_into_tensor_coalesced":
        lambda g, r, h: g.allgather_into_tensor_coalesced([h], [other(r, 2)]),
    "reduce_scatter": lambda g, r, h: g.reduce_scatter([h], [[other(r), other(r)]]),
    "_reduce_scatter_base": lambda g, r, h: g._reduce_scatter_base(h, other(r, 8)),
    "reduce_scatter_tensor_coalesced":
        lambda g, r, h: g.reduce_scatter_tensor_coalesced([h], [other(r, 8)]),
    "gather": lambda g, r, h: g.gather([] if r else [[h, other(r)]], [other(r)]),
    "scatter": lambda g, r, h: g.scatter([h], [] if r else [[other(r), other(r)]]),
    "alltoall": lambda g, r, h: g.alltoall([h, other(r)], [other(r), other(r)]),
    "alltoall_base": lambda g, r, h: g.alltoall_base(h, other(r), [2, 2], [2, 2]),
    "recv": lambda g, r, h: g.send([other(r)], 0, 3) if r else g.recv([h], 1, 3),
    "recv_anysource": lambda g, r, h: g.send([other(r)], 0, 4) if r else g.recv_anysource([h], 4),
}  # fmt: skip


def at_once(g: Any, rank: int, x: Tensor, collective: Callable[..., Any]) -> Tensor:
    h = x * 2
    collective(g, rank, h.detach()).wait()
    return h.sin() * x


def saved_before(g: Any, rank: int, x: Tensor, collective: Callable[..., Any]) -> Tensor:
    """Eager's saved h is the same memory, and no version moves: its backward sees the write."""
    h = x * 2
    y = h.sin()
    collective(g, rank, h.detach()).wait()
    return y * h.exp()


def read_before(g: Any, rank: int, x: Tensor, collective: Callable[..., Any]) -> Tensor:
    h = x * 2
    before = h + 1
    before = before * before
    collective(g, rank, h.detach()).wait()
    after = h + 1
    return before + (after * after).sin()


def awaited_later(g: Any, rank: int, x: Tensor, collective: Callable[..., Any]) -> Tensor:
    h = x * 2
    work = collective(g, rank, h.detach())
    meanwhile = (x * 3).exp()
    meanwhile = (meanwhile * meanwhile).sin()
    work.wait()
    return meanwhile * h.sin() + h.cos() * x


PROGRAMS = (at_once, saved_before, read_before, awaited_later)


@pytest.fixture(scope="module")
def groups() -> list[Any]:
    return two_ranks()


def on_both(groups: list[Any], program: Any, collective: Any, policy: Any) -> list[Tensor | None]:
    """Results and gradients of both ranks; None for a gradient that backward refuses."""
    results: dict[int, list[Tensor | None]] = {}

    def run(rank: int) -> None:
        x = (torch.arange(1.0, 5.0, dtype=torch.float64) * 0.3 + rank).requires_grad_()
        with contextlib.nullcontext() if policy is None else ebb.region(policy):
            out = program(groups[rank], rank, x, collective)
        gradient = None
        try:
            (gradient,) = torch.autograd.grad(out.sum(), x)
        except RuntimeError as error:  # gloo copies some results with an op that moves a version
            assert "modified by an inplace operation" in str(error)  # noqa: PT017
        results[rank] = [out.detach().clone(), gradient]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results[0] + results[1]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_gradients_are_those_of_what_the_collective_wrote(groups, name, program, policy):
    expected = on_both(groups, program, COLLECTIVES[name], None)

    actual = on_both(groups, program, COLLECTIVES[name], POLICIES[policy])

    assert all(map(same_bits, actual, expected))
