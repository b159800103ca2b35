"""A collective that writes to a tensor is a write, whatever its schema says.

First torch.distributed's functions as users call them, on two processes; then the methods of
process groups that they call, each rank a thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ebb
from ebb._region.unseen_writes import COLLECTIVES
from ebb_tests.exactness import POLICIES, same_bits
from ebb_tests.other_threads import together
from ebb_tests.ranks.collectives import WAYS, WRITES, rank, write
from ebb_tests.ranks.comparing import assert_exact
from ebb_tests.ranks.in_one_process import two_ranks
from ebb_tests.ranks.two_ranks import on_two_ranks


class Through(torch.autograd.Function):
    """Megatron-LM's `reduce_from_tensor_model_parallel_region`, for any collective."""

    @staticmethod
    def forward(ctx, t, name, way):
        write(name, t, way)
        return t

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 0.5, None, None


def returned_by_a_function(x, name, way):
    return Through.apply(x * 2, name, way).sin()


def between_two_functions(x, name, way):
    h = Through.apply((x * 2).sin(), name, way)
    return (h.exp() * h).cos()


def a_computed_tensor(x, name, way):
    h = (x * 2).detach()
    write(name, h, way)
    return (x * h).exp() + h.sin()


def saved_before_the_write(x, name, way):
    h = x.exp()  # saves its result
    write(name, h.detach(), way)
    return (h * x).sin()


def read_before_and_after(x, name, way):
    h = (x * 2).detach()
    before = (x * h.sin()).exp()
    write(name, h, way)
    after = (x * h.sin()).exp()
    return before * after.cos()


def written_twice(x, name, way):
    h = (x * 2).detach()
    write(name, h, way)
    first = (x * (h + 1)).sin()
    h.mul_(0.5)
    write(name, h, way)
    return first * (x * (h + 1)).sin()


def a_view(x, name, way):
    h = (torch.cat([x, x, x]) * 2).detach()
    write(name, h[4:8], way)
    return (torch.cat([x, x, x]) * h).exp()


def written_below(x, name, way):
    """A view of it was made before."""
    h = (x * 2).detach()
    rows = h[1:3]
    write(name, h, way)
    return (x[1:3] * rows.sin()).exp()


def a_leaf(x, name, way):
    h = torch.full((4, 3), 0.3 + rank(), dtype=x.dtype)
    before = (x * h.sin()).exp()
    write(name, h, way)
    return before * (x * h.sin()).exp()


def an_empty_tensor(x, name, way):
    h = torch.empty_like(x).detach()
    with torch.no_grad():
        h.copy_(x)
    write(name, h, way)
    return (x * h.sin()).exp()


TARGETS = {
    f.__name__: f
    for f in (
        returned_by_a_function,
        between_two_functions,
        a_computed_tensor,
        saved_before_the_write,
        read_before_and_after,
        written_twice,
        a_view,
        written_below,
        a_leaf,
        an_empty_tensor,
    )
}


def gradient_or_none(loss, x):
    """None where a saved tensor was written: gloo's own copies move the version, sums do not."""
    try:
        return torch.autograd.grad(loss, x)[0]
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return None


def assert_written(collective, target, way):
    def train(inside):
        torch.manual_seed(rank())
        x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
        with inside.region():
            y = TARGETS[target](x, collective, way)
        # What every target recomputes and offloads, whatever becomes of what was written.
        with inside.region():
            loss = (y * 2 + 1).tanh().exp().sum()
        return {"loss": loss, "gradient": gradient_or_none(loss, x)}

    assert_exact(train)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("collective", WRITES)
@on_two_ranks
def test_a_collective_writes_to(collective, target):
    for way in WAYS:
        assert_written(collective, target, way)


# Methods of process groups


def other(rank: int, *shape: int) -> Tensor:
    return torch.full(shape or (4,), 0.25 * (rank + 1), dtype=torch.float64)


# What rank r does with a computed tensor h of four elements, in its group g.
METHODS: dict[str, Callable[[Any, int, Tensor], Any]] = {
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

    together(run, 2)
    return results[0] + results[1]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", METHODS)
def test_gradients_are_those_of_what_the_collective_wrote(groups, name, program, policy):
    expected = on_both(groups, program, METHODS[name], None)

    actual = on_both(groups, program, METHODS[name], POLICIES[policy])

    assert all(map(same_bits, actual, expected))


# Methods of what a process group's collectives come down to, which no operator shows

C10D = torch._C._distributed_c10d
CPU = torch.device("cpu")
OF_BACKENDS = [name for name in METHODS if hasattr(C10D.Backend, name.split()[0])]
# They write to no tensor of the program's.
NO_WRITES = {
    "_end_coalescing", "_get_backend_name", "_get_sequence_number_for_group",
    "_set_default_timeout", "_set_sequence_number_for_group", "_start_coalescing", "abort",
    "allocate_tensor", "barrier", "create_default_device", "create_device", "_create_internal",
    "eager_connect_single_device", "get_error", "mem_allocator", "memory_stats",
    "monitored_barrier", "name", "options", "rank", "resume", "send",
    "setUsePgForSymmMemRendezvous", "set_timeout", "shrink", "shutdown", "size",
    "supports_coalescing", "supports_shrinking", "supports_splitting", "supports_tensor_alloc",
    "supports_time_estimate", "suspend", "wrapped_pg",
    # Kinds of settings and of devices, and what pybind11 adds to all classes.
    "Device", "Options", "_Options", "_pybind11_conduit_v1_",
}  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", OF_BACKENDS)
def test_gradients_are_those_of_what_a_backend_wrote(groups, name, program, policy):
    backends = [group._get_backend(CPU) for group in groups]
    expected = on_both(backends, program, METHODS[name], None)

    actual = on_both(backends, program, METHODS[name], POLICIES[policy])

    assert all(map(same_bits, actual, expected))


def test_every_method_of_a_backend_is_known():
    classes = [one for one in vars(C10D).values() if isinstance(one, type)]
    backends = [one for one in classes if issubclass(one, C10D.Backend)]
    methods = {name for one in backends for name in vars(one) if not name.startswith("__")}

    assert C10D.ProcessGroupGloo in backends
    assert methods - NO_WRITES - set(COLLECTIVES) == set()
    assert {name.split()[0] for name in OF_BACKENDS} - {"send"} == set(COLLECTIVES)


def test_what_a_backend_writes_by_name(groups):
    """What it reads may come first."""

    def by_name(group: Any, rank: int, h: Tensor) -> Any:
        return group._allgather_base(input=other(rank, 2), output=h)

    backends = [group._get_backend(CPU) for group in groups]
    expected = on_both(backends, at_once, by_name, None)

    actual = on_both(backends, at_once, by_name, ebb.policies.recompute_all)

    assert all(map(same_bits, actual, expected))
