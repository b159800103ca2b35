"""A collective that writes to a tensor is a write, whatever its schema says.

First torch.distributed's functions as users call them, on two processes; then the methods of
process groups and of their backends, each rank a thread.
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
from ebb_tests import exactness
from ebb_tests.exactness import same_bits
from ebb_tests.other_threads import together
from ebb_tests.ranks.collectives import WAYS, WRITES, rank, write
from ebb_tests.ranks.comparing import POLICIES, assert_exact, prompt_accelerator, run
from ebb_tests.ranks.in_one_process import two_ranks
from ebb_tests.ranks.two_ranks import on_two_ranks

# Situations. `write(h)` runs a collective that writes to h, a tensor of four rows; it calls its
# second argument while the collective runs.


class Through(torch.autograd.Function):
    """Megatron-LM's `reduce_from_tensor_model_parallel_region`, for any collective."""

    @staticmethod
    def forward(ctx, t, write):
        write(t)
        return t

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 0.5, None


def returned_by_a_function(x, write):
    return Through.apply(x * 2, write).sin()


def between_two_functions(x, write):
    h = Through.apply((x * 2).sin(), write)
    return (h.exp() * h).cos()


def computed_and_not_read_before(x, write):
    h = (x * 2).detach()
    write(h)
    return (x * h).exp() + h.sin()


def saved_as_a_result_before(x, write):
    h = x.exp()
    write(h.detach())
    return (h * x).sin()


def saved_as_an_input_before(x, write):
    """Eager's saved h is the same memory, and no version moves: its backward sees the write."""
    h = x * 2
    y = h.sin()
    write(h.detach())
    return y * h.exp()


def read_before_and_after(x, write):
    h = (x * 2).detach()
    before = (x * h.sin()).exp()
    write(h)
    after = (x * h.sin()).exp()
    return before * after.cos()


def written_twice(x, write):
    h = (x * 2).detach()
    write(h)
    first = (x * (h + 1)).sin()
    h.mul_(0.5)
    write(h)
    return first * (x * (h + 1)).sin()


def other_work_before_the_wait(x, write):
    h = x * 2
    meanwhile = []
    write(h.detach(), lambda: meanwhile.append((x * 3).exp()))
    return (meanwhile[0] * meanwhile[0]).sin() * h.sin() + h.cos() * x


def a_view(x, write):
    h = (torch.cat([x, x, x]) * 2).detach()
    write(h[4:8])
    return (torch.cat([x, x, x]) * h).exp()


def base_of_an_earlier_view(x, write):
    h = (x * 2).detach()
    rows = h[1:3]
    write(h)
    return (x[1:3] * rows.sin()).exp()


def a_result_of_full(x, write):
    h = torch.full(x.shape, x.detach().flatten()[0].item(), dtype=x.dtype)
    before = (x * h.sin()).exp()
    write(h)
    return before * (x * h.sin()).exp()


def a_result_of_empty(x, write):
    h = torch.empty_like(x).detach()
    with torch.no_grad():
        h.copy_(x)
    write(h)
    return (x * h.sin()).exp()


IN_ONE_REGION = {
    f.__name__: f
    for f in (
        returned_by_a_function,
        between_two_functions,
        computed_and_not_read_before,
        saved_as_a_result_before,
        saved_as_an_input_before,
        read_before_and_after,
        written_twice,
        other_work_before_the_wait,
        a_view,
        base_of_an_earlier_view,
        a_result_of_full,
        a_result_of_empty,
    )
}


def result_and_gradient(y, x):
    """The gradient is None if backward refuses: some of gloo's own copies move a version."""
    try:
        (gradient,) = torch.autograd.grad(y.sum(), x)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        gradient = None
    return {"result": y, "gradient": gradient}


@pytest.mark.parametrize("situation", IN_ONE_REGION)
@pytest.mark.parametrize("collective", WRITES)
@on_two_ranks
def test_collective_in_a_region_is_a_write(collective, situation):
    for way in WAYS:

        def train(inside, way=way):
            torch.manual_seed(rank())
            x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
            with inside.region():
                y = IN_ONE_REGION[situation](x, lambda h, *then: write(collective, h, way, *then))
            # Every situation recomputes and offloads this, whatever becomes of what was written.
            with inside.region():
                y = (y * 2 + 1).tanh().exp()
            return result_and_gradient(y, x)

        assert_exact(train)


# A collective that writes to what an earlier region computed, outside of regions or in another. No
# version moves, so eager's backward reads what was written where it saved that tensor itself, and
# goes on. ebb gives eager's gradients, or raises as for any write to what backward needs.


def computed_from_it_before(x, first, second, write):
    with first():
        h = x * 2
        out = (h + 1).sin()
    with second():
        return out + Through.apply(h, write).exp()


def saved_before(x, first, second, write):
    with first():
        h = x * 2
        out = h.sin()
    with second():
        return out + Through.apply(h, write).exp()


def saved_as_a_result(x, first, second, write):
    with first():
        h = x.exp()
        out = h + 1
    with second():
        return (out * x).sin() + Through.apply(h, write)


def not_needed(x, first, second, write):
    """As in Megatron-LM: the collective reduces a product before any operator has read it."""
    with first():
        h = x.sin() @ x.t()
    with second():
        return Through.apply(h, write).exp()


def without_autograd(x, first, second, write):
    with first():
        h = (x * 2).detach()
        out = (h + 1).sin() * x
    with second():
        write(h)
        return out + h.exp() * x


# In these, eager's backward does not read the written tensor. So ebb's backward must not raise,
# unless the tensor was offloaded: ebb cannot recompute that one.
NEVER_REFUSED = {f.__name__: f for f in (computed_from_it_before, not_needed, without_autograd)}
AFTER_A_REGION = NEVER_REFUSED | {f.__name__: f for f in (saved_before, saved_as_a_result)}


@pytest.mark.parametrize("place", ["outside of regions", "in another region"])
@pytest.mark.parametrize("situation", AFTER_A_REGION)
@pytest.mark.parametrize("collective", WRITES)
@on_two_ranks
def test_collective_after_a_region_is_a_write(collective, situation, place):
    for way in WAYS:

        def train(inside, way=way):
            torch.manual_seed(rank())
            x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
            second = inside.region if place == "in another region" else contextlib.nullcontext
            y = AFTER_A_REGION[situation](
                x, inside.region, second, lambda h: write(collective, h, way)
            )
            return result_and_gradient(y, x)

        expected = run(train, None)
        for name, policy in POLICIES.items():
            with prompt_accelerator():
                actual = run(train, policy)
            assert same_bits(actual["result"], expected["result"]), name
            may_refuse = situation not in NEVER_REFUSED or name == "mixed"
            refused = actual["gradient"] is None and may_refuse
            assert refused or same_bits(actual["gradient"], expected["gradient"]), name
    assert ebb.stats()["total"]["entered"] > 0


# Methods of process groups, and of their backends, which no operator shows


def other(rank: int, *shape: int) -> Tensor:
    return torch.full(shape or (4,), 0.25 * (rank + 1), dtype=torch.float64)


# Calls on group g by rank r, with a tensor h of four elements that the region computed.
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
C10D = torch._C._distributed_c10d
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


@pytest.fixture(scope="module")
def levels() -> dict[str, list[Any]]:
    groups = two_ranks()
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    return {"of a process group": groups, "of a backend": backends}


def on_both(groups: list[Any], situation: str, collective: Any, policy: Any) -> list[Any]:
    """Results and gradients of both ranks."""
    results: dict[int, list[Tensor | None]] = {}

    def train(rank: int) -> None:
        def write(h: Tensor, then: Callable[[], None] = lambda: None) -> None:
            work = collective(groups[rank], rank, h)
            then()
            work.wait()

        x = (torch.arange(1.0, 5.0, dtype=torch.float64) * 0.3 + rank).requires_grad_()
        with contextlib.nullcontext() if policy is None else ebb.region(policy):
            y = IN_ONE_REGION[situation](x, write)
        results[rank] = list(result_and_gradient(y, x).values())

    together(train, 2)
    return results[0] + results[1]


def assert_written(groups: list[Any], situation: str, collective: Any, *policies: str) -> None:
    expected = on_both(groups, situation, collective, None)
    for policy in policies:
        actual = on_both(groups, situation, collective, exactness.POLICIES[policy])
        assert all(map(same_bits, actual, expected)), policy


@pytest.mark.parametrize("situation", IN_ONE_REGION)
@pytest.mark.parametrize(
    ("level", "name"),
    [("of a process group", name) for name in METHODS]
    + [("of a backend", name) for name in OF_BACKENDS],
)
def test_method_in_a_region_is_a_write(levels, level, name, situation):
    assert_written(levels[level], situation, METHODS[name], *exactness.POLICIES)


def test_every_method_of_a_backend_is_known():
    classes = [one for one in vars(C10D).values() if isinstance(one, type)]
    backends = [one for one in classes if issubclass(one, C10D.Backend)]
    methods = {name for one in backends for name in vars(one) if not name.startswith("__")}

    assert C10D.ProcessGroupGloo in backends
    assert methods - NO_WRITES - set(COLLECTIVES) == set()
    assert {name.split()[0] for name in OF_BACKENDS} - {"send"} == set(COLLECTIVES)


def test_method_writes_to_output_when_called_by_name_with_input_first(levels):
    def by_name(group: Any, rank: int, h: Tensor) -> Any:
        return group._allgather_base(input=other(rank, 2), output=h)

    assert_written(levels["of a backend"], "a_result_of_full", by_name, "recompute_all")
